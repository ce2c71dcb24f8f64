"""Two processes over gloo under torchrun: equal losses, checkpoints that reshard, a worker that is killed."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from train.conftest import Copy, merge
from train.workers import TINY, finish, metrics, start, torchrun, weights
from waiting import HOUR, wait_for

ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def run_two(run: Path, *arguments: str, restarts: int = 0) -> None:
    command = torchrun(run, 2, *arguments, restarts=restarts)
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=HOUR, check=False)
    assert result.returncode == 0, result.stderr[-3000:]


def checkpoint(run: Path, images: int) -> Path:
    return run / f"experts/000/checkpoints/{images:012d}/manifest.json"


def uncommit_after(run: Path, images: int) -> None:
    for folder in (run / "experts/000/checkpoints").iterdir():
        if int(folder.name) > images:
            (folder / "manifest.json").unlink(missing_ok=True)


def kill_two_at(run: Path, images: int) -> None:
    """Train with two processes until a checkpoint, kill them, and invalidate later checkpoints."""
    command = torchrun(run, 2, "--expert", "0", "--train.total_images", "1000000")
    two = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: checkpoint(run, images).exists())
    kill_tree(two.pid)
    two.wait()
    uncommit_after(run, images)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run, "experts/000")]


def assert_close_weights(first: Path, second: Path) -> None:
    a, b = weights(first / "experts/000/final"), weights(second / "experts/000/final")
    assert a.keys() == b.keys()
    for key in a:
        assert (a[key] - b[key]).abs().max() < 2e-4, key


@pytest.fixture(scope="module")
def alone(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that one process trained without interruption."""
    run = tmp_path_factory.mktemp("alone") / "run"
    shutil.copytree(prepared / "data" / "shards", run / "data" / "shards")
    values = merge(yaml.safe_load((prepared / "atoll.yaml").read_text()), TINY)
    (run / "atoll.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    assert finish(run, "--expert", "0") == 0
    return run


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_processes_equal_one_at_equal_batch_size(parallel: str, alone: Path, new_run: Copy) -> None:
    run = new_run(train={"parallel": parallel, "sample_every": 160, "sample_count": 4})
    run_two(run, "--expert", "0")
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
    assert_close_weights(run, alone)
    assert len(list((run / "experts/000/grids").iterdir())) == 1


def test_previews_do_not_change_training(alone: Path, new_run: Copy) -> None:
    """A preview uses the EMA weights; neither the next step nor a checkpoint of that step may have them."""
    run = new_run(train={"parallel": "fsdp2", "save_every": 64, "sample_every": 64, "keep_last": 99})
    kill_two_at(run, 128)
    run_two(run, "--expert", "0")
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)
    assert_close_weights(run, alone)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_checkpoint_of_two_processes_resumes_on_one_and_back(parallel: str, alone: Path, new_run: Copy) -> None:
    """64 images on two processes, 64 on one, the rest on two."""
    run = new_run(train={"parallel": parallel, "save_every": 64, "keep_last": 99})
    kill_two_at(run, 64)
    one = start(run, "--expert", "0", "--train.total_images", "1000000")
    wait_for(lambda: checkpoint(run, 128).exists() or not one.is_alive())
    os.kill(one.pid, signal.SIGKILL)
    one.join()
    uncommit_after(run, 128)
    run_two(run, "--expert", "0")
    assert_close_weights(run, alone)


def test_torchrun_restarts_a_killed_worker_and_the_job_finishes(alone: Path, new_run: Copy) -> None:
    run = new_run(train={"save_every": 16})
    command = torchrun(run, 2, "--expert", "0", restarts=3)
    with (run / "torchrun.txt").open("w") as log:
        agent = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)
    wait_for(lambda: list((run / "experts/000/checkpoints").glob("*/manifest.json")))
    workers = [child for child in psutil.Process(agent.pid).children() if "atoll.cli" in " ".join(child.cmdline())]
    workers[-1].kill()
    assert agent.wait(HOUR) == 0, (run / "torchrun.txt").read_text()[-3000:]
    assert_close_weights(run, alone)


def test_a_signal_to_torchrun_saves_one_checkpoint(alone: Path, new_run: Copy) -> None:
    run = new_run(train={"save_every": 1_000_000, "log_every": 8})
    agent = subprocess.Popen(
        torchrun(run, 2, "--expert", "0", "--train.total_images", "1000000"),
        env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_for(lambda: (run / "experts/000/metrics.jsonl").exists() and losses(run))
    agent.send_signal(signal.SIGTERM)
    agent.wait(HOUR)
    assert len(list((run / "experts/000/checkpoints").glob("*/manifest.json"))) == 1


def kill_tree(pid: int) -> None:
    """Kill torchrun and its workers, and wait for their end: a killed agent leaves its workers behind."""
    agent = psutil.Process(pid)
    processes = [*agent.children(recursive=True), agent]
    for process in processes:
        process.kill()
    psutil.wait_procs(processes)  # until then, the lease is that of a live process


TIMESTEP = """
import torch
from atoll.nets import DiT, DiTConfig
from atoll.nets.blocks import transformer_blocks
from atoll.core.distributed import init_distributed

with init_distributed(torch.device("cpu")) as processes, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
    torch.manual_seed(0)
    network = DiT(DiTConfig(size=8, patch=4, width=32, depth=1, heads=2))
    for weight in network.parameters():
        weight.normal_(std=0.3)
    x = torch.randn(1, 4, 8, 8)
    sharded = processes.wrap(network, "fsdp2", torch.bfloat16, blocks=transformer_blocks(network))
    first, second = (sharded(x, torch.tensor([time])) for time in (700.0, 701.0))
    assert (first - second).abs().max() > 0.01, "both times are 700 in bfloat16"
"""


def test_sharded_networks_get_the_timestep_in_full_precision(tmp_path: Path) -> None:
    script = tmp_path / "timestep.py"
    script.write_text(TIMESTEP)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=HOUR, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
