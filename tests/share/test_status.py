"""The status of a run while it trains."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from atoll.apps.share.status import JobStatus, as_table, status
from atoll.apps.share.store import Store
from train.conftest import Copy
from train.workers import finish


def test_the_total_of_a_job_is_that_of_its_metrics(new_run: Copy) -> None:
    """The router trains on another number of images than the experts."""
    run = new_run(train={"total_images": 64}, router={"total_images": 96})
    assert finish(run, "--router") == 0
    (run / "router/final/manifest.json").rename(run / "router/manifest.json")  # as if it were still training
    line = next(line for line in status(Store.open(run)) if line.job == "router")
    assert (line.images, line.total) == (96, 96)


def test_a_job_is_done_only_if_its_result_exists(new_run: Copy) -> None:
    run = new_run(router={"total_images": 16})
    assert finish(run, "--router") == 0
    assert [(line.job, line.state) for line in status(Store.open(run))][-1] == ("router", "done")
    (run / "router/final/config.json").unlink()
    damaged = status(Store.open(run))[-1]
    assert (damaged.state, "config.json is missing" in damaged.why) == ("failed", True)
    shutil.rmtree(run / "router")
    deleted = status(Store.open(run))[-1]
    assert (deleted.job, deleted.state, deleted.images) == ("router", "missing", 0), "its lease still ends as done"


def test_the_table_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    here = socket.gethostname()
    lines = [
        JobStatus("experts/000", "done", f"{here}:12 local-3 4", loss=0.123456),
        JobStatus(
            "experts/001", "running", f"{here}:13 local-3 4", 1_234_567, 6_400_000, 123.4, 41_861, 3, "", 0.2, 1e-4
        ),
        JobStatus("experts/002", "free", f"{here}:14 local-3 4", 600, 6_400_000, 123.4),
        JobStatus("experts/003", "free"),
        JobStatus("router", "missing"),
    ]
    for shown in (
        lines,
        [*lines, JobStatus("student", "stale", f"a-host-with-a-long-name.example:7 x {'0' * 8}", 1, 9)],
    ):
        Console(width=80).print(as_table(shown, "runs/mine"))
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80
        rows = [line.split() for line in text.splitlines() if "/0" in line]
        assert rows[0][:3] == ["experts/000", "done", "0.1235"]
        assert rows[1][:9] == ["experts/001", "running", "19%", "of", "6,400,000", "123.4", "11.6", "h", "0.2"]
        assert rows[2][:5] == ["experts/002", "stopped", "0%", "of", "6,400,000"]
        assert rows[3][:3] == ["experts/003", "not", "started"]
        assert "router not started" in " ".join(text.split())
        assert "local-3" not in text


def test_watching_through_a_pipe_prints_every_refresh(new_run: Copy, tmp_path: Path) -> None:
    run = new_run()
    command = [sys.executable, "-m", "atoll.cli", "status", str(run), "--watch", "--every", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        refreshes = [
            line for line, _ in zip((line for line in process.stdout if "router" in line), range(2), strict=False)
        ]
        process.terminate()
    assert len(refreshes) == 2
