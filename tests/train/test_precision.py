"""The precision of training: chosen by the device, recorded, and never that of a metric."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.apps.share import worker
from atoll.apps.share.store import Store
from atoll.apps.share.worker import Worker
from atoll.core import config
from atoll.core import device as devices
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import ComputeSpec
from atoll.data.dataset import Shards
from atoll.experts.validation import validate
from atoll.nets import Condition
from atoll.train import TrainSpec, build_task, resolve_job, spec, train_job
from atoll.train.loop import Requeue
from atoll.train.spec import made_from
from train.conftest import Copy

GPU = torch.device("cuda", 0)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Let settings be resolved as on a machine with an NVIDIA GPU; networks stay on the CPU."""
    for module in (spec, worker):
        monkeypatch.setattr(module, "device", lambda: GPU)
    monkeypatch.setattr(devices, "_capability", lambda _: capability)


def expert(run: Path, **overrides: str) -> TrainSpec:
    changes = {f"train.{key}": value for key, value in overrides.items()}
    return resolve_job(run, config.load(run, changes), "expert", expert=0)


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), "bfloat16"), ((8, 0), "bfloat16"), ((7, 5), "float32")])
def test_auto_is_bfloat16_on_gpus_that_compute_in_it(
    capability: tuple[int, int], expected: str, new_run: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(only=[0])
    assert config.load(run).train.precision == "auto"
    assert expert(run).settings.precision == "float32"
    pretend_gpu(monkeypatch, capability)
    assert expert(run).settings.precision == expected
    assert made_from(expert(run))["train"]["precision"] == expected
    for explicit in ("float32", "bfloat16"):
        assert expert(run, precision=explicit).settings.precision == explicit


class StopAt32:
    """A callback that stops a job at 32 images."""

    def on_step(self, images: int) -> bool:
        return images == 32

    def on_checkpoint(self, checkpoint: Artifact) -> None:
        assert checkpoint.manifest() is not None


def test_a_job_of_a_gpu_resumes_elsewhere_only_in_its_precision(new_run: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(only=[0])
    with monkeypatch.context() as patch:
        pretend_gpu(patch, (9, 0))
        begun = expert(run)
    with pytest.raises(Requeue):
        train_job(begun, StopAt32())
    with pytest.raises(AtollError, match=r"train.precision was bfloat16, now float32.*change this one back"):
        train_job(expert(run))
    made = train_job(expert(run, precision="bfloat16"))
    assert made.made_from["train"]["precision"] == "bfloat16"


def test_a_contributor_stores_its_precision_in_the_lease(new_run: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with another kind of device takes the job over in the same precision."""
    run = new_run(only=[0])
    pretend_gpu(monkeypatch, (9, 0))
    made = Worker(Store.open("memory://precision"), run, config.load(run))
    assert made._overrides_for(0) == {"train.precision": "bfloat16"}
    made.overrides = {"train.precision": "auto"}
    assert made._overrides_for(0) == {"train.precision": "bfloat16"}
    made.overrides = {"train.precision": "float32"}
    assert made._overrides_for(0) == {"train.precision": "float32"}
    explicit = Worker(Store.open("memory://precision"), run, config.load(run, {"train.precision": "float32"}))
    assert explicit._overrides_for(0) == {}


@pytest.fixture
def tf32() -> Iterator[None]:
    """As on a GPU, where TF32 is on."""
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    for flag in flags:
        flag.allow_tf32 = True
    yield
    for flag, value in zip(flags, before, strict=True):
        flag.allow_tf32 = value


def assert_full_precision() -> None:
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.usefixtures("tf32")
def test_validation_ignores_autocast_and_tf32(prepared: Path) -> None:
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))

    def velocity(x: Tensor, t: Tensor, condition: Condition | None = None) -> Tensor:
        del t, condition
        assert_full_precision()
        return x @ weight

    shards = Shards.open(prepared, [0], "validation")
    plain = validate(velocity, shards, seed=0, conditioning=frozenset())
    with torch.autocast("cpu", torch.bfloat16):
        assert validate(velocity, shards, seed=0, conditioning=frozenset()) == plain
        assert torch.is_autocast_enabled("cpu")
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("kind", ["expert", "router"])
def test_a_network_is_calibrated_and_measured_in_full_precision(kind: str, new_run: Copy) -> None:
    """A DDPM expert, whose bridge is calibrated, and a router, whose temperature is."""
    run = new_run(experts={"default": "ddpm"})
    resolved = resolve_job(run, config.load(run), kind, expert=0 if kind == "expert" else None)
    task, calls = build_task(resolved), []

    def check(*_: object) -> None:
        calls.append(1)
        assert_full_precision()

    task.network.register_forward_pre_hook(check)
    compute = ComputeSpec(images=1, parameters=1, flops=1, seconds=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert task.finish(compute).validation_loss is not None
    assert calls
