"""A source that has changed: what is used again, what is made again, and that interruptions change no byte."""

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
from atoll.data.chunks import WorkerShare
from atoll.data.prepare import prepare
from shapes import chunk_files, draw, write_run, write_shapes

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
    assert "2 of 5 chunks are unchanged" in capsys.readouterr().out
    prepare(run, config)
    for name in ("features", "latents", "patches"):
        for chunk in (0, 1):
            old, now = chunk_files(before / "run", name)[chunk], chunk_files(run, name)[chunk]
            assert old.name == now.name
            assert old.read_bytes() == now.read_bytes()
        assert len(list((run / "data" / name).glob("*.safetensors"))) == 5 + (name == "patches")
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


def test_new_gone_and_changed_images_are_named(
    before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a finished index, and after an attempt that ended with rejected images."""
    run, config = copied(before, tmp_path, "zebra")
    source = tmp_path / "shapes"
    (source / "broken.png").unlink()
    (source / "circle-003.txt").write_text("another caption")
    prepare(run, config, ["ingest"])
    shown = capsys.readouterr().out
    assert f"20 new: {', '.join(f'zebra-{number:03d}' for number in range(10))} and 10 more\n" in shown
    assert "1 gone: broken\n" in shown
    assert "1 changed: circle-003\n" in shown

    (source / "empty.png").write_bytes(b"")
    (source / "zebra-007.png").write_bytes(b"text")
    config = write_run(tmp_path / "other", source, data={"max_rejects": 0.02}, text={"encoder": "none"})
    with pytest.raises(AtollError, match="2 of 66 images are unusable"):
        prepare(tmp_path / "other", config, ["ingest"])
    (source / "empty.png").unlink()
    shutil.copy(source / "zebra-008.png", source / "zebra-007.png")
    capsys.readouterr()
    prepare(tmp_path / "other", config, ["ingest"])
    shown = capsys.readouterr().out
    assert " new" not in shown
    assert "1 gone: empty\n" in shown
    assert "1 changed: zebra-007\n" in shown


@pytest.mark.parametrize("workers", [1, 3])
def test_interruptions_and_workers_do_not_change_a_byte(
    before: Path, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.data.stages import ingest

    run, config = copied(before, tmp_path / "whole", "zebra")
    prepare(run, config)
    other, config = copied(before, tmp_path / "parts", "zebra")
    noted = ingest.note_key
    with monkeypatch.context() as patch:  # stop after the first of the reused chunks

        def stop(*arguments: object) -> None:
            noted(*arguments)
            raise KeyboardInterrupt

        patch.setattr(ingest, "note_key", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(other, config)
    for index in reversed(range(workers)):
        prepare(other, config, worker=WorkerShare(index, workers))
    assert content(other) == content(run)


def test_images_in_between_change_neither_the_other_chunks_nor_the_clusters(
    before: Path, tmp_path: Path, decoded: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    run, config = copied(before, tmp_path, "aardvark")
    prepare(run, config, ["ingest", "features", "latents", "patches"])
    assert len(decoded) == NEW
    shown = capsys.readouterr().out
    assert "the source has changed since" in shown
    assert "3 of 5 chunks are unchanged" in shown
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


def test_a_dry_run_shows_the_change(before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = copied(before, tmp_path, "zebra")
    assert cli.main(["prepare", str(run), "--dry-run"]) == 0
    assert capsys.readouterr().out.count("the source has changed") == 6
    assert (run / "data/ingest/manifest.json").is_file()


@pytest.mark.slow
def test_a_launch_of_the_preparation_alone_prepares_a_changed_source(before: Path, tmp_path: Path) -> None:
    run, _ = copied(before, tmp_path, "zebra")
    assert cli.main(["launch", str(run), "--jobs", "prepare"]) == 0
    assert len(assignments(run)) == OLD + NEW
    log = "".join(file.read_text() for file in (run / "launch").rglob("*.log"))
    assert "2 of 5 chunks are unchanged" in log


def test_a_changed_image_is_encoded_again(before: Path, tmp_path: Path) -> None:
    run, config = copied(before, tmp_path, "zebra")
    file = tmp_path / "shapes/circle-000.png"
    Image.new("RGB", (40, 40), "black").save(file)
    prepare(run, config, ["ingest", "latents"])
    index = pq.read_table(run / "data/ingest/images.parquet")["id"].to_pylist()
    latents = load_file(chunk_files(run, "latents")[0])["mean"]
    assert (latents[index.index("circle-000")] == -1).all()


def test_an_image_that_is_removed_changes_only_its_chunk(
    before: Path, tmp_path: Path, decoded: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(before, tmp_path / "copy")
    run, source = tmp_path / "copy/run", tmp_path / "copy/shapes"
    config = write_run(tmp_path / "settings", source, **SETTINGS)
    prepare(run, config, ["ingest"])  # the same images in another folder
    assert decoded == []
    (source / "circle-003.png").unlink()
    prepare(run, config, ["ingest", "features", "latents", "patches"])
    assert "2 of 3 chunks are unchanged" in capsys.readouterr().out
    assert len(decoded) == CHUNK - 2  # one is removed, and one is not readable
    prepare(run, config)
    old, now = assignments(before / "run"), assignments(run)
    assert now == {id: row for id, row in old.items() if id != "circle-003"}
    ids = [id for file in (run / "data/shards").rglob("*.parquet") for id in pq.read_table(file)["id"].to_pylist()]
    assert sorted(ids) == sorted(now)


def test_after_a_reject_is_removed_the_same_command_goes_on(tmp_path: Path, decoded: list[object]) -> None:
    source, run = write_shapes(tmp_path / "shapes", OLD), tmp_path / "run"
    config = write_run(run, source, **{**SETTINGS, "data": {"max_rejects": 0}})
    for _ in range(2):
        with pytest.raises(AtollError, match="Fix or remove them and run the same command again"):
            prepare(run, config)
    (source / "broken.png").unlink()
    (source / "broken.txt").unlink()
    prepare(run, config)
    fresh = tmp_path / "fresh"
    prepare(fresh, write_run(fresh, source, **{**SETTINGS, "data": {"max_rejects": 0}}))
    assert assignments(run) == assignments(fresh)
    assert len(assignments(run)) == OLD


def test_the_clusters_of_another_source_are_made_again(
    before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, config = copied(before, tmp_path, "zebra")
    for file in (tmp_path / "shapes").glob("[cst]*.*"):
        if int(file.stem.partition("-")[2]) < 30:
            file.unlink()
    prepare(run, config)
    assert "clusters: made again, because" in capsys.readouterr().out
    assert len(assignments(run)) == OLD - 30 + NEW


def test_another_caption_is_another_chunk(before: Path, tmp_path: Path) -> None:
    shutil.copytree(before, tmp_path / "copy")
    run, source = tmp_path / "copy/run", tmp_path / "copy/shapes"
    (source / "circle-000.txt").write_text("another caption")
    prepare(run, write_run(tmp_path / "settings", source, **SETTINGS))
    index = pq.read_table(run / "data/ingest/images.parquet").to_pydict()
    assert index["captions"][index["id"].index("circle-000")] == ["another caption"]
    old, now = ({file.name for file in chunk_files(of, "latents")} for of in (before / "run", run))
    assert len(old & now) == 2
