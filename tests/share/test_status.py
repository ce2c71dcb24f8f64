"""The status of a run while it trains."""

import shutil
import subprocess
import sys
from pathlib import Path

from atoll.apps.share.status import status
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
