"""kill -9 at random moments of `atoll prepare`: on one machine, the final files have the same bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

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

def attempt(run, seconds):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        sys.stdout = sys.stderr = open(os.devnull, "w")
        os._exit(main(["prepare", str(run)]))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

start = time.monotonic()
assert attempt(folder / "whole", 300) == 0
whole = time.monotonic() - start
killed, runs = 0, []
while killed < kills:
    run = folder / f"run{len(runs)}"
    run.mkdir()
    (run / "atoll.yaml").write_bytes((folder / "whole/atoll.yaml").read_bytes())
    runs.append(run.name)
    while True:
        code = attempt(run, chance.uniform(0, whole) * 0.6 if killed < kills else 300)
        if code == 0:
            break
        assert code == -signal.SIGKILL, code
        killed += 1
print(json.dumps({"runs": runs, "killed": killed}))
"""


def content(run: Path) -> dict[str, bytes]:
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*") if path.is_file()}


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
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    sweep = subprocess.run(
        [sys.executable, "-c", SWEEP, str(tmp_path), str(kills), str(seed)],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    result = json.loads(sweep.stdout.splitlines()[-1])
    assert result["killed"] == kills
    whole = content(tmp_path / "whole")
    assert sum(name.startswith("data/shards/") for name in whole) > 12
    for run in result["runs"]:
        again = content(tmp_path / run)
        assert sorted(again) == sorted(whole)
        assert [name for name in whole if whole[name] != again[name]] == []
    tables = [pq.read_table(file) for file in tmp_path.glob("whole/data/shards/*/*.parquet")]
    ids = [id for table in tables for id in table["id"].to_pylist()]
    assert len(ids) == len(set(ids)) == 99
