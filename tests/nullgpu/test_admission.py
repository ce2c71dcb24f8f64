"""Admission measures on the accelerator, in float32."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

if "NULLGPU" not in os.environ:
    pytest.skip("THE GPU CODE IS NOT TESTED: it needs the null GPU; run make test-gpu", allow_module_level=True)

import torch
from torch import nn

from atoll.apps.share.measured import check_measured
from atoll.core.artifacts import Artifact
from atoll.core.manifests import EXPERT, ROUTER
from atoll.verify.trust import Policy
from atoll.verify.untrusted import Refused

pytestmark = pytest.mark.slow


@pytest.fixture
def inputs() -> Iterator[list[tuple[str, torch.dtype]]]:
    """Device and dtype of the weights of every linear layer that runs."""
    seen: list[tuple[str, torch.dtype]] = []

    def record(module: nn.Module, arguments: object) -> None:
        del arguments
        if isinstance(module, nn.Linear):
            seen.append((module.weight.device.type, module.weight.dtype))

    handle = nn.modules.module.register_module_forward_pre_hook(record)
    yield seen
    handle.remove()


@pytest.mark.parametrize(("job", "kind"), [("experts/000", EXPERT), ("router", ROUTER)])
def test_networks_are_measured_on_the_device(
    job: str, kind: object, trained_run: Path, inputs: list[tuple[str, torch.dtype]]
) -> None:
    """The null GPU computes nothing, so any verdict may come of the values. Where they were computed is real."""
    artifact = Artifact(trained_run, f"{job}/final")
    data = [Artifact(trained_run, f"data/shards/cluster_{number:03d}") for number in range(1 if kind is EXPERT else 2)]
    with suppress(Refused, ZeroDivisionError):
        check_measured(artifact, artifact.open(kind), data, policy=Policy())  # type: ignore[arg-type]
    assert set(inputs) == {("cuda", torch.float32)}
