"""Jobs with ModernDiT: exact resume, sampling and export of the result, and two processes."""

from pathlib import Path

import pytest
import torch

import atoll
from atoll.apps.models.export import export
from atoll.core import config
from atoll.core.networks import FAMILIES
from atoll.train import resolve_job, train_job
from atoll.train.loop import Requeue
from train.conftest import Copy
from train.ranks import log, no_hook, run_ranks
from train.test_compile import StopAt, losses
from train.workers import assert_same_weights

TINY = {"name": "ModernDiT-XS/8", "width": 32, "depth": 2, "heads": 2}
MODERN = {"networks": {"default": TINY}, "router": {"network": TINY, "total_images": 160}}


def test_a_stopped_job_resumes_to_the_same_weights_and_samples(new_run: Copy, tmp_path: Path) -> None:
    straight, broken = (new_run(name, **MODERN) for name in ("straight", "broken"))
    jobs = [("expert", {"expert": number}) for number in range(3)] + [("router", {})]
    for kind, which in jobs:
        train_job(resolve_job(straight, config.load(straight), kind, **which))
    for kind, which in (jobs[0], jobs[-1]):
        spec = resolve_job(broken, config.load(broken), kind, **which)
        assert FAMILIES["ModernDiT"].items() <= spec.network.to_dict().items()
        with pytest.raises(Requeue):
            train_job(spec, StopAt(96))
        train_job(spec)
        assert_same_weights(straight / spec.job / "final", broken / spec.job / "final")
    how = {"num_inference_steps": 2, "seed": 3}
    samples = atoll.load(straight).generate(num_images=2, **how)
    assert bool(samples.latents.isfinite().all())
    export(straight, tmp_path / "exported")
    assert torch.equal(atoll.load(tmp_path / "exported").generate(num_images=2, **how).latents, samples.latents)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_two_processes_with_fsdp2_equal_one(new_run: Copy, precision: str) -> None:
    train = {"precision": precision, "activation_checkpointing": True}
    alone = new_run("alone", **MODERN, train=train)
    train_job(resolve_job(alone, config.load(alone), "expert", expert=0))
    run = new_run("two", **MODERN, train={**train, "parallel": "fsdp2"})
    assert run_ranks(run, "--expert", "0", hook=no_hook) == [0, 0], log(run, 0).read_text()
    # bfloat16 has 8 significant bits: the two halves of a batch are rounded differently.
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4 if precision == "float32" else 1e-2)
