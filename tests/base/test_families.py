"""Tiny pipelines of many families: our own loop has their states, and a mixed batch is each image alone."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.core.networks import BaseConfig, LoraSpec, TraceSpec, read_network
from atoll.encoders import base_pipeline, trace
from atoll.nets import Condition, arguments, base
from atoll.nets.arguments import ArgumentTable
from atoll.nets.base import FOLDERS, BaseExpert, network_arguments, prediction
from base.test_trace import SMALL, WIDE, recorder
from base.tiny import FAMILIES, OPTIONS, pipeline

PROMPTS = ["", "a small red cube", "two birds", "a lighthouse at night, far away"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_traced_called_and_adapted(family: str, tmp_path: Path) -> None:
    pipe = pipeline(family)
    found, plain, _ = trace.trace(recorder(pipe, **OPTIONS.get(family, {})), SMALL, WIDE)

    # States are moved, scaled and shifted latents of the autoencoder.
    moved = trace.unpacking(plain, WIDE)
    state = torch.randn(2, moved.order.numel())
    torch.testing.assert_close(moved.pack(moved.unpack(state)), state, rtol=1e-5, atol=1e-5)

    network = getattr(pipe, plain.slot)
    sample = check_own_loop(found, plain, network)
    channels = sample.shape[-1] if found.packed else sample.shape[1]
    side = round((sample.numel() // channels) ** 0.5)
    network.save_pretrained(tmp_path)
    FOLDERS[family] = tmp_path
    fields = json.loads(json.dumps(dict(network.config), default=str))
    config = BaseConfig(
        base="local", weights=family, network_class=type(network).__name__,
        network={name: value for name, value in fields.items() if not name.startswith("_")},
        channels=channels, trace=found, lora=LoraSpec(rank=2, alpha=4.0),
    )  # fmt: skip
    assert read_network(json.loads(json.dumps(config.to_dict()))) == config
    table = ArgumentTable([plain.arguments([prompt], SMALL) for prompt in PROMPTS], found.batching)
    check_adapters(config, table, torch.randn(4, channels, side, side))


def check_own_loop(found: TraceSpec, plain: trace.Recorder, network: Any) -> torch.Tensor:
    """Check that our own loop has the states of the pipeline with its own network; return the first state."""
    prompt, process = ["a lighthouse at night"], trace.Process.of(plain.pipe.scheduler)
    steps = plain.run(prompt, SMALL, steps=4, seed=3, network=lambda given: network(**given))
    condition, x = plain.arguments(prompt, SMALL), steps[0].sample
    with torch.no_grad():
        for step in steps:
            torch.testing.assert_close(x, step.sample, rtol=1e-5, atol=1e-5)
            timestep = process.schedule.timestep(torch.tensor([step.time]))
            given = network_arguments(found, x, timestep / 1000, [condition])
            output = found.sign * prediction(network(**given), x)
            x = process.following(output, x, step.time, step.next_time)
    torch.testing.assert_close(x, steps[-1].result, rtol=1e-5, atol=1e-5)
    return steps[0].sample


def check_adapters(config: BaseConfig, table: ArgumentTable, x: torch.Tensor) -> None:
    """Check batches of several prompts over three adapters of one base, and their gradients."""

    def condition(*rows: int) -> Condition:
        return Condition(arguments=torch.tensor(rows), table=table)

    experts = [with_effect(BaseExpert(config)) for _ in range(3)]
    t, rows, outputs = torch.tensor([100.0, 500.0, 900.0, 20.0]), (1, 2, 3, 2), []
    with torch.no_grad():
        for expert in experts:
            together = expert(x, t, condition(*rows))
            alone = [expert(x[[place]], t[[place]], condition(row)) for place, row in enumerate(rows)]
            torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)
            outputs.append(together)
        dropped = experts[0](x, t, condition(*rows).drop(torch.tensor([True, False, False, True])))
        torch.testing.assert_close(dropped, experts[0](x, t, condition(0, 2, 3, 0)), rtol=1e-6, atol=1e-6)
        # Adapters differ, and none has changed another.
        assert torch.equal(experts[0](x, t, condition(*rows)), outputs[0])
    assert not torch.allclose(outputs[0], outputs[1])
    assert all(expert.base is experts[0].base for expert in experts)

    # Only the adapter has gradients.
    experts[1](x, t, condition(*rows)).square().mean().backward()
    with_gradient = {id(parameter) for parameter in experts[0].base.parameters() if parameter.grad is not None}
    assert with_gradient
    assert with_gradient <= {id(parameter) for parameter in experts[1].parameters()}


def with_effect(expert: BaseExpert) -> BaseExpert:
    """Give an adapter an effect: a new one has none."""
    with torch.no_grad():
        for name, parameter in expert.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return expert


def test_no_family_is_named_in_the_code() -> None:
    text = "".join(inspect.getsource(module).lower() for module in (trace, base_pipeline, arguments, base))
    assert not [name for name in FAMILIES if name in text]
