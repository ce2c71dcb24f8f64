"""Pipelines of real families that cannot be a base, each with its reason, and the table of the guide."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from atoll.encoders.trace import UntraceableError, trace
from base.test_trace import SMALL, WIDE, recorder
from base.tiny import FAMILIES, scheduler, t5, tokenizer, vae

GUIDE = Path(__file__).parents[2] / "docs/how-to/train-on-a-base-model.md"


def by_class() -> Any:
    network = diffusers.DiTTransformer2DModel(
        num_layers=1, attention_head_dim=8, num_attention_heads=2, sample_size=8, in_channels=4, out_channels=8
    )
    return diffusers.DiTPipeline(network, vae(), diffusers.DDIMScheduler())


def video() -> Any:
    network = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, text_dim=32, ffn_dim=32, num_layers=1, rope_max_seq_len=32
    )
    autoencoder = diffusers.AutoencoderKLWan(base_dim=3, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    return diffusers.WanPipeline(tokenizer(48), t5(), autoencoder, scheduler(shift=7.0), network)


def with_scheduler(kind: type, **settings: Any) -> Any:
    pipe = FAMILIES["stable_diffusion"]()
    pipe.scheduler = kind(**settings)
    return pipe


REFUSED = {
    by_class: ("DiTPipeline", "takes no prompt, only class_labels"),
    video: ("WanPipeline", "neither tokens nor a grid"),
}
SCHEDULERS: dict[str, tuple[type, dict[str, Any]]] = {
    "rescale_betas_zero_snr": (diffusers.DDIMScheduler, {"rescale_betas_zero_snr": True}),
    "thresholding": (diffusers.DPMSolverMultistepScheduler, {"thresholding": True}),
    "trained_betas": (diffusers.DDPMScheduler, {"trained_betas": [0.1, 0.2, 0.3, 0.4]}),
    r"no table of betas \(sigmoid\)": (diffusers.DDPMScheduler, {"beta_schedule": "sigmoid"}),
    "with a number for each step": (diffusers.EulerDiscreteScheduler, {"timestep_type": "continuous"}),
    "EDMEulerScheduler has no table": (diffusers.EDMEulerScheduler, {}),
    "LCMScheduler with the prediction type epsilon is unknown": (diffusers.LCMScheduler, {}),
    "the prediction type learned is unknown": (diffusers.DDIMScheduler, {"prediction_type": "learned"}),
}
"""Schedulers that are refused, by a part of the message."""


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_a_pipeline_that_is_no_base_is_refused_with_its_reason(make: Any) -> None:
    torch.manual_seed(0)
    pipe = make()
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    with pytest.raises(UntraceableError, match=REFUSED[make][1]):
        trace(recorder(pipe, max_sequence_length=48), SMALL, WIDE)


@pytest.mark.parametrize("reason", SCHEDULERS)
def test_a_scheduler_that_is_not_understood_is_refused_with_its_reason(reason: str) -> None:
    kind, settings = SCHEDULERS[reason]
    with pytest.raises(UntraceableError, match=reason):
        trace(recorder(with_scheduler(kind, **settings)), SMALL, WIDE)


def test_the_table_of_the_guide_has_the_tested_pipelines() -> None:
    rows = [line.split("|") for line in GUIDE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    listed = {row[1].strip().strip("`"): row[2].strip() for row in rows}
    traced = {name for name, verdict in listed.items() if verdict == "traced"}
    assert traced == {type(make()).__name__ for make in FAMILIES.values()}
    refused = {name for name, verdict in listed.items() if verdict == "refused"}
    assert refused == {name for name, _ in REFUSED.values()} - traced
