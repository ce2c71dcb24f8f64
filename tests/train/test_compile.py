"""Training with compiled blocks: the same losses, the same checkpoints, and one graph for all blocks of one size."""

from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from atoll.core import config
from atoll.core.artifacts import Artifact
from atoll.nets.blocks import compiles_by_default
from atoll.train import resolve_job, train_job
from atoll.train.loop import Requeue
from atoll.train.spec import made_from
from train.conftest import Copy
from train.ranks import log, no_hook, run_ranks
from train.workers import finish, metrics

COMPILED = {"train": {"compile": True}}


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts compiled graphs. They run without code generation, which would take a minute."""
    torch._dynamo.reset()
    found = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=found))
    yield found
    torch._dynamo.reset()


class StopAt:
    """A callback that stops a job at some number of images, after it has listed the tensors of a checkpoint."""

    def __init__(self, images: int) -> None:
        self.images = images
        self.names: set[str] = set()

    def on_step(self, images: int) -> bool:
        return images == self.images

    def on_checkpoint(self, checkpoint: Artifact) -> None:
        for file in checkpoint.folder.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                self.names |= set(opened.keys())


def losses(run: Path, job: str = "experts/000") -> list[float]:
    return [line["loss"] for line in metrics(run, job)]


def train_expert(run: Path, expert: int = 0) -> None:
    train_job(resolve_job(run, config.load(run), "expert", expert=expert))


def test_all_blocks_of_all_experts_of_one_size_share_one_graph(
    new_run: Copy, counter: CompileCounterWithBackend
) -> None:
    run, plain = new_run("run", **COMPILED), new_run("plain")
    train_expert(plain)
    assert counter.frame_count == 0
    train_expert(run)
    assert counter.frame_count == 1, "one graph for both blocks"
    train_expert(run, 1)
    assert counter.frame_count == 1, "no graph for another expert"
    assert losses(run) == pytest.approx(losses(plain), rel=1e-4)


def test_a_job_can_resume_with_and_without_compiled_blocks(new_run: Copy, counter: CompileCounterWithBackend) -> None:
    run, plain = new_run("run", **COMPILED), new_run("plain")
    compiled, other = StopAt(96), StopAt(96)
    specs = [resolve_job(one, config.load(one), "expert", expert=0) for one in (run, plain)]
    assert made_from(specs[0]) == made_from(specs[1])
    for spec, stop in zip(specs, (compiled, other), strict=True):
        with pytest.raises(Requeue):
            train_job(spec, stop)
    assert compiled.names == other.names
    (run / "experts").rename(run / "swapped")
    (plain / "experts").rename(run / "experts")
    (run / "swapped").rename(plain / "experts")
    straight = new_run("straight")
    for one in (run, plain, straight):
        train_expert(one)
    assert counter.frame_count == 1
    for one in (run, plain):
        assert losses(one) == pytest.approx(losses(straight), rel=1e-4)


def test_auto_compiles_on_gpus_only() -> None:
    assert config.resolve({}).train.compile == "auto"
    assert not compiles_by_default(torch.device("cpu"))
    assert not compiles_by_default(torch.device("mps"))


@pytest.mark.slow
def test_generated_code_gives_the_same_losses_and_resumes(new_run: Copy) -> None:
    """With real code generation for the CPU; the second half is trained by another process."""
    run, plain = new_run("run", **COMPILED), new_run("plain")
    with pytest.raises(Requeue):
        train_job(resolve_job(run, config.load(run), "expert", expert=0), StopAt(96))
    for one in (run, plain):
        assert finish(one, "--expert", "0") == 0, (one / "log.txt").read_text()
    assert losses(run) == pytest.approx(losses(plain), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_processes_with_compiled_blocks_equal_one_without(parallel: str, new_run: Copy) -> None:
    run, plain = new_run("run", train={"compile": True, "parallel": parallel}), new_run("plain")
    assert run_ranks(run, "--expert", "0", hook=no_hook) == [0, 0], log(run, 0).read_text()[-3000:]
    assert finish(plain, "--expert", "0") == 0
    assert losses(run) == pytest.approx(losses(plain), rel=1e-3)
