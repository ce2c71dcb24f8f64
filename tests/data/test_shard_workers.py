"""The shards by several workers, which divide the clusters: the same bytes for any division, and after kill -9."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.core import config as configuration
from atoll.data.chunks import WorkerShare
from atoll.data.prepare import open_preparation, plan, prepare


def shards(run: Path) -> dict[str, bytes]:
    folder = run / "data/shards"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def without_shards(prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared, tmp_path / "run", ignore=shutil.ignore_patterns("shards"))
    return tmp_path / "run"


@pytest.mark.parametrize("order", [(1, 0), (2, 0, 1), (4, 0, 2, 3, 1)], ids=len)
def test_each_worker_writes_its_clusters(
    prepared: Path, without_shards: Path, order: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    run, expected = without_shards, shards(prepared)
    config, written = configuration.load(run), set()
    clusters = config.clusters.count
    for index in order:
        prepare(run, config, ["shards"], worker=WorkerShare(index, len(order)))
        written |= {f"cluster_{cluster:03d}" for cluster in range(index, clusters, len(order))}
        assert {name.partition("/")[0] for name in shards(run)} == written
        assert shards(run) == {name: data for name, data in expected.items() if name.partition("/")[0] in written}
        state = plan(open_preparation(run, config))[-1]["state"]
        said = capsys.readouterr().out
        if len(written) < clusters:
            assert state == (f"{len(written)} of {clusters} folders" if written else "to do")
            assert f"shards: this worker is done; all workers together: {state}" in said
        else:
            assert state == "done"
    assert shards(run) == expected


# Three workers at the same time. Each is a fork that is killed in the middle of one of its first writes to the disk,
# then three writes later, and so on until it gets through. The first two have the same clusters and race for the
# commits.
WORKERS = """
import os, signal, sys
from pathlib import Path
import pyarrow.parquet, safetensors.torch, torch
from atoll.core import artifacts, config
from atoll.data.chunks import WorkerShare
from atoll.data.prepare import open_preparation, plan, prepare

run, kills = Path(sys.argv[1]), 0
flush = artifacts._flush
plan(open_preparation(run, config.load(run)))  # hashes the weights of the networks once, for all forks

def start(index, survived):
    child = os.fork()
    if child:
        return child
    left = [survived]
    def killing(path):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(path)
    artifacts._flush = killing
    torch.set_num_threads(1)
    try:
        prepare(run, config.load(run), ["shards"], worker=WorkerShare(index, 2))
        os._exit(0)
    finally:
        os._exit(1)

running = {start(index, first): (index, first) for index, first in ((0, 0), (0, 1), (1, 2))}
while running:
    child, status = os.waitpid(-1, 0)
    index, survived = running.pop(child)
    if code := os.waitstatus_to_exitcode(status):
        assert code == -signal.SIGKILL, code
        kills += 1
        running[start(index, survived + 3)] = (index, survived + 3)
print(kills)
"""


def test_workers_that_are_killed_while_they_write_give_the_same_bytes(prepared: Path, without_shards: Path) -> None:
    command = [sys.executable, "-c", WORKERS, str(without_shards)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True)
    assert int(done.stdout.splitlines()[-1]) > 10
    assert shards(without_shards) == shards(prepared)
