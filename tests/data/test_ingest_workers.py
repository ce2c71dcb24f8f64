"""The ingest stage by several workers: the index has the same bytes for any division of the work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hard_sources import KINDS, write_source

from atoll.core.errors import AtollError
from atoll.data.chunks import WorkerShare
from atoll.data.prepare import open_preparation, plan, prepare
from shapes import write_run

CHUNKS = {"folder": 8, "webdataset": 7, "parquet": 9}


def ingested(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.glob("data/ingest/**/*") if path.is_file()}


def write_kinds(folder: Path) -> None:
    """A source and an ingested run of every kind."""
    for kind in KINDS:
        source = write_source(kind, folder / kind)
        prepare(
            folder / "whole" / kind,
            write_run(folder / "whole" / kind, source, data={"chunk": 5, "max_rejects": 0.2}),
            ["ingest"],
        )


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    write_kinds(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_source_has_repeated_ids_and_scattered_rejects(kinds: Path, kind: str) -> None:
    """Ids that recur, splits by the id where there is no caption, and rejects all over the source."""
    index = pq.read_table(kinds / "whole" / kind / "data/ingest/images.parquet").to_pydict()
    assert len(set(index["id"])) == len(index["id"]) >= 30
    assert any("@" in id or id.endswith((".png", ".bmp")) for id in index["id"])
    without = [split for split, captions in zip(index["split"], index["captions"], strict=True) if not captions]
    assert set(without) == {"train", "validation"}
    parts = [pq.read_table(file)["reason"] for file in (kinds / "whole" / kind / "data/ingest/parts").iterdir()]
    assert len(parts) == CHUNKS[kind]
    assert sum(part.null_count < len(part) for part in parts) >= 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [(1, 0), (2, 0, 1), (0, 6, 1, 5, 2, 4, 3)], ids=len)
def test_any_number_of_workers_gives_the_same_bytes(
    kinds: Path, tmp_path: Path, kind: str, order: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    config = write_run(run, kinds / kind, data={"chunk": 5, "max_rejects": 0.2})
    for index in order[:-1]:
        prepare(run, config, ["ingest"], worker=WorkerShare(index, len(order)))
        state = plan(open_preparation(run, config))[0]["state"]
        assert f"this worker is done; all workers together: {state}" in capsys.readouterr().out
        assert state.endswith(f" of {CHUNKS[kind]} chunks")
    prepare(run, config, ["ingest"], worker=WorkerShare(order[-1], len(order)))
    assert ingested(run) == ingested(kinds / "whole" / kind)


def test_each_worker_decodes_only_its_chunks(kinds: Path, tmp_path: Path) -> None:
    """Damage to an image after its worker has read it is not noticed by another worker."""
    source, run = write_source("folder", tmp_path / "source"), tmp_path / "run"
    config = write_run(run, source, data={"chunk": 5, "max_rejects": 0.2})
    prepare(run, config, ["ingest"], worker=WorkerShare(0, 2))
    first = source / "class-0/000.bmp"
    first.write_bytes(bytes(first.stat().st_size))
    prepare(run, config, ["ingest"], worker=WorkerShare(1, 2))
    assert ingested(run)["rejected.txt"] == ingested(kinds / "whole/folder")["rejected.txt"]


@pytest.mark.parametrize("workers", [1, 3])
def test_too_many_rejects_of_all_workers_together_are_an_error(kinds: Path, tmp_path: Path, workers: int) -> None:
    """No worker exceeds the limit alone; the one that joins the parts does. Chunks with a reject are read again."""
    source, run = write_source("folder", tmp_path / "source"), tmp_path / "run"
    config = write_run(run, source, data={"chunk": 5, "max_rejects": 0.11})  # four of 37 images
    fifth = source / "class-2/012.bmp"
    good = fifth.read_bytes()
    fifth.write_bytes(bytes(len(good)))  # of the same size, so the fingerprint does not change
    for _ in range(2):
        for index in range(workers - 1):
            prepare(run, config, ["ingest"], worker=WorkerShare(index, workers))
        with pytest.raises(AtollError, match=r"5 of 37 images are unusable, (.|\n)* listed in metadata.jsonl"):
            prepare(run, config, ["ingest"], worker=WorkerShare(workers - 1, workers))
        assert len((run / "data/ingest/rejected.txt").read_text().splitlines()) == 5
    fifth.write_bytes(good)
    for index in range(workers):
        prepare(run, config, ["ingest"], worker=WorkerShare(index, workers))
    assert ingested(run) == ingested(kinds / "whole/folder")


# Workers are forks of one process that has imported everything, as in test_kill.py: workers 0/3, 1/3 and 2/3 at the
# same time, each killed at random moments and started again. Those that end together race for the join and the commit.
WORKERS = """
import json, os, random, signal, sys, time, traceback
from pathlib import Path
import pandas, PIL.Image, pyarrow.dataset, pyarrow.parquet, rich.console, rich.table, torch
from atoll.core import config
from atoll.data.chunks import WorkerShare
from atoll.data.prepare import prepare

folder, wanted, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
PIL.Image.init()

def start(run, worker):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        sys.stdout = open(os.devnull, "w")
        try:
            prepare(run, config.load(run, {}), ["ingest"], worker=WorkerShare(worker, 3))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child

killed = rounds = 0
while killed < wanted:
    for kind in ("folder", "webdataset", "parquet"):
        run = folder / f"run{rounds}" / kind
        run.mkdir(parents=True)
        (run / "atoll.yaml").write_bytes((folder / "whole" / kind / "atoll.yaml").read_bytes())
        left = {start(run, worker): worker for worker in range(3)}
        kills = chance.randint(0, 4)
        while left:
            if kills:
                time.sleep(chance.uniform(0, 0.08))
                os.kill(chance.choice(list(left)), signal.SIGKILL)
                kills -= 1
            child, status = os.waitpid(-1, 0)
            worker, code = left.pop(child), os.waitstatus_to_exitcode(status)
            if code:
                assert code == -signal.SIGKILL, code
                killed += 1
                left[start(run, worker)] = worker
    rounds += 1
print(json.dumps(rounds))
"""


@pytest.mark.parametrize(("kills", "seed"), [(6, 0), pytest.param(300, 1, marks=pytest.mark.slow)], ids=["few", "many"])
def test_concurrent_workers_that_are_killed_and_restarted_give_the_same_bytes(
    kinds: Path, tmp_path: Path, kills: int, seed: int
) -> None:
    (tmp_path / "whole").symlink_to(kinds / "whole")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WORKERS, str(tmp_path), str(kills), str(seed)],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    for round in range(json.loads(done.stdout.splitlines()[-1])):
        for kind in KINDS:
            assert ingested(tmp_path / f"run{round}" / kind) == ingested(kinds / "whole" / kind)
