"""One dozen emoji, written in every format there is, read back as the same samples."""

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
from atoll.data.sources.base import BadImage, Options, Sample, Source, describe
from atoll.data.sources.fields import Ids
from atoll.data.sources.folder import folders
from atoll.data.sources.open import find_kind, open_source


@pytest.fixture(scope="module")
def dozen() -> list[Sample]:
    """Twelve emoji, four of each style; the same captions recur in each style."""
    source = open_source("emoji:categories=food-drink;skin-tones=no")
    return [sample for sample in source.samples() if sample.caption in ("red apple", "pizza", "bread", "hot dog")]


def as_classes(dozen: list[Sample], folder: Path) -> Path:
    for sample in dozen:
        file = folder / f"{sample.id}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(sample.read())
    return folder


def as_txt(dozen: list[Sample], folder: Path) -> Path:
    as_classes(dozen, folder)
    for sample in dozen:
        (folder / f"{sample.id}.txt").write_text(f"{sample.caption}\n", encoding="utf-8")
    return folder


def as_jsonl(dozen: list[Sample], folder: Path) -> Path:
    as_classes(dozen, folder)
    rows = [{"file_name": f"{s.id}.png", "text": s.caption, "category": s.attributes["category"]} for s in dozen]
    lines = [json.dumps(row) for row in rows]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def as_csv(dozen: list[Sample], folder: Path) -> Path:
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


def as_tars(dozen: list[Sample], folder: Path) -> Path:
    folder.mkdir(parents=True)
    for shard in range(2):
        with tarfile.open(folder / f"shard-{shard}.tar", "w") as tar:
            for sample in dozen[shard::2]:
                assert sample.caption is not None
                add_member(tar, f"{sample.id}.png", sample.read())
                add_member(tar, f"{sample.id}.txt", sample.caption.encode())
                add_member(tar, f"{sample.id}.cls", sample.attributes["style"].encode())
                add_member(tar, f"{sample.id}.json", json.dumps({"category": "food-drink"}).encode())
    return folder


def rows_of(dozen: list[Sample]) -> list[dict[str, object]]:
    return [{"id": s.id, "image": s.read(), "caption": s.caption, "label": s.attributes["style"]} for s in dozen]


def as_parquet(dozen: list[Sample], folder: Path) -> Path:
    folder.mkdir(parents=True)
    for part in range(2):
        table = pa.Table.from_pylist(rows_of(dozen[part::2]))
        pq.write_table(table, folder / f"part-{part}.parquet", row_group_size=4)
    return folder


def as_datasets_parquet(dozen: list[Sample], folder: Path) -> Path:
    """As the datasets library writes parquet: a struct with the path, classes as numbers with names in the schema."""
    folder.mkdir(parents=True)
    hf_dataset(dozen).to_parquet(folder / "train.parquet")
    return folder


def as_datasets(dozen: list[Sample], folder: Path) -> Path:
    with_ids(dozen).save_to_disk(folder)
    return folder


def as_datasets_splits(dozen: list[Sample], folder: Path) -> Path:
    whole = with_ids(dozen)
    datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(folder)
    return folder


