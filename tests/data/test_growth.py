"""A source that has grown: what is reused, what is made again, and that the result does not depend on interruptions."""

import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from safetensors.torch import load_file

from atoll import cli
from atoll.core.errors import AtollError
from atoll.data.chunks import Worker
from atoll.data.prepare import prepare
from shapes import draw, write_run, write_shapes

OLD, NEW, CHUNK = 45, 20, 16
SETTINGS = {"data": {"max_rejects": 0.1}, "text": {"encoder": "none"}, "features": {"patch_dimensions": 16}}


def grow(source: Path, prefix: str) -> None:
    rng = random.Random(1)
    for number in range(NEW):
        draw("circle", rng).save(source / f"{prefix}-{number:03d}.png")
        (source / f"{prefix}-{number:03d}.txt").write_text(f"another circle with the number {number}")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared run of 45 images and one that is not readable, in three chunks."""
    folder = tmp_path_factory.mktemp("before")
    source = write_shapes(folder / "shapes", OLD)
    prepare(folder / "run", write_run(folder / "run", source, **SETTINGS))
    return folder


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    found: list[object] = []
    original = Image._getdecoder

    def count(*arguments: object) -> object:
        found.append(arguments[1])
        return original(*arguments)

    monkeypatch.setattr(Image, "_getdecoder", count)
    return found


def copied(before: Path, folder: Path, prefix: str) -> tuple[Path, object]:
    shutil.copytree(before / "shapes", folder / "shapes")
    config = write_run(folder / "run", folder / "shapes", **SETTINGS)
    shutil.copytree(before / "run/data", folder / "run/data")
    grow(folder / "shapes", prefix)
    return folder / "run", config


def assignments(run: Path) -> dict[str, tuple[int, int]]:
    rows = pq.read_table(run / "data/clusters/assignments.parquet").to_pylist()
    return {row["id"]: (row["fine"], row["coarse"]) for row in rows}


def content(run: Path) -> dict[str, bytes]:
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in (run / "data").rglob("*") if path.is_file()}


def test_only_new_images_are_encoded_and_the_clusters_are_kept(
    before: Path, tmp_path: Path, decoded: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    """The new images are listed last, so two full chunks are unchanged; the third one was not full."""
    run, config = copied(before, tmp_path, "zebra")
    stages = ["ingest", "features", "latents", "patches"]
    prepare(run, config, stages)
    assert len(decoded) == OLD + 1 + NEW - 2 * CHUNK
    assert "2 of 3 chunks are unchanged" in capsys.readouterr().out
    prepare(run, config)
    assert not (run / "data.previous").exists()
    for name in ("features", "latents", "patches"):
        for chunk in (0, 1):
            file = f"data/{name}/{chunk:06d}.safetensors"
            assert (run / file).read_bytes() == (before / "run" / file).read_bytes()
    old, now = assignments(before / "run"), assignments(run)
    assert {id: now[id] for id in old} == old
    assert len(now) == OLD + NEW
    centers = "data/clusters/centroids.safetensors"
    assert (run / centers).read_bytes() == (before / "run" / centers).read_bytes()
    ids = [id for file in (run / "data/shards").rglob("*.parquet") for id in pq.read_table(file)["id"].to_pylist()]
    assert sorted(ids) == sorted(now)
    capsys.readouterr()
    prepare(run, config)
    assert capsys.readouterr().out.count("already done") == 6


@pytest.mark.parametrize("workers", [1, 3])
def test_interruptions_and_workers_do_not_change_a_byte(
    before: Path, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.data import growth
    from atoll.data.stages import ingest

    run, config = copied(before, tmp_path / "whole", "zebra")
    prepare(run, config)
    other, config = copied(before, tmp_path / "parts", "zebra")
    written = ingest.write_part
    with monkeypatch.context() as patch:  # stop after the first of the reused chunks

        def stop(*arguments: object) -> None:
            written(*arguments)
            raise KeyboardInterrupt

        patch.setattr(growth.ingest, "write_part", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(other, config)
    for index in reversed(range(workers)):
        prepare(other, config, worker=Worker(index, workers))
    assert content(other) == content(run)


def test_images_in_between_shift_the_chunks_but_not_the_clusters(
    before: Path, tmp_path: Path, decoded: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    run, config = copied(before, tmp_path, "aardvark")
    prepare(run, config, ["ingest", "features", "latents", "patches"])
    assert len(decoded) == OLD + NEW
    shown = capsys.readouterr().out
    assert "the source has grown since it was prepared" in shown
    assert "0 of 3 chunks are unchanged" in shown
    prepare(run, config)
    assert "clusters: kept; new images go to the nearest center" in capsys.readouterr().out
    old, now = assignments(before / "run"), assignments(run)
    assert np.mean([now[id] == old[id] for id in old]) == 1.0


def test_random_clusters_are_made_again_with_a_sentence(
    before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {**SETTINGS, "clusters": {"count": 3, "method": "random"}, "features": {}}
    source = shutil.copytree(before / "shapes", tmp_path / "shapes")
    config = write_run(tmp_path / "run", source, **changes)
    with pytest.warns(UserWarning, match="only as an ablation"):
        prepare(tmp_path / "run", config)
    assert "clusters: made again" not in capsys.readouterr().out
    grow(source, "zebra")
    with pytest.warns(UserWarning, match="only as an ablation"):
        prepare(tmp_path / "run", config)
    assert "clusters: made again, because" in capsys.readouterr().out


def test_a_dry_run_shows_the_growth(before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = copied(before, tmp_path, "zebra")
    assert cli.main(["prepare", str(run), "--dry-run"]) == 0
    assert capsys.readouterr().out.count("the source has grown") == 7
    assert not (run / "data.previous").exists()


@pytest.mark.slow
def test_a_launch_of_the_preparation_alone_uses_the_previous_data(before: Path, tmp_path: Path) -> None:
    run, _ = copied(before, tmp_path, "zebra")
    assert cli.main(["launch", str(run), "--jobs", "prepare"]) == 0
    assert not (run / "data.previous").exists()
    assert len(assignments(run)) == OLD + NEW
    log = "".join(file.read_text() for file in (run / "launch").rglob("*.log"))
    assert "2 of 3 chunks are unchanged" in log


def test_a_changed_image_is_encoded_again(before: Path, tmp_path: Path) -> None:
    run, config = copied(before, tmp_path, "zebra")
    file = tmp_path / "shapes/circle-000.png"
    Image.new("RGB", (40, 40), "black").save(file)
    prepare(run, config, ["ingest", "latents"])
    index = pq.read_table(run / "data/ingest/images.parquet")["id"].to_pylist()
    latents = load_file(run / "data/latents/000000.safetensors")["mean"]
    assert (latents[index.index("circle-000")] == -1).all()


def test_a_source_that_lost_an_image_is_stale(before: Path, tmp_path: Path) -> None:
    run, config = copied(before, tmp_path, "zebra")
    (tmp_path / "shapes/circle-000.png").unlink()
    with pytest.raises(AtollError, match="data/ingest is stale: fingerprint was"):
        prepare(run, config)
    assert not (run / "data.previous").exists()
