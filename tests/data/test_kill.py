"""kill -9 at random moments of `atoll prepare`: on one machine, the final files have the same bytes."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from photographs import BUCKETS, write_photographs_run
from shapes import write_run

# Runs `atoll prepare` in forks of one process that has imported everything, so that the moments of the kills fall into
# the work instead of into imports. Each fork is a process of its own and dies of SIGKILL in the middle of what it does.
SWEEP = """
import json, os, random, signal, sys, time
from pathlib import Path
import diffusers, faiss, pyarrow.parquet, safetensors.torch, torch
from transformers import AutoConfig, AutoModelForTextEncoding, AutoTokenizer, BertModel, CLIPTextModel
from atoll.cli import main
from atoll.data import prepare

folder, kills, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
killed = 0

def start(run, worker, workers):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        sys.stdout = sys.stderr = open(folder / "log.txt", "a")
        os._exit(main(["prepare", str(run), *(["--worker", f"{worker}/{workers}"] if workers > 1 else [])]))
    return child

def finish(run, workers, longest):
    # All workers run at the same time. While kills are left, each is killed within `longest` and started again.
    global killed
    todo, running = list(range(workers)), {}
    while todo or running:
        for worker in todo:
            moment = time.monotonic() + (chance.uniform(0, longest) if killed + len(running) < kills else 3600)
            running[start(run, worker, workers)] = (worker, moment)
        todo = []
        for child, (worker, moment) in list(running.items()):
            if late := time.monotonic() > moment:
                os.kill(child, signal.SIGKILL)
            done, status = os.waitpid(child, 0 if late else os.WNOHANG)
            if done:
                del running[child]
                if code := os.waitstatus_to_exitcode(status):
                    assert code == -signal.SIGKILL, (code, (folder / "log.txt").read_text())
                    killed += 1
                    todo.append(worker)
        time.sleep(0.001)

begin = time.monotonic()
kills, wanted = 0, kills
finish(folder / "whole", 1, 0)
kills, whole = wanted, time.monotonic() - begin
runs = []
while killed < kills:
    run = folder / f"run{len(runs)}"
    run.mkdir()
    (run / "atoll.yaml").write_bytes((folder / "whole/atoll.yaml").read_bytes())
    runs.append(run.name)
    finish(run, int(sys.argv[4]), 0.6 * whole)
print(json.dumps({"runs": runs, "killed": killed}))
"""


def content(run: Path) -> dict[str, bytes]:
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def kill_sweep(folder: Path, kills: int, *, seed: int, workers: int = 1) -> dict[str, bytes]:
    """Prepare `whole` in a folder without, and copies of it with a number of kills; return the files of `whole`.

    Check that the files of all copies have the same bytes.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    sweep = subprocess.run(
        [sys.executable, "-c", SWEEP, str(folder), str(kills), str(seed), str(workers)],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    result = json.loads(sweep.stdout.splitlines()[-1])
    assert result["killed"] == kills
    whole = content(folder / "whole")
    for run in result["runs"]:
        again = content(folder / run)
        assert sorted(again) == sorted(whole)
        assert [name for name in whole if whole[name] != again[name]] == []
    return whole


@pytest.mark.parametrize(
    ("kills", "seed", "changes"),
    [
        (10, 0, {}),
        pytest.param(100, 1, {}, marks=pytest.mark.slow),
        pytest.param(10, 2, {"data": {"flip": True}, "features": {"patch_dimensions": 64}}, marks=pytest.mark.slow),
    ],
    ids=["ten", "hundred", "with patches"],
)
def test_kill_9_at_random_moments_changes_no_byte(
    tmp_path: Path, shapes: Path, kills: int, seed: int, changes: dict[str, dict[str, object]]
) -> None:
    write_run(tmp_path / "whole", shapes, **changes)
    whole = kill_sweep(tmp_path, kills, seed=seed)
    assert sum(name.startswith("data/shards/") for name in whole) > 12
    assert len(shard_ids(tmp_path / "whole")) == 99


def shard_ids(run: Path) -> set[str]:
    """Return the ids of all images in the shards of a run. No image is there twice."""
    tables = [pq.read_table(file) for file in run.glob("data/shards/*/*.parquet")]
    ids = [id for table in tables for id in table["id"].to_pylist()]
    assert len(ids) == len(set(ids))
    return set(ids)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_twenty_kills_with_five_sizes_flips_and_three_captions_change_no_byte(tmp_path: Path, workers: int) -> None:
    """Several workers run at the same time, and the run without kills has one worker."""
    run = tmp_path / "whole"
    write_photographs_run(run)
    whole = kill_sweep(tmp_path, 20, seed=workers, workers=workers)
    assert len(shard_ids(run)) == sum(BUCKETS.values())
    stages = {name.split("/")[1] for name in whole if name.startswith("data/")}
    # .lock is held by the worker that finishes the stages.
    assert stages == {".lock", "ingest", "features", "latents", "patches", "clusters", "text", "shards"}
    sizes, captions = Counter(), Counter()
    for file in run.glob("data/shards/*/*-*.safetensors"):
        tensors = load_file(file)
        _, _, height, width = tensors["mean"].shape
        if file.name.startswith("train"):
            assert tensors["mean_mirrored"].shape == tensors["std_mirrored"].shape == tensors["mean"].shape
        sizes[f"{8 * width}x{8 * height}"] += len(tensors["mean"])
        captions.update(tensors["captions"].tolist())
    assert sizes == BUCKETS
    # Every image of the source has three; captions of the other split are left out.
    assert set(captions) <= {1, 2, 3}
    assert captions[3] > sum(BUCKETS.values()) / 2
