"""Sources: a dozen emoji, written in every format, are read back as the same images."""

import csv
import io
import json
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from atoll.core.errors import AtollError
from atoll.core.presets import PRESETS
from atoll.data.images import BadImage
from atoll.data.sources.fields import Ids
from atoll.data.sources.image_folder import folders
from atoll.data.sources.open import find_kind, open_source
from atoll.data.sources.source import Source, SourceImage, SourceOptions, describe, survey


@pytest.fixture(scope="module")
def dozen() -> list[SourceImage]:
    """Twelve emoji, four of each style; the same captions recur in each style."""
    source = open_source("emoji:categories=food-drink;skin-tones=no")
    return [image for image in source.images() if image.caption in ("red apple", "pizza", "bread", "hot dog")]


def as_classes(dozen: list[SourceImage], folder: Path) -> Path:
    for image in dozen:
        file = folder / f"{image.id}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image.read())
    return folder


def as_txt(dozen: list[SourceImage], folder: Path) -> Path:
    as_classes(dozen, folder)
    for image in dozen:
        (folder / f"{image.id}.txt").write_text(f"{image.caption}\n", encoding="utf-8")
    return folder


def as_jsonl(dozen: list[SourceImage], folder: Path) -> Path:
    as_classes(dozen, folder)
    rows = [{"file_name": f"{s.id}.png", "text": s.caption, "category": s.attributes["category"]} for s in dozen]
    lines = [json.dumps(row) for row in rows]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def as_csv(dozen: list[SourceImage], folder: Path) -> Path:
    as_classes(dozen, folder)
    with (folder / "metadata.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["file_name", "caption"])
        writer.writerows([[f"{s.id}.png", s.caption] for s in dozen])
    return folder


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def as_tars(dozen: list[SourceImage], folder: Path) -> Path:
    folder.mkdir(parents=True)
    for shard in range(2):
        with tarfile.open(folder / f"shard-{shard}.tar", "w") as tar:
            for image in dozen[shard::2]:
                assert image.caption is not None
                add_member(tar, f"{image.id}.png", image.read())
                add_member(tar, f"{image.id}.txt", image.caption.encode())
                add_member(tar, f"{image.id}.cls", image.attributes["style"].encode())
                add_member(tar, f"{image.id}.json", json.dumps({"category": "food-drink"}).encode())
    return folder


def rows_of(dozen: list[SourceImage]) -> list[dict[str, object]]:
    return [{"id": s.id, "image": s.read(), "caption": s.caption, "label": s.attributes["style"]} for s in dozen]


def as_parquet(dozen: list[SourceImage], folder: Path) -> Path:
    folder.mkdir(parents=True)
    for part in range(2):
        table = pa.Table.from_pylist(rows_of(dozen[part::2]))
        pq.write_table(table, folder / f"part-{part}.parquet", row_group_size=4)
    return folder


def as_datasets_parquet(dozen: list[SourceImage], folder: Path) -> Path:
    """As the datasets library writes parquet: a struct with the path, classes as numbers with names in the schema."""
    folder.mkdir(parents=True)
    hf_dataset(dozen).to_parquet(folder / "train.parquet")
    return folder


def as_datasets(dozen: list[SourceImage], folder: Path) -> Path:
    with_ids(dozen).save_to_disk(folder)
    return folder


def as_datasets_splits(dozen: list[SourceImage], folder: Path) -> Path:
    whole = with_ids(dozen)
    datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(folder)
    return folder


def hf_dataset(dozen: list[SourceImage]) -> datasets.Dataset:
    rows = [
        {"image": {"path": f"{s.id}.png", "bytes": s.read()}, "text": s.caption, "label": s.attributes["style"]}
        for s in dozen
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    classes = datasets.ClassLabel(names=["noto", "openmoji", "twemoji"])
    features = {"image": datasets.Image(), "text": datasets.Value("string"), "label": classes}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def with_ids(dozen: list[SourceImage]) -> datasets.Dataset:
    return hf_dataset(dozen).add_column("id", [image.id for image in dozen])


FORMATS: dict[str, Callable[[list[SourceImage], Path], Path]] = {
    "classes": as_classes,
    "txt": as_txt,
    "jsonl": as_jsonl,
    "csv": as_csv,
    "tars": as_tars,
    "parquet": as_parquet,
    "datasets parquet": as_datasets_parquet,
    "datasets": as_datasets,
    "datasets with splits": as_datasets_splits,
}
KINDS = {
    "classes": "folder of images with class subfolders",
    "txt": "folder of images with .txt captions",
    "jsonl": "folder of images with metadata",
    "csv": "folder of images with metadata",
    "tars": "WebDataset of 2 tars",
    "parquet": "2 parquet files",
    "datasets parquet": "1 parquet files",
    "datasets": "datasets data (train)",
    "datasets with splits": "datasets data (train)",
}


def content(source: Source) -> dict[str, SourceImage]:
    images = list(source.images())
    by_id = {image.id: image for image in images}
    assert len(by_id) == len(images)
    return by_id


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_images(name: str, dozen: list[SourceImage], tmp_path: Path) -> None:
    source = open_source(FORMATS[name](dozen, tmp_path / "data"))
    found = content(source)
    assert source.kind == KINDS[name]
    assert found.keys() == {image.id for image in dozen}
    for image in dozen:
        assert found[image.id].read() == image.read()
        assert found[image.id].label == image.attributes["style"]
        assert found[image.id].caption == (None if name == "classes" else image.caption)
        if name in ("jsonl", "tars"):
            assert found[image.id].attributes == {"category": "food-drink"}


@pytest.mark.parametrize("name", FORMATS)
def test_moving_the_data_changes_neither_ids_nor_fingerprint(
    name: str, dozen: list[SourceImage], tmp_path: Path
) -> None:
    folder = FORMATS[name](dozen, tmp_path / "data")
    before = open_source(folder)
    expected = (before.fingerprint, [(s.id, s.caption, s.label, s.split) for s in before.images()])
    moved = tmp_path / "elsewhere" / "data"
    moved.parent.mkdir()
    shutil.move(folder, moved)
    after = open_source(moved)
    assert (after.fingerprint, [(s.id, s.caption, s.label, s.split) for s in after.images()]) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_images_can_be_pickled(name: str, dozen: list[SourceImage], tmp_path: Path) -> None:
    image = next(open_source(FORMATS[name](dozen, tmp_path / "data")).images())
    assert pickle.loads(pickle.dumps(image)).read() == image.read()


@pytest.mark.parametrize("name", ["txt", "jsonl", "tars", "parquet"])
def test_fingerprint_follows_the_content(name: str, dozen: list[SourceImage], tmp_path: Path) -> None:
    all_of_it = open_source(FORMATS[name](dozen, tmp_path / "a" / "data")).fingerprint
    less = open_source(FORMATS[name](dozen[1:], tmp_path / "b" / "data")).fingerprint
    other_split = open_source(tmp_path / "a" / "data", SourceOptions(val_fraction=0.5)).fingerprint
    assert len({all_of_it, less, other_split}) == 3


def test_invalid_unicode_in_names_and_values_is_escaped(dozen: list[SourceImage], tmp_path: Path) -> None:
    data = dozen[0].read()
    folder = os.fsencode(tmp_path / "data") + b"/caf\xe9"
    os.makedirs(folder)
    Path(os.fsdecode(folder + b"/th\xe9.png")).write_bytes(data)
    (image,) = open_source(tmp_path / "data").images()
    assert image.id.encode().decode() == image.id
    assert "caf\\udce9" in image.id
    assert image.read() == data
    broken = SourceImage("a", ("b",), "\ud83d", {"author": "\ud83d"}, "train", dozen[0].read)
    assert (broken.label, broken.attributes) == ("\\ud83d", {"author": "\\ud83d"})


def test_a_class_number_of_minus_one_is_none(dozen: list[SourceImage], tmp_path: Path) -> None:
    names = {"info": {"features": {"kind": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    rows = [{"uid": s.id, "image": s.read(), "kind": number} for s, number in zip(dozen, (1, 0, -1), strict=False)]
    table = pa.Table.from_pylist(rows).replace_schema_metadata({"huggingface": json.dumps(names)})
    pq.write_table(table, tmp_path / "t.parquet")
    found = content(open_source(tmp_path / "t.parquet", SourceOptions(label="kind", id="uid")))
    assert sorted((s.label or "") for s in found.values()) == ["", "cat", "dog"]


def test_equal_captions_are_in_one_split(dozen: list[SourceImage], tmp_path: Path) -> None:
    source = open_source(as_txt(dozen, tmp_path / "data"), SourceOptions(val_fraction=0.5))
    sides: dict[str | None, set[str]] = {}
    for image in source.images():
        sides.setdefault(image.caption, set()).add(image.split)
    assert all(len(side) == 1 for side in sides.values())
    assert {"train", "validation"} == set().union(*sides.values())


def test_columns_can_be_given_as_options(dozen: list[SourceImage], tmp_path: Path) -> None:
    rows = [{"uid": s.id, "data": s.read(), "alt": s.caption, "caption": "wrong", "kind": 7} for s in dozen]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    options = SourceOptions(image="data", caption="alt", label="kind", id="uid")
    found = content(open_source(tmp_path / "t.parquet", options))
    assert {(s.id, s.caption, s.label) for s in found.values()} == {(s.id, s.caption, "7") for s in dozen}


def test_rows_without_an_id_get_a_hash_of_their_content(dozen: list[SourceImage], tmp_path: Path) -> None:
    for folder, rows in (("a", dozen), ("b", dozen[::-1])):
        (tmp_path / folder).mkdir()
        pq.write_table(pa.Table.from_pylist([{"image": s.read()} for s in rows]), tmp_path / folder / "t.parquet")
    first, second = (content(open_source(tmp_path / folder)) for folder in "ab")
    assert first.keys() == second.keys()
    assert len(first) == 12
    assert {id: s.read() for id, s in first.items()} == {id: s.read() for id, s in second.items()}


def test_a_repeated_key_loses_no_image(dozen: list[SourceImage], tmp_path: Path) -> None:
    for shard, image in enumerate(dozen[:3]):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            add_member(tar, "000.png", image.read())
    found = content(open_source(tmp_path))
    assert list(found) == ["000", "000@1", "000@2"]
    assert [s.read() for s in found.values()] == [s.read() for s in dozen[:3]]


def test_a_key_with_many_repeats_keeps_short_ids(dozen: list[SourceImage], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for image in dozen[:4]:
            assert image.caption is not None
            add_member(tar, "000.png", image.read())
            add_member(tar, "000.txt", image.caption.encode())
    found = content(open_source(tmp_path))
    assert list(found) == ["000", "000@a", "000@a@2", "000@a@3"]
    assert [(s.read(), s.caption) for s in found.values()] == [(s.read(), s.caption) for s in dozen[:4]]


def test_many_repeats_of_a_key_take_linear_time() -> None:
    ids = Ids()
    assert [ids.unique("cat", lambda: "a") for _ in range(2_000)][-1] == "cat@a@1999"


def test_every_key_is_used_once_however_many_there_are() -> None:
    ids, keys = Ids(), [f"image {number}" for number in range(5_000)]
    assert [ids.unique(key, lambda: "a") for key in keys] == keys
    assert [ids.unique(key, lambda: "b") for key in keys] == [f"{key}@b" for key in keys]
    assert ids.unique("\ud800", lambda: "c") == "\ud800"  # JSON may have such keys


def test_images_whose_names_have_dots_are_listed_as_unreadable(dozen: list[SourceImage], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("v1.0_1.png", "v1.0_2.png", "v1.0_3.png", "photo.jpg", "photo.mask.png"):
            add_member(tar, name, dozen[0].read())
    found = content(open_source(tmp_path))
    assert list(found) == ["v1", "v1.0_2.png", "v1.0_3.png", "photo"]
    assert reason(found["v1.0_3.png"]).startswith("a second image of the key 'v1': keys end at the first dot")


def test_concatenated_tars_are_read_to_the_end(dozen: list[SourceImage], tmp_path: Path) -> None:
    folder = as_tars(dozen, tmp_path / "data")
    both = tmp_path / "both.tar"
    both.write_bytes(b"".join((folder / f"shard-{shard}.tar").read_bytes() for shard in range(2)))
    assert {id: s.read() for id, s in content(open_source(both)).items()} == {s.id: s.read() for s in dozen}
    both.write_bytes(both.read_bytes() + b"\xff" * 512)
    assert "no readable header" in reason(content(open_source(both))["both.tar"])


def test_a_tar_of_the_folder_it_was_made_in_has_plain_keys(dozen: list[SourceImage], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add_member(tar, "./0001.png", dozen[0].read())
        add_member(tar, "./cat/0002.png", dozen[0].read())
    assert list(content(open_source(tmp_path))) == ["0001", "cat/0002"]


def test_a_saved_dataset_without_ids_loses_no_image(dozen: list[SourceImage], tmp_path: Path) -> None:
    """On saving, datasets cuts paths down to names, which recur here in three folders."""
    hf_dataset(dozen).save_to_disk(tmp_path / "a")
    hf_dataset(dozen).save_to_disk(tmp_path / "b")
    first, second = (content(open_source(tmp_path / name)) for name in "ab")
    assert list(first) == list(second)
    assert [s.read() for s in first.values()] == [s.read() for s in dozen]
    assert {id.split("@")[0] for id in first} == {s.id.split("/")[1] for s in dozen}


def test_two_images_with_the_same_stem_get_different_ids(dozen: list[SourceImage], tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(dozen[0].read())
    (tmp_path / "a.png").write_bytes(dozen[1].read())
    assert list(content(open_source(tmp_path))) == ["a", "a.png"]


def test_a_list_of_captions_gives_the_first(dozen: list[SourceImage], tmp_path: Path) -> None:
    row = {"id": "x", "image": dozen[0].read(), "captions": ["", "an apple", "a fruit"]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "t.parquet")
    assert content(open_source(tmp_path))["x"].caption == "an apple"


def test_links_within_the_folder_are_followed_without_endless_loops(dozen: list[SourceImage], tmp_path: Path) -> None:
    """A link to a file is another image; what a link to a folder leads to is listed once, at its own place."""
    as_classes(dozen, tmp_path / "data")
    expected = {image.id for image in dozen}
    (tmp_path / "data" / "again").symlink_to(tmp_path / "data" / "noto", target_is_directory=True)
    (tmp_path / "data" / "noto" / "up").symlink_to("..", target_is_directory=True)
    (tmp_path / "data" / "copy.png").symlink_to(f"{dozen[0].id}.png")
    found = content(open_source(tmp_path / "data"))
    assert found.keys() == expected | {"copy"}
    assert found["copy"].read() == dozen[0].read()
    moved = tmp_path / "link"  # the user's own link to the root
    moved.symlink_to(tmp_path / "data", target_is_directory=True)
    assert content(open_source(moved)).keys() == found.keys()


def test_a_snapshot_in_the_cache_of_the_hub_is_a_source(dozen: list[SourceImage], tmp_path: Path) -> None:
    """Its files are links to blobs, which are outside the snapshot."""
    repository = tmp_path / "datasets--a--b"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "abc").write_bytes(dozen[0].read())
    (snapshot / "a.png").symlink_to("../../blobs/abc")
    assert content(open_source(snapshot))["a"].read() == dozen[0].read()


def test_broken_links_are_listed_as_unreadable(dozen: list[SourceImage], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(dozen[0].read())
    before = open_source(tmp_path).fingerprint
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    (tmp_path / "notes").symlink_to(tmp_path / "nowhere")
    source = open_source(tmp_path)
    assert source.fingerprint != before  # they are listed among the images
    found = content(source)
    assert list(found) == ["a", "gone", "loop"]
    assert reason(found["gone"]) == "cannot be read: No such file or directory"
    assert reason(found["loop"]) == "cannot be read: Too many levels of symbolic links"


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AtollError, match=r"gone: cannot be listed: No such file or directory; make it readable"):
        list(folders(tmp_path / "gone"))


def test_the_kind_of_a_source_is_detected(dozen: list[SourceImage], tmp_path: Path) -> None:
    found = {name: find_kind(str(write(dozen, tmp_path / name))) for name, write in FORMATS.items()}
    kinds = {"tars": "webdataset", "parquet": "parquet", "datasets parquet": "parquet"}
    folders = dict.fromkeys(("classes", "txt", "jsonl", "csv"), "folder")
    assert found == {**folders, **kinds, **dict.fromkeys(("datasets", "datasets with splits"), "datasets")}
    assert find_kind(str(tmp_path / "tars" / "*.tar")) == "webdataset"
    assert find_kind("emoji:styles=noto") == "emoji"


def test_a_pattern_or_a_single_file_is_a_source(dozen: list[SourceImage], tmp_path: Path) -> None:
    as_tars(dozen, tmp_path / "tars")
    assert len(content(open_source(str(tmp_path / "tars" / "shard-*.tar")))) == 12
    assert len(content(open_source(tmp_path / "tars" / "shard-1.tar"))) == 6


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("./no/such/folder", SourceOptions(), "no such file or folder"),
        ("{tmp}", SourceOptions(), "has no images, tars or parquet files"),
        ("{tmp}/a.tar.gz", SourceOptions(), "unpack it first"),
        ("{tmp}/a.parquet", SourceOptions(), "not a parquet file"),
        ("{tmp}", SourceOptions(kind="parquet"), "not a parquet file"),
        ("{tmp}/*.tar", SourceOptions(), "no .tar file found"),
        ("{tmp}", SourceOptions(kind="folderr"), "did you mean 'folder'"),  # type: ignore[arg-type]
        ("{tmp}", SourceOptions(val_fraction=1.0), "val_fraction is 1.0"),
        ("emoji:style=noto", SourceOptions(), "did you mean 'styles'"),
        ("emoji:styles=notto", SourceOptions(), "did you mean 'noto'"),
        ("emoji:categories=food", SourceOptions(), "did you mean 'food-drink'"),
    ],
)
def test_an_unusable_source_is_an_error(spec: str, options: SourceOptions, words: str, tmp_path: Path) -> None:
    if "parquet" not in spec and options.kind != "parquet":
        (tmp_path / "a.tar.gz").write_bytes(b"x")
    else:
        (tmp_path / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(AtollError, match=words):
        open_source(spec.format(tmp=tmp_path), options)


def test_the_error_names_missing_columns(dozen: list[SourceImage], tmp_path: Path) -> None:
    folder = as_parquet(dozen, tmp_path / "data")
    with pytest.raises(AtollError, match=r"unknown column 'captoin' \(did you mean 'caption'"):
        open_source(folder, SourceOptions(caption="captoin"))
    pq.write_table(pa.table({"caption": ["x"]}), tmp_path / "no.parquet")
    with pytest.raises(AtollError, match="no column of images"):
        open_source(tmp_path / "no.parquet")


def test_an_unknown_dataset_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(AtollError, match="nobody/nothing: not a file or folder here, nor a dataset"):
        open_source("nobody/nothing")


def test_describe_prints_kind_number_and_examples(dozen: list[SourceImage], tmp_path: Path) -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    source = open_source(as_txt(dozen, tmp_path / "data"))
    found = survey(source)
    assert (found.images, found.train, found.labels) == (12, 12, 3)
    describe(found, console=console)
    printed = console.export_text()
    assert printed.startswith("folder of images with .txt captions: 12 images, ")
    assert sum(image.id in printed for image in dozen) == 5


def test_describe_prints_one_line_per_example_at_80_columns() -> None:
    """The emoji of the demo have long attributes, and some have long ids and captions."""
    console = Console(record=True, width=80, file=io.StringIO())
    source = open_source(str(PRESETS["demo"]["data"]["source"]))  # type: ignore[index]
    describe(survey(source, examples=40), console=console)
    lines = console.export_text().splitlines()
    rows = [line for line in lines if line.startswith("│")]
    assert len(rows) == 40
    assert max(map(len, lines)) <= 80
    for row in rows:
        id, caption, label, split = (cell.strip() for cell in row.strip("│").split("│"))
        assert id.startswith("twemoji/")
        assert len(caption) > 2
        assert len(label) > 2
        assert split in ("train", "validation")
    assert lines[-1] == "attributes: style, category, attribution, license"


def test_invalid_metadata_rows(dozen: list[SourceImage], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(dozen[0].read())
    (tmp_path / "b.png").write_bytes(dozen[1].read())
    lines = [b'{"file_name": "a.png", "text": "caf\xe9"}', b'{"file_name": "gone.png", "text": "gone"}']
    (tmp_path / "metadata.jsonl").write_bytes(b"\n".join(lines))
    found = content(open_source(tmp_path))
    assert reason(found["a"]).startswith("its caption is not UTF-8")
    assert reason(found["gone.png"]) == "listed in metadata.jsonl, but there is no such file"
    assert found["b"].caption is None
    assert found["b"].read() == dozen[1].read()
    (tmp_path / "metadata.jsonl").write_text('{"text": "no name"}')
    with pytest.raises(AtollError, match=r"metadata.jsonl, row 1: expected a file_name"):
        list(open_source(tmp_path).images())


def test_the_text_file_gives_the_caption_if_the_metadata_has_none(dozen: list[SourceImage], tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(dozen[0].read())
        (tmp_path / f"{name}.txt").write_text("from the file")
    rows = [{"file_name": "a.png", "caption": ""}, {"file_name": "b.png"}, {"file_name": "c.png", "text": "given"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(json.dumps({**row, "width": 8}) for row in rows))
    found = [(s.id, s.caption, s.attributes) for s in open_source(tmp_path).images()]
    size = {"width": "8"}
    assert found == [("a", "from the file", size), ("b", "from the file", size), ("c", "given", size)]
    (tmp_path / "metadata.jsonl").unlink()
    (tmp_path / "metadata.csv").write_text("file_name,width\na.png,8,one too many")
    assert content(open_source(tmp_path))["a"].caption == "from the file"


def test_metadata_can_be_in_a_later_folder(dozen: list[SourceImage], tmp_path: Path) -> None:
    for name in ("images", "texts"):
        (tmp_path / name).mkdir()
    (tmp_path / "images/a.png").write_bytes(dozen[0].read())
    rows = [{"file_name": "../images/a.png", "text": "given"}, {"file_name": "../images/a.jpg", "text": "no such"}]
    (tmp_path / "texts/metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = content(open_source(tmp_path))
    assert list(found) == ["images/a", "images/a.jpg"]
    assert found["images/a"].caption == "given"


def reason(image: SourceImage) -> str:
    with pytest.raises(BadImage) as bad:
        image.read()
    return bad.value.reason


def test_invalid_captions(dozen: list[SourceImage], tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(dozen[0].read())
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.txt").write_bytes(b"  \n")
    found = content(open_source(tmp_path))
    assert reason(found["a"]).startswith("its caption is not UTF-8")
    assert (found["b"].caption, found["c"].caption) == (None, None)
    assert found["b"].read() == found["c"].read() == dozen[0].read()


def test_the_images_before_the_end_of_a_broken_tar_are_read(dozen: list[SourceImage], tmp_path: Path) -> None:
    folder = as_tars(dozen, tmp_path / "data")
    whole = [s.id for s in open_source(folder / "shard-0.tar").images()]
    file = folder / "shard-0.tar"
    data = file.read_bytes()
    with tarfile.open(file) as tar:
        third = tar.getmember(f"{whole[2]}.png")
    file.write_bytes(data[: third.offset_data + 10])
    found = content(open_source(file))
    assert list(found) == [*whole[:3], "shard-0.tar"]
    assert reason(found[whole[2]]) == f"the tar ends within it: 10 of {third.size} bytes"
    assert reason(found["shard-0.tar"]).startswith("the tar is broken")
    assert found[whole[1]].caption is not None

    file.write_bytes(data[: third.offset] + b"\xff" * 512 + data[third.offset + 512 :])
    found = content(open_source(file))
    assert list(found) == [*whole[:2], "shard-0.tar"]
    assert "no readable header" in reason(found["shard-0.tar"])


def test_unusable_tar_members(dozen: list[SourceImage], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add_member(tar, "noimage.txt", b"a caption")
        add_member(tar, "latin.png", dozen[0].read())
        add_member(tar, "latin.txt", b"caf\xe9")
        add_member(tar, "json.jpg", dozen[0].read())
        add_member(tar, "json.json", b"{no json")
        add_member(tar, "plain.jpg", dozen[0].read())
        add_member(tar, "plain.json", b'{"caption": "from json", "label": 3}')
    found = content(open_source(tmp_path))
    assert reason(found["noimage"]) == "no image among its members: txt"
    assert reason(found["latin"]).startswith("its caption is not UTF-8")
    assert reason(found["json"]).startswith("its .json is not JSON")
    assert (found["plain"].caption, found["plain"].label) == ("from json", "3")
    asked = content(open_source(tmp_path, SourceOptions(caption="alt")))
    assert reason(asked["plain"]) == "its metadata has no 'alt', only caption, label"


def test_a_row_without_an_image_is_unreadable(dozen: list[SourceImage], tmp_path: Path) -> None:
    rows = [{"id": "a", "image": None}, {"id": "b", "image": dozen[0].read()}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    found = content(open_source(tmp_path))
    assert reason(found["a"]) == "the table has no image in this row"
    assert found["b"].read() == dozen[0].read()


@pytest.mark.parametrize("id", [None, "key"])
def test_the_id_column_can_also_be_the_label(dozen: list[SourceImage], tmp_path: Path, id: str | None) -> None:
    rows = [{"key": "cat", "filename": "1.png", "image": dozen[0].read()}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    (image,) = open_source(tmp_path, SourceOptions(label="key", id=id)).images()
    assert (image.id, image.label, image.read()) == ("cat" if id else "1", "cat", dozen[0].read())


def test_a_column_of_binary_views_holds_images(dozen: list[SourceImage], tmp_path: Path) -> None:
    images = pa.array([dozen[0].read()], pa.binary_view())
    pq.write_table(pa.table({"id": ["a"], "image": images}), tmp_path / "t.parquet")
    assert content(open_source(tmp_path))["a"].read() == dozen[0].read()


@pytest.mark.parametrize("column", ["id", "image"])
def test_the_error_of_a_damaged_page_names_the_file(dozen: list[SourceImage], tmp_path: Path, column: str) -> None:
    file = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_pylist(rows_of(dozen)), file, use_dictionary=False)
    group = pq.read_metadata(file).row_group(0)
    start = next(group.column(i) for i in range(4) if group.column(i).path_in_schema == column).data_page_offset
    data = file.read_bytes()
    file.write_bytes(data[:start] + b"\xff" * 60 + data[start + 60 :])
    if column == "id":
        with pytest.raises(AtollError, match=r"t.parquet: row group 0 is damaged: .*; restore the file"):
            list(open_source(file).images())
    else:
        (first, *_) = open_source(file).images()
        assert reason(first).startswith("row group 0 of t.parquet is damaged: ")