def hf_dataset(dozen: list[Sample]) -> datasets.Dataset:
    rows = [
        {"image": {"path": f"{s.id}.png", "bytes": s.read()}, "text": s.caption, "label": s.attributes["style"]}
        for s in dozen
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    classes = datasets.ClassLabel(names=["noto", "openmoji", "twemoji"])
    features = {"image": datasets.Image(), "text": datasets.Value("string"), "label": classes}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def with_ids(dozen: list[Sample]) -> datasets.Dataset:
    return hf_dataset(dozen).add_column("id", [sample.id for sample in dozen])


FORMATS: dict[str, Callable[[list[Sample], Path], Path]] = {
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
    "classes": "folder of pictures with class subfolders",
    "txt": "folder of pictures with .txt captions",
    "jsonl": "folder of pictures with metadata",
    "csv": "folder of pictures with metadata",
    "tars": "WebDataset of 2 tars",
    "parquet": "2 parquet files",
    "datasets parquet": "1 parquet files",
    "datasets": "datasets data (train)",
    "datasets with splits": "datasets data (train)",
}


def content(source: Source) -> dict[str, Sample]:
    samples = list(source.samples())
    by_id = {sample.id: sample for sample in samples}
    assert len(by_id) == len(samples)
    return by_id


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_samples(name: str, dozen: list[Sample], tmp_path: Path) -> None:
    source = open_source(FORMATS[name](dozen, tmp_path / "data"))
    found = content(source)
    assert source.kind == KINDS[name]
    assert found.keys() == {sample.id for sample in dozen}
    for sample in dozen:
        assert found[sample.id].read() == sample.read()
        assert found[sample.id].label == sample.attributes["style"]
        assert found[sample.id].caption == (None if name == "classes" else sample.caption)
        if name in ("jsonl", "tars"):
            assert found[sample.id].attributes == {"category": "food-drink"}


@pytest.mark.parametrize("name", FORMATS)
def test_moving_the_data_changes_neither_ids_nor_fingerprint(name: str, dozen: list[Sample], tmp_path: Path) -> None:
    folder = FORMATS[name](dozen, tmp_path / "data")
    before = open_source(folder)
    told = (before.fingerprint, [(s.id, s.caption, s.label, s.split) for s in before.samples()])
    moved = tmp_path / "elsewhere" / "data"
    moved.parent.mkdir()
    shutil.move(folder, moved)
    after = open_source(moved)
    assert (after.fingerprint, [(s.id, s.caption, s.label, s.split) for s in after.samples()]) == told


@pytest.mark.parametrize("name", FORMATS)
def test_samples_can_be_read_in_another_process(name: str, dozen: list[Sample], tmp_path: Path) -> None:
    sample = next(open_source(FORMATS[name](dozen, tmp_path / "data")).samples())
    assert pickle.loads(pickle.dumps(sample)).read() == sample.read()


@pytest.mark.parametrize("name", ["txt", "jsonl", "tars", "parquet"])
def test_fingerprint_follows_the_content(name: str, dozen: list[Sample], tmp_path: Path) -> None:
    all_of_it = open_source(FORMATS[name](dozen, tmp_path / "a" / "data")).fingerprint
    less = open_source(FORMATS[name](dozen[1:], tmp_path / "b" / "data")).fingerprint
    other_split = open_source(tmp_path / "a" / "data", Options(held_out=0.5)).fingerprint
    assert len({all_of_it, less, other_split}) == 3


def test_names_and_values_that_are_no_unicode_are_written_out(dozen: list[Sample], tmp_path: Path) -> None:
    picture = dozen[0].read()
    folder = os.fsencode(tmp_path / "data") + b"/caf\xe9"
    os.makedirs(folder)
    Path(os.fsdecode(folder + b"/th\xe9.png")).write_bytes(picture)
    (sample,) = open_source(tmp_path / "data").samples()
    assert sample.id.encode().decode() == sample.id
    assert "caf\\udce9" in sample.id
    assert sample.read() == picture
    broken = Sample("a", "b", "\ud83d", {"author": "\ud83d"}, "train", dozen[0].read)
    assert (broken.label, broken.attributes) == ("\\ud83d", {"author": "\\ud83d"})


def test_a_class_number_of_minus_one_is_none(dozen: list[Sample], tmp_path: Path) -> None:
    names = {"info": {"features": {"kind": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    rows = [{"uid": s.id, "image": s.read(), "kind": number} for s, number in zip(dozen, (1, 0, -1), strict=False)]
    table = pa.Table.from_pylist(rows).replace_schema_metadata({"huggingface": json.dumps(names)})
    pq.write_table(table, tmp_path / "t.parquet")
    found = content(open_source(tmp_path / "t.parquet", Options(label="kind", id="uid")))
    assert sorted((s.label or "") for s in found.values()) == ["", "cat", "dog"]


def test_equal_captions_stay_on_one_side(dozen: list[Sample], tmp_path: Path) -> None:
    source = open_source(as_txt(dozen, tmp_path / "data"), Options(held_out=0.5))
    sides: dict[str | None, set[str]] = {}
    for sample in source.samples():
        sides.setdefault(sample.caption, set()).add(sample.split)
    assert all(len(side) == 1 for side in sides.values())
    assert {"train", "held-out"} == set().union(*sides.values())


def test_columns_by_option(dozen: list[Sample], tmp_path: Path) -> None:
    rows = [{"uid": s.id, "data": s.read(), "alt": s.caption, "caption": "wrong", "kind": 7} for s in dozen]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    options = Options(image="data", caption="alt", label="kind", id="uid")
    found = content(open_source(tmp_path / "t.parquet", options))
    assert {(s.id, s.caption, s.label) for s in found.values()} == {(s.id, s.caption, "7") for s in dozen}


def test_rows_without_any_key_go_by_content(dozen: list[Sample], tmp_path: Path) -> None:
    for folder, rows in (("a", dozen), ("b", dozen[::-1])):
        (tmp_path / folder).mkdir()
        pq.write_table(pa.Table.from_pylist([{"image": s.read()} for s in rows]), tmp_path / folder / "t.parquet")
    first, second = (content(open_source(tmp_path / folder)) for folder in "ab")
    assert first.keys() == second.keys()
    assert len(first) == 12
    assert {id: s.read() for id, s in first.items()} == {id: s.read() for id, s in second.items()}


def test_a_key_used_twice_loses_no_sample(dozen: list[Sample], tmp_path: Path) -> None:
    for shard, sample in enumerate(dozen[:3]):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            add_member(tar, "000.png", sample.read())
    found = content(open_source(tmp_path))
    assert list(found) == ["000", "000@1", "000@2"]
    assert [s.read() for s in found.values()] == [s.read() for s in dozen[:3]]


def test_a_key_used_again_and_again_keeps_short_ids(dozen: list[Sample], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for sample in dozen[:4]:
            assert sample.caption is not None
            add_member(tar, "000.png", sample.read())
            add_member(tar, "000.txt", sample.caption.encode())
    found = content(open_source(tmp_path))
    assert list(found) == ["000", "000@a", "000@a@2", "000@a@3"]
    assert [(s.read(), s.caption) for s in found.values()] == [(s.read(), s.caption) for s in dozen[:4]]


def test_many_repeats_of_a_key_take_linear_time() -> None:
    ids = Ids()
    assert [ids.unique("cat", "a") for _ in range(2_000)][-1] == "cat@a@1999"


def test_dots_in_the_names_of_a_tar_lose_no_picture_unsaid(dozen: list[Sample], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("v1.0_1.png", "v1.0_2.png", "v1.0_3.png", "photo.jpg", "photo.mask.png"):
            add_member(tar, name, dozen[0].read())
    found = content(open_source(tmp_path))
    assert list(found) == ["v1", "v1.0_2.png", "v1.0_3.png", "photo"]
    assert reason(found["v1.0_3.png"]).startswith("a second picture of the key 'v1': keys end at the first dot")


def test_tars_one_after_the_other_in_a_file_are_read_to_the_end(dozen: list[Sample], tmp_path: Path) -> None:
    folder = as_tars(dozen, tmp_path / "data")
    both = tmp_path / "both.tar"
    both.write_bytes(b"".join((folder / f"shard-{shard}.tar").read_bytes() for shard in range(2)))
    assert {id: s.read() for id, s in content(open_source(both)).items()} == {s.id: s.read() for s in dozen}
    both.write_bytes(both.read_bytes() + b"\xff" * 512)
    assert "no readable header" in reason(content(open_source(both))["both.tar"])


def test_a_tar_of_the_folder_it_was_made_in_has_plain_keys(dozen: list[Sample], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add_member(tar, "./0001.png", dozen[0].read())
        add_member(tar, "./cat/0002.png", dozen[0].read())
    assert list(content(open_source(tmp_path))) == ["0001", "cat/0002"]


def test_a_saved_dataset_without_ids_loses_no_sample(dozen: list[Sample], tmp_path: Path) -> None:
    """On saving, datasets cuts paths down to names, which recur here in three folders."""
    hf_dataset(dozen).save_to_disk(tmp_path / "a")
    hf_dataset(dozen).save_to_disk(tmp_path / "b")
    first, second = (content(open_source(tmp_path / name)) for name in "ab")
    assert list(first) == list(second)
    assert [s.read() for s in first.values()] == [s.read() for s in dozen]
    assert {id.split("@")[0] for id in first} == {s.id.split("/")[1] for s in dozen}


def test_same_stem_twice_in_a_folder(dozen: list[Sample], tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(dozen[0].read())
    (tmp_path / "a.png").write_bytes(dozen[1].read())
    assert list(content(open_source(tmp_path))) == ["a", "a.png"]


def test_several_captions_give_the_first(dozen: list[Sample], tmp_path: Path) -> None:
    row = {"id": "x", "image": dozen[0].read(), "captions": ["", "an apple", "a fruit"]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "t.parquet")
    assert content(open_source(tmp_path))["x"].caption == "an apple"


def test_links_are_followed_but_not_in_circles(dozen: list[Sample], tmp_path: Path) -> None:
    as_classes(dozen, tmp_path / "real")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "noto").symlink_to(tmp_path / "real" / "noto", target_is_directory=True)
    (tmp_path / "real" / "noto" / "again").symlink_to(tmp_path / "data", target_is_directory=True)
    assert {s.id for s in open_source(tmp_path / "data").samples()} == {s.id for s in dozen if s.id.startswith("noto")}


def test_links_that_lead_nowhere_are_listed(dozen: list[Sample], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(dozen[0].read())
    before = open_source(tmp_path).fingerprint
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    (tmp_path / "notes").symlink_to(tmp_path / "nowhere")
    source = open_source(tmp_path)
    assert source.fingerprint != before  # they have their places among the samples
    found = content(source)
    assert list(found) == ["a", "gone", "loop"]
    assert reason(found["gone"]) == "cannot be read: No such file or directory"
    assert reason(found["loop"]) == "cannot be read: Too many levels of symbolic links"


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AtollError, match=r"gone: cannot be listed: No such file or directory; make it readable"):
        list(folders(tmp_path / "gone"))


def test_kinds_are_told_apart(dozen: list[Sample], tmp_path: Path) -> None:
    told = {name: find_kind(str(write(dozen, tmp_path / name))) for name, write in FORMATS.items()}
    kinds = {"tars": "webdataset", "parquet": "parquet", "datasets parquet": "parquet"}
    folders = dict.fromkeys(("classes", "txt", "jsonl", "csv"), "folder")
    assert told == {**folders, **kinds, **dict.fromkeys(("datasets", "datasets with splits"), "datasets")}
    assert find_kind(str(tmp_path / "tars" / "*.tar")) == "webdataset"
    assert find_kind("emoji:styles=noto") == "emoji"


def test_patterns_and_single_files(dozen: list[Sample], tmp_path: Path) -> None:
    as_tars(dozen, tmp_path / "tars")
    assert len(content(open_source(str(tmp_path / "tars" / "shard-*.tar")))) == 12
    assert len(content(open_source(tmp_path / "tars" / "shard-1.tar"))) == 6


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("./no/such/folder", Options(), "no such file or folder"),
        ("{tmp}", Options(), "no picture in it"),
        ("{tmp}/a.tar.gz", Options(), "unpack it first"),
        ("{tmp}/a.parquet", Options(), "not a parquet file"),
        ("{tmp}", Options(kind="parquet"), "not a parquet file"),
        ("{tmp}/*.tar", Options(), "no .tar file there"),
        ("{tmp}", Options(kind="folderr"), "did you mean 'folder'"),  # type: ignore[arg-type]
        ("{tmp}", Options(held_out=1.0), "held_out is 1.0"),
        ("emoji:style=noto", Options(), "did you mean 'styles'"),
        ("emoji:styles=notto", Options(), "did you mean 'noto'"),
        ("emoji:categories=food", Options(), "did you mean 'food-drink'"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(spec: str, options: Options, words: str, tmp_path: Path) -> None:
    if "parquet" not in spec and options.kind != "parquet":
        (tmp_path / "a.tar.gz").write_bytes(b"x")
    else:
        (tmp_path / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(AtollError, match=words):
        open_source(spec.format(tmp=tmp_path), options)


def test_missing_columns_are_named(dozen: list[Sample], tmp_path: Path) -> None:
    folder = as_parquet(dozen, tmp_path / "data")
    with pytest.raises(AtollError, match=r"unknown column 'captoin' \(did you mean 'caption'"):
        open_source(folder, Options(caption="captoin"))
    pq.write_table(pa.table({"caption": ["x"]}), tmp_path / "no.parquet")
    with pytest.raises(AtollError, match="no column of pictures"):
        open_source(tmp_path / "no.parquet")


def test_a_name_that_is_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(AtollError, match="nobody/nothing: neither a file or folder here, nor a data set"):
        open_source("nobody/nothing")


def test_describe_tells_kind_number_and_examples(dozen: list[Sample], tmp_path: Path) -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    source = open_source(as_txt(dozen, tmp_path / "data"))
    assert describe(source, console=console) == 12
    told = console.export_text()
    assert told.startswith("folder of pictures with .txt captions: 12 samples, ")
    assert sum(sample.id in told for sample in dozen) == 5


def test_metadata_rows_that_fail(dozen: list[Sample], tmp_path: Path) -> None:
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
        list(open_source(tmp_path).samples())


def test_metadata_without_a_caption_leave_it_to_the_text_file(dozen: list[Sample], tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(dozen[0].read())
        (tmp_path / f"{name}.txt").write_text("from the file")
    rows = [{"file_name": "a.png", "caption": ""}, {"file_name": "b.png"}, {"file_name": "c.png", "text": "told"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(json.dumps({**row, "width": 8}) for row in rows))
    told = [(s.id, s.caption, s.attributes) for s in open_source(tmp_path).samples()]
    size = {"width": "8"}
    assert told == [("a", "from the file", size), ("b", "from the file", size), ("c", "told", size)]
    (tmp_path / "metadata.jsonl").unlink()
    (tmp_path / "metadata.csv").write_text("file_name,width\na.png,8,one too many")
    assert content(open_source(tmp_path))["a"].caption == "from the file"


def test_metadata_may_lie_in_a_later_folder(dozen: list[Sample], tmp_path: Path) -> None:
    for name in ("images", "texts"):
        (tmp_path / name).mkdir()
    (tmp_path / "images/a.png").write_bytes(dozen[0].read())
    rows = [{"file_name": "../images/a.png", "text": "told"}, {"file_name": "../images/a.jpg", "text": "no such"}]
    (tmp_path / "texts/metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = content(open_source(tmp_path))
    assert list(found) == ["images/a", "images/a.jpg"]
    assert found["images/a"].caption == "told"


def reason(sample: Sample) -> str:
    with pytest.raises(BadImage) as bad:
        sample.read()
    return bad.value.reason


def test_captions_that_fail(dozen: list[Sample], tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(dozen[0].read())
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.txt").write_bytes(b"  \n")
    found = content(open_source(tmp_path))
    assert reason(found["a"]).startswith("its caption is not UTF-8")
    assert (found["b"].caption, found["c"].caption) == (None, None)
    assert found["b"].read() == found["c"].read() == dozen[0].read()


def test_broken_tars(dozen: list[Sample], tmp_path: Path) -> None:
    folder = as_tars(dozen, tmp_path / "data")
    whole = [s.id for s in open_source(folder / "shard-0.tar").samples()]
    file = folder / "shard-0.tar"
    data = file.read_bytes()
    with tarfile.open(file) as tar:
        third = tar.getmember(f"{whole[2]}.png")
    file.write_bytes(data[: third.offset_data + 10])
    found = content(open_source(file))
    assert list(found) == [*whole[:3], "shard-0.tar"]
    assert reason(found[whole[2]]) == f"the tar breaks off within it: 10 of {third.size} bytes are there"
    assert reason(found["shard-0.tar"]).startswith("the tar is broken")
    assert found[whole[1]].caption is not None

    file.write_bytes(data[: third.offset] + b"\xff" * 512 + data[third.offset + 512 :])
    found = content(open_source(file))
    assert list(found) == [*whole[:2], "shard-0.tar"]
    assert "no readable header" in reason(found["shard-0.tar"])


def test_tar_members_that_fail(dozen: list[Sample], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add_member(tar, "nopicture.txt", b"a caption")
        add_member(tar, "latin.png", dozen[0].read())
        add_member(tar, "latin.txt", b"caf\xe9")
        add_member(tar, "json.jpg", dozen[0].read())
        add_member(tar, "json.json", b"{no json")
        add_member(tar, "plain.jpg", dozen[0].read())
        add_member(tar, "plain.json", b'{"caption": "from json", "label": 3}')
    found = content(open_source(tmp_path))
    assert reason(found["nopicture"]) == "no picture among its members: txt"
    assert reason(found["latin"]).startswith("its caption is not UTF-8")
    assert reason(found["json"]).startswith("its .json is not JSON")
    assert (found["plain"].caption, found["plain"].label) == ("from json", "3")
    asked = content(open_source(tmp_path, Options(caption="alt")))
    assert reason(asked["plain"]) == "it has no 'alt'; it has caption, label"


def test_rows_without_a_picture(dozen: list[Sample], tmp_path: Path) -> None:
    rows = [{"id": "a", "image": None}, {"id": "b", "image": dozen[0].read()}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    found = content(open_source(tmp_path))
    assert reason(found["a"]) == "the table has no picture in this row"
    assert found["b"].read() == dozen[0].read()


@pytest.mark.parametrize("id", [None, "key"])
def test_the_column_of_ids_may_be_asked_for_as_class(dozen: list[Sample], tmp_path: Path, id: str | None) -> None:
    rows = [{"key": "cat", "filename": "1.png", "image": dozen[0].read()}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    (sample,) = open_source(tmp_path, Options(label="key", id=id)).samples()
    assert (sample.id, sample.label, sample.read()) == ("cat" if id else "1", "cat", dozen[0].read())


def test_views_of_bytes_are_pictures(dozen: list[Sample], tmp_path: Path) -> None:
    pictures = pa.array([dozen[0].read()], pa.binary_view())
    pq.write_table(pa.table({"id": ["a"], "image": pictures}), tmp_path / "t.parquet")
    assert content(open_source(tmp_path))["a"].read() == dozen[0].read()


@pytest.mark.parametrize("column", ["id", "image"])
def test_damaged_pages_are_told_with_the_file(dozen: list[Sample], tmp_path: Path, column: str) -> None:
    file = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_pylist(rows_of(dozen)), file, use_dictionary=False)
    group = pq.read_metadata(file).row_group(0)
    start = next(group.column(i) for i in range(4) if group.column(i).path_in_schema == column).data_page_offset
    data = file.read_bytes()
    file.write_bytes(data[:start] + b"\xff" * 60 + data[start + 60 :])
    if column == "id":
        with pytest.raises(AtollError, match=r"t.parquet: row group 0 is damaged: .*; restore the file"):
            list(open_source(file).samples())
    else:
        (first, *_) = open_source(file).samples()
        assert reason(first).startswith("row group 0 of t.parquet is damaged: ")
