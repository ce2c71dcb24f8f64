"""Several captions of an image: where they come from, their weights, and the split."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from atoll.core.errors import AtollError
from atoll.data.images import BadImage
from atoll.data.sources.open import open_source
from atoll.data.sources.source import SourceImage, SourceOptions, split_of

Row = dict[str, object]


def png(number: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def as_folder(rows: dict[str, Row], folder: Path) -> Path:
    folder.mkdir()
    for name in rows:
        (folder / f"{name}.png").write_bytes(png())
    lines = [json.dumps({"file_name": f"{name}.png", **row}) for name, row in rows.items()]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def as_tar(rows: dict[str, Row], folder: Path) -> Path:
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name, row in rows.items():
            for suffix, data in (("png", png()), ("json", json.dumps(row).encode())):
                member = tarfile.TarInfo(f"{name}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return folder


def as_parquet(rows: dict[str, Row], folder: Path) -> Path:
    folder.mkdir()
    pq.write_table(
        pa.Table.from_pylist([{"id": name, "image": png(), **row} for name, row in rows.items()]), folder / "a.parquet"
    )
    return folder


FORMATS = [as_folder, as_tar, as_parquet]
Write = Callable[[dict[str, Row], Path], Path]


def found(folder: Path, **options: object) -> dict[str, SourceImage]:
    source = open_source(folder, SourceOptions(val_fraction=0, **options))  # type: ignore[arg-type]
    return {image.id: image for image in source.images()}


@pytest.mark.parametrize("write", FORMATS)
def test_a_list_gives_several_captions_of_equal_weight(write: Write, tmp_path: Path) -> None:
    rows: dict[str, Row] = {"a": {"caption": ["one", " two ", "", "one"]}, "b": {"caption": ["three"]}}
    images = found(write(rows, tmp_path / "data"))
    assert images["a"].captions == ("one", "two")
    # The repeated caption counts twice.
    assert images["a"].weights == pytest.approx((2 / 3, 1 / 3))
    assert (images["b"].captions, images["b"].weights, images["b"].caption) == (("three",), None, "three")


@pytest.mark.parametrize("write", FORMATS)
def test_several_columns_with_weights(write: Write, tmp_path: Path) -> None:
    rows: dict[str, Row] = {
        "a": {"short": "cat", "long": ["a cat", "a cat that sleeps"], "other": "not a caption"},
        "b": {"short": "dog", "long": [], "other": "x"},
    }
    folder = write(rows, tmp_path / "data")
    images = found(folder, caption={"long": 3.0, "short": 1.0})
    assert images["a"].captions == ("a cat", "a cat that sleeps", "cat")
    assert images["a"].weights == (1.5, 1.5, 1.0)
    assert images["a"].attributes == {"other": "not a caption"}
    assert (images["b"].captions, images["b"].weights) == (("dog",), None)
    listed = found(folder, caption=["short", "long"])
    assert (listed["a"].captions, listed["a"].weights) == (("cat", "a cat", "a cat that sleeps"), (1.0, 0.5, 0.5))


def test_a_missing_column_is_an_error_of_the_table_and_of_the_image_in_json(tmp_path: Path) -> None:
    rows: dict[str, Row] = {"a": {"short": "cat"}, "b": {"text": "dog"}}
    with pytest.raises(AtollError, match="unknown column 'log'"):
        open_source(as_parquet({"a": {"long": "cat"}}, tmp_path / "p"), SourceOptions(caption=["long", "log"]))
    images = found(as_folder(rows, tmp_path / "f"), caption=["short", "long"])
    assert images["a"].captions == ("cat",)
    with pytest.raises(BadImage, match="its metadata has none of short, long, only text"):
        images["b"].read()


def test_lines_of_a_text_file_are_captions_only_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "a.txt").write_text("a cat\r\n\n  a cat that sleeps \n")
    assert found(tmp_path)["a"].captions == ("a cat\r\n\n  a cat that sleeps",)
    assert found(tmp_path, caption_lines=True)["a"].captions == ("a cat", "a cat that sleeps")
    plain, lines = (open_source(tmp_path, SourceOptions(caption_lines=value)).fingerprint for value in (False, True))
    assert plain != lines
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("a.png", "a.txt"):
            tar.add(tmp_path / name, name)
    assert found(tmp_path / "a.tar", caption_lines=True)["a"].captions == ("a cat", "a cat that sleeps")


def test_too_many_captions_are_rejected(tmp_path: Path) -> None:
    rows: dict[str, Row] = {"a": {"caption": [str(number) for number in range(101)]}}
    with pytest.raises(BadImage, match="its caption has 101 captions; the limit is 100"):
        found(as_parquet(rows, tmp_path / "data"))["a"].read()


def test_no_caption_is_in_both_splits_and_no_split_depends_on_other_images(tmp_path: Path) -> None:
    """A thousand images share 600 captions; the oracle is the hash of each caption."""
    texts = [f"caption {number}" for number in range(600)]
    rows: dict[str, Row] = {
        f"{number:04d}": {"caption": [texts[number * step % 600] for step in (1, 7, 131)]} for number in range(1, 1001)
    }
    folder = as_parquet(rows, tmp_path / "data")
    images = {image.id: image for image in open_source(folder, SourceOptions(val_fraction=0.2)).images()}
    by_split: dict[str, set[str]] = {"train": set(), "validation": set()}
    dropped = 0
    for id, row in rows.items():
        given = list(dict.fromkeys(row["caption"]))  # type: ignore[call-overload]
        image = images[id]
        assert image.split == split_of(given[0], 0.2)
        assert list(image.captions) == [text for text in given if split_of(text, 0.2) == image.split]
        by_split[image.split] |= set(image.captions)
        dropped += len(given) - len(image.captions)
    assert not by_split["train"] & by_split["validation"]
    assert dropped > 100
    assert all(image.captions for image in images.values())
    few = as_parquet(dict(list(rows.items())[:50]), tmp_path / "few")
    for image in open_source(few, SourceOptions(val_fraction=0.2)).images():
        assert (image.split, image.captions) == (images[image.id].split, images[image.id].captions)
