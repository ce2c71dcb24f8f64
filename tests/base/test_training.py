"""Training of adapters: exact resume, several processes, checkpointing, and its cost."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll import cli
from atoll.core import config as configuration
from atoll.core.artifacts import Artifact
from atoll.core.networks import LoraSpec
from atoll.data.dataset import Shards
from atoll.experts.expert import condition_of
from atoll.nets import build
from atoll.nets.base import BaseExpert, open_base, opened_base
from atoll.nets.quantization import Int8Linear
from atoll.train import resolve_job, train_job
from atoll.train.estimate import fitting_settings, job_bytes
from atoll.train.loop import Requeue
from atoll.train.spec import TrainSpec
from base.conftest import FAMILY, Copy
from base.tiny import pipeline
from train.ranks import log, no_hook, run_ranks
from train.workers import assert_same_weights, weights

FINAL = "experts/000/final"


class StopAt:
    """Stops a job at a number of images, after a checkpoint."""

    def __init__(self, images: int) -> None:
        self.images = images

    def on_step(self, images: int) -> bool:
        return images == self.images

    def on_checkpoint(self, checkpoint: Artifact) -> None:
        assert checkpoint.path("manifest.json").is_file()


@pytest.mark.parametrize(
    "lora", [{}, {"dropout": 0.2}, {"quantize": "int8"}, None], ids=["adapter", "dropout", "int8", "whole"]
)
def test_an_interrupted_job_resumes_to_the_same_weights(lora: dict[str, Any] | None, new_run: Copy) -> None:
    straight, broken = (new_run(name, networks={"default": {"lora": lora}}) for name in ("straight", "broken"))
    for run in (straight, broken):
        spec = spec_of(run)
        if run == broken:
            with pytest.raises(Requeue):
                train_job(spec, StopAt(24))
        train_job(spec)
    assert_same_weights(straight / FINAL, broken / FINAL)


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_two_processes_have_the_weights_of_one(parallel: str, trained_base: Path, new_run: Copy) -> None:
    run = new_run(train={"parallel": parallel})
    assert run_ranks(run, "--expert", "0", hook=no_hook, together=True) == [0, 0], log(run, 0).read_text()
    one, two = weights(trained_base / FINAL), weights(run / FINAL)
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=2e-4)


def test_checkpointing_recomputes_the_same(new_run: Copy, trained_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, checkpoint = [], torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda *a, **k: calls.append(1) or checkpoint(*a, **k))
    run = new_run(train={"activation_checkpointing": True})
    assert cli.main(["train", str(run), "--expert", "0"]) == 0
    assert calls
    one, two = weights(trained_base / FINAL), weights(run / FINAL)
    assert all(torch.allclose(one[name], two[name], atol=2e-4) for name in one)


def test_dropout_is_for_training_alone(prepared_base: Path) -> None:
    spec = spec_of(prepared_base)
    batch = Shards.open(prepared_base, [0], "train").read(np.arange(2))
    expert = BaseExpert(replace(spec.network, lora=LoraSpec(rank=2, dropout=0.5)))
    with torch.no_grad():
        for weight in expert.parameters():
            weight.normal_()
    x, t, condition = batch.mean.float(), torch.tensor([100.0, 900.0]), condition_of(batch, spec.conditioning)
    first, second = (expert.eval()(x, t, condition) for _ in range(2))
    assert first.equal(second)
    assert not expert.train()(x, t, condition).allclose(first)


def test_the_dry_run_says_on_which_gpus_a_job_fits(prepared_base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", str(prepared_base), "--expert", "0", "--dry-run"]
    assert cli.main(command) == 0
    assert len(re.findall(r"fits (12|16|24) GB │ yes ", capsys.readouterr().out)) == 3
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    adapter = sum(weight.numel() for weight in BaseExpert(spec_of(prepared_base).network).parameters())
    assert (found["parameters"], found["gpus"]) == (adapter, {"12": "", "16": "", "24": ""})


def test_memory_is_that_of_the_frozen_base_and_of_the_trained_adapter(prepared_base: Path) -> None:
    spec, gpu = spec_of(prepared_base), torch.device("cuda")
    fields = {**spec.network.network, "num_layers": 10, "num_attention_heads": 400}
    large = replace(spec.network, network=fields)
    changes = {"precision": "bfloat16", "activation_checkpointing": True, "batch_size": 1}
    settings = spec.settings.model_copy(update=changes)
    with torch.device("meta"):
        base, adapter = (sum(map(torch.numel, net.parameters())) for net in (open_base(large), build(large)))
    found = job_bytes(large, spec.shapes, settings, device=gpu, objective=spec.objective)
    # Frozen weights in bfloat16; weights, two moments, EMAs and gradient or cast of the adapter.
    expected = 2 * base + 4 * adapter * (3 + len(settings.ema))
    assert expected < found < expected + 4 * adapter + (1 << 30)
    assert large.lora is not None
    small = replace(large, lora=replace(large.lora, quantize="int8"))
    saved = found - job_bytes(small, spec.shapes, settings, device=gpu, objective=spec.objective)
    assert 0.95 * base < saved <= base  # a byte of two, of all linear layers
    assert fitting_settings([replace(spec, network=large)])[12] is None
    needed = fitting_settings([replace(spec, settings=settings.model_copy(update={"batch_size": 1 << 18}))])
    assert "--train.grad_accum_steps" in str(needed[12])


def spec_of(run: Path) -> TrainSpec:
    return resolve_job(run, configuration.load(run), "expert", expert=0)


def test_gradients_of_an_int8_base_are_those_of_its_expanded_weights(prepared_base: Path) -> None:
    spec = spec_of(prepared_base)
    config = replace(spec.network, lora=LoraSpec(rank=2, quantize="int8"))
    batch = Shards.open(prepared_base, [0], "train").read(np.arange(2))
    x, t, condition = batch.mean.float(), torch.tensor([100.0, 900.0]), condition_of(batch, spec.conditioning)
    expert = BaseExpert(config)
    expanded = pipeline(FAMILY).transformer.requires_grad_(False)
    linear = [layer for layer in expanded.modules() if isinstance(layer, nn.Linear)]
    for layer in linear:
        layer.weight.data = Int8Linear(layer).weight
    with opened_base(config, expanded):
        reference = BaseExpert(config)
    with torch.no_grad():
        for name, weight in expert.named_parameters():
            weight.normal_(std=0.1)
            reference.get_parameter(name).copy_(weight)
    outputs = []
    for own in (expert, reference):
        outputs.append(own(x, t, condition))
        outputs[-1].square().mean().backward()
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    for name, weight in expert.named_parameters():
        torch.testing.assert_close(weight.grad, reference.get_parameter(name).grad, rtol=1e-5, atol=1e-5)
    assert sum(isinstance(layer, Int8Linear) for layer in expert.base.modules()) == len(linear)

    # Its memory, as the dry run counts it, but for one scale for each row
    parts = {**dict(expert.base.named_parameters()), **dict(expert.base.named_buffers())}
    used = sum(part.nbytes for name, part in parts.items() if ".lora_" not in name and not name.endswith(".scale"))
    with torch.device("meta"):
        outline = build(config)
    assert isinstance(outline, BaseExpert)
    assert outline.frozen_bytes(4) == used
