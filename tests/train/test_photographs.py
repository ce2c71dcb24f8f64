"""Exact resume of an expert that trains on images of five sizes, with flips and three captions each."""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml

from atoll.core.sizes import Size
from atoll.data.dataset import Shards
from atoll.data.prepare import prepare
from photographs import BUCKETS, write_photographs_run
from train.conftest import merge
from train.workers import TINY, assert_same_weights, finish, kill_after, kill_at, metrics
from waiting import HOUR

TRAIN = {**TINY["train"], "total_images": 480, "workers": 2}


@pytest.fixture(scope="module")
def photographs_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("photographs") / "run"
    prepare(run, write_photographs_run(run))
    return run


@pytest.mark.slow
def test_twenty_kills_do_not_change_the_weights(photographs_run: Path, tmp_path: Path) -> None:
    shards = Shards.open(photographs_run, [0])
    assert shards.content.flip
    assert shards.content.text is not None
    assert shards.content.text.captions
    drawn = shards.size_counts(TRAIN["total_images"], 0, batch_size=TRAIN["batch_size"])
    # In latents, whose sides are an eighth.
    sizes = {Size(size.height // 8, size.width // 8) for size in map(Size.parse, BUCKETS)}
    assert {size for size, count in drawn.items() if count} == sizes

    def new_run(name: str) -> Path:
        run = tmp_path / name
        shutil.copytree(photographs_run / "data/shards", run / "data/shards")
        values = merge(yaml.safe_load((photographs_run / "atoll.yaml").read_text()), {"train": TRAIN})
        (run / "atoll.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        return run

    straight = new_run("straight")
    # The first job starts the server that has imported everything. Its time must not count.
    assert finish(straight, "--expert", "0", "--dry-run") == 0
    begin = time.monotonic()
    assert finish(straight, "--expert", "0") == 0
    whole = time.monotonic() - begin
    losses = [line["loss"] for line in metrics(straight, "experts/000")]
    assert len(losses) == TRAIN["total_images"] // TRAIN["log_every"]
    chance, jobs, killed = random.Random(0), 0, 0
    while killed < 20:
        broken = new_run(f"broken{jobs}")
        if not jobs:  # once at a checkpoint, however busy the machine is; then at any moment
            kill_at(broken, TRAIN["save_every"], "--expert", "0")
        jobs += 1
        while code := kill_after(broken, 0.6 * chance.uniform(0, whole) if killed < 20 else HOUR, "--expert", "0"):
            assert code == -signal.SIGKILL, (broken / "log.txt").read_text()
            killed += 1
        assert_same_weights(straight / "experts/000/final", broken / "experts/000/final")
        assert [line["loss"] for line in metrics(broken, "experts/000")] == losses
