"""The memory estimate of `atoll train --dry-run` against the allocator of torch, which is real on the null GPU."""

import gc
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

if "NULLGPU" not in os.environ:
    pytest.skip("THE GPU CODE IS NOT TESTED: it needs the null GPU; run make test-gpu", allow_module_level=True)

import torch
from test_gpu_sampling import finite_results

import nullgpu  # noqa: F401 - it disables cuDNN, which is not replaced
from atoll.core import config as configuration
from atoll.core.artifacts import Artifact
from atoll.train.estimate import WORKSPACE, JobCosts
from atoll.train.job import train_job
from atoll.train.loop import Requeue
from atoll.train.spec import resolve_job

pytestmark = pytest.mark.slow
TOLERANCE = 0.25
STEPS = 3
"""The first step creates the optimizer's state and, with DDP, the final buckets."""
RANKS = 2
RANK = """
import json, sys
from pathlib import Path
from test_memory import measure
from atoll.core import distributed

# NCCL needs a real GPU.
distributed.group_options = lambda device: {"backend": "gloo", "timeout": distributed.STEP_TIMEOUT}
print(json.dumps(measure(Path(sys.argv[1]), **json.loads(sys.argv[2]))))
"""


@dataclass
class Peak:
    """Measures the peak of the last step, or of the preview after it."""

    bytes: int = 0
    steps: int = 0

    def on_step(self, images: int) -> bool:
        del images
        self.steps += 1
        self.bytes = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        # The job stops before it is validated: on the null GPU all metrics are nonsense.
        return self.steps == STEPS

    def on_checkpoint(self, checkpoint: Artifact) -> None:
        del checkpoint


def measure(run: Path, **overrides: str) -> tuple[int, int]:
    """Return the estimated and the measured bytes of some steps of the first expert."""
    gc.collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated() - WORKSPACE
    assert left < 1 << 20, "only cuBLAS's workspace and a few constants are left of the job before"
    torch.cuda.reset_peak_memory_stats()
    settings = {"train.log_every": "1000000", "train.save_every": "1000000", **overrides}
    config = configuration.load(run, {key.replace("__", "."): value for key, value in settings.items()})
    spec, peak = resolve_job(run, config, "expert", expert=0), Peak()
    with pytest.raises(Requeue):
        train_job(spec, peak)
    return JobCosts.of(spec).bytes, peak.bytes


@pytest.fixture
def fresh(run: Path, tmp_path: Path) -> Path:
    """A copy of the prepared run."""
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("network", "batch"), [("DiT-XS/2", "16"), ("DiT-S/2", "64"), ("DiT-B/2", "4"), ("ModernDiT-S/2", "64")]
)
def test_the_estimate_of_a_step(fresh: Path, *, network: str, batch: str, precision: str, checkpointing: str) -> None:
    estimate, measured = measure(
        fresh, networks__default=network, train__batch_size=batch, train__precision=precision,
        train__activation_checkpointing=checkpointing,
    )  # fmt: skip
    assert estimate == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("network", "batch"), [("DiT-S/2", "64"), ("DiT-B/2", "2")])
def test_the_estimate_of_a_step_with_muon(fresh: Path, *, network: str, batch: str, precision: str) -> None:
    """With two images, the update needs more memory than the activations."""
    estimate, measured = measure(
        fresh, networks__default=network, train__batch_size=batch, train__precision=precision, train__optimizer="muon"
    )
    assert estimate == pytest.approx(measured, rel=TOLERANCE)


def test_the_estimate_with_gradient_accumulation(fresh: Path) -> None:
    estimate, measured = measure(
        fresh, networks__default="DiT-S/2", train__batch_size="16", train__grad_accum_steps="4"
    )
    assert estimate == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_estimate_of_a_preview(fresh: Path, monkeypatch: pytest.MonkeyPatch, *, precision: str) -> None:
    """The preview of 64 images needs more memory than a step of two."""
    finite_results(monkeypatch)
    small = {
        "networks__default": "DiT-S/2", "train__batch_size": "2", "train__activation_checkpointing": "true",
        "train__precision": precision,
    }  # fmt: skip
    step, _ = measure(fresh, **small)
    shutil.rmtree(fresh / "experts")
    estimate, measured = measure(fresh, **small, train__sample_every="2", train__sample_count="64")
    assert estimate > 1.2 * step
    assert estimate == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("parallel", "precision", "checkpointing"),
    [
        ("ddp", "float32", "false"),
        ("ddp", "bfloat16", "true"),
        ("fsdp2", "float32", "true"),
        ("fsdp2", "bfloat16", "false"),
    ],
)
def test_the_estimate_of_two_processes(fresh: Path, *, parallel: str, precision: str, checkpointing: str) -> None:
    measure_two(
        fresh, networks__default="DiT-S/2", train__batch_size="32", train__precision=precision,
        train__activation_checkpointing=checkpointing, train__parallel=parallel,
    )  # fmt: skip


def test_the_estimate_of_two_processes_with_muon(fresh: Path) -> None:
    """With one image for each, the update needs more memory than the activations."""
    measure_two(
        fresh, networks__default="DiT-B/2", train__batch_size="2", train__precision="bfloat16", train__optimizer="muon"
    )


def measure_two(run: Path, **overrides: str) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    processes = []
    for rank in range(RANKS):
        environment = {
            **os.environ,
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }  # fmt: skip
        command = [sys.executable, "-c", RANK, str(run), json.dumps(overrides)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=3600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * RANKS
    estimate, measured = json.loads(outputs[0].splitlines()[-1])  # the main process counts its steps
    assert estimate == pytest.approx(measured, rel=TOLERANCE)
