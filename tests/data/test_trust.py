"""What the author of a dataset or of a model folder can do to its users."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from atoll.core.config import Config, resolve
from atoll.core.errors import AtollError
from atoll.core.manifests import LatentSpec, TextSpec
from atoll.data.images import BadImage, decode
from atoll.data.prepare import prepare
from atoll.data.sources.open import open_source
from atoll.data.sources.source import SourceImage
from atoll.encoders import autoencoder, pretrained, text
from atoll.encoders.autoencoder import EMOJI
from atoll.encoders.encoders import Encoders
from data import hostile_sources as hostile
from waiting import HOUR

# Every attack would take more, most of them gigabytes. Reading an honest source takes some tens of megabytes.
MAX_MEGABYTES = 450


def read(*folders: Path) -> list[dict[str, Any]]:
    """Read sources in another process; assert that it does not need much memory, and return the outcomes."""
    command = [sys.executable, str(Path(__file__).parent / "read_hostile.py"), *map(str, folders)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HOUR, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["megabytes"] < MAX_MEGABYTES
    found: list[dict[str, Any]] = printed["found"]
    return found


def reason(image: SourceImage) -> str:
    with pytest.raises(BadImage) as bad:
        image.read()
    return bad.value.reason


# Images


def test_image_bombs_are_rejected_one_by_one(tmp_path: Path) -> None:
    (found,) = read(hostile.folder_of_bombs(tmp_path / "source"))
    outcomes = found["outcomes"]
    assert [id for id, outcome in outcomes.items() if outcome == "fine"] == ["good"]
    assert outcomes["rgba"] == "89,100,000 pixels to decode are more than the limit of 33,554,432; make it smaller"
    assert outcomes["sparse"] == "it has 1,099,511,627,776 bytes; the limit is 268,435,456"
    assert outcomes["caption"] == "its caption caption.txt has 1,099,511,627,776 bytes; the limit is 65,536"
    assert "1,073,741,824 pixels to decode" in outcomes["tiff tile"]
    for name in hostile.IMAGES:
        assert "bomb" in outcomes[name] or "more than the limit" in outcomes[name], name


def test_the_largest_image_is_decoded_in_little_memory(tmp_path: Path) -> None:
    """134 MB of pixels in 600 kB; compositing it as a whole took five times as much."""
    (tmp_path / "large.png").write_bytes(hostile.png_of(5792, 5792))
    (found,) = read(tmp_path)
    assert found["outcomes"] == {"large": "fine"}


def test_a_large_photograph_is_decoded_at_a_fraction_of_its_size(tmp_path: Path) -> None:
    Image.new("RGB", (8000, 6000), "red").save(tmp_path / "photo.jpg")
    data = (tmp_path / "photo.jpg").read_bytes()
    assert decode(data, 16).getpixel((8, 8)) == (254, 0, 0)
    with pytest.raises(BadImage, match="to decode are more than the limit"):
        decode(data, 4096)


# Folders


def test_links_out_of_a_folder_are_not_read(tmp_path: Path) -> None:
    folder = hostile.folder_of_links(tmp_path / "source")
    (found,) = read(folder)
    outcomes = found["outcomes"]
    assert {id for id, outcome in outcomes.items() if outcome == "fine"} == {"good", "own"}
    assert found["captions"] == ["an honest caption"]
    private = f"{tmp_path}/private"
    assert outcomes["image"].startswith(f"it is a link to {private}/secret.png, which is outside {folder}")
    assert outcomes["subfolder"].startswith(f"it is a link to {private}, which is outside")
    for name in ("absolute", "relative", "chain", "caption"):
        assert outcomes[name].startswith(f"its caption {name}.txt is a link to {private}/secret.txt")
    for path in ("../private/secret.png", f"{private}/secret.png"):
        assert outcomes[path] == "listed in metadata.jsonl, but there is no such file"


def test_metadata_must_be_in_the_folder_and_valid(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "good.png").write_bytes(hostile.png())
    (tmp_path / "private.jsonl").write_text('{"file_name": "good.png", "text": "secret"}')
    (folder / "metadata.jsonl").symlink_to(tmp_path / "private.jsonl")
    with pytest.raises(AtollError, match=r"metadata.jsonl is not read: it is a link to .*private.jsonl"):
        open_source(folder)
    (folder / "metadata.jsonl").unlink()
    with (folder / "metadata.jsonl").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(AtollError, match=r"metadata.jsonl is not read: it has 1,099,511,627,776 bytes"):
        open_source(folder)
    for line, words in (
        ('{"file_name": 5}', "row 1: expected a file_name"),
        ('{"file_name": ["good.png"]}', "row 1: expected a file_name"),
        ("[" * 100_000, "row 1: "),
        ('{"file_name": "good.png", "x": ' + "9" * 5000 + "}", "row 1: "),
    ):
        (folder / "metadata.jsonl").write_text(line)
        with pytest.raises(AtollError, match=words):
            list(open_source(folder).images())
    (folder / "metadata.jsonl").unlink()
    (folder / "metadata.csv").write_text(f"file_name,text\ngood.png,{'a' * 200_000}\n")
    with pytest.raises(AtollError, match=r"metadata.csv, row 1: field larger than field limit"):
        list(open_source(folder).images())
    # With a good row, the bad ones are listed as rejected.
    bad = f"good.png,{'a' * 200_000}"
    (folder / "metadata.csv").write_text(f"file_name,text\n{bad}\n,nameless\ngood.png,fine\n")
    _, large, nameless = open_source(folder).images()
    assert reason(large) == "row 1 of metadata.csv: field larger than field limit (131072)"
    assert reason(nameless) == "row 2 of metadata.csv: expected a file_name, got text"
    (folder / "metadata.csv").unlink()
    lines = ['{"file_name": 5}', "[" * 100_000, '{"file_name": "good.png", "text": "fine"}']
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    _, five, deep = open_source(folder).images()
    assert "row 1 of metadata.jsonl: expected a file_name" in reason(five)
    assert "row 2 of metadata.jsonl: " in reason(deep)
    (folder / "metadata.jsonl").unlink()
    (folder / "metadata.csv").write_text(f"file_name,text,note\ngood.png,fine,{'a' * 100_000}\n")
    (image,) = open_source(folder).images()
    assert reason(image) == "its note has 100,000 characters; the limit is 65,536"


def test_very_deep_folders_are_an_error(tmp_path: Path) -> None:
    folder = tmp_path
    for _ in range(150):
        folder /= "a"
    folder.mkdir(parents=True)
    (tmp_path / "good.png").write_bytes(hostile.png())
    with pytest.raises(AtollError, match="nested more than 100 deep"):
        open_source(tmp_path)


# Tars


def test_hostile_tars_end_nothing_but_their_own_images(tmp_path: Path) -> None:
    (found,) = read(hostile.tars(tmp_path / "source"))
    outcomes = found["outcomes"]
    good = {f"good-{number}" for number in range(len(hostile.TARS))}
    assert good <= outcomes.keys()
    assert {id for id, outcome in outcomes.items() if outcome == "fine"} == good | {"x@06 deep caption"}
    assert outcomes["x"] == "its member of the tar has 1,099,511,627,776 bytes; the limit is 268,435,456"
    for name in ("07 pax claims.tar", "08 long name claims.tar"):
        assert outcomes[name].startswith("the tar is broken: ")
    assert outcomes["x@11 symbolic link"] == "it is a link to '/etc/passwd'; links in tars are not followed"
    assert "root:" not in json.dumps(found)


# Tables


def table_of_paths(*paths: str) -> pa.Table:
    cells = [{"bytes": None, "path": path} for path in paths]
    return pa.table({"image": pa.array(cells, pa.struct({"bytes": pa.binary(), "path": pa.string()}))})


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_cells_name_files_of_their_folder_only(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    (tmp_path / "secret.png").write_bytes(hostile.png())
    outside = [
        str(tmp_path / "secret.png"), "../secret.png", "in/../../secret.png", "/etc/passwd", "link.png", "a\0b", "~/x",
        "in",
    ]  # fmt: skip
    cells = table_of_paths(*outside, "in/good.png")
    if kind == "datasets":
        datasets.Dataset(cells).save_to_disk(folder)
    else:
        folder.mkdir()
        pq.write_table(cells, folder / "t.parquet")
    (folder / "in").mkdir()
    (folder / "in" / "good.png").write_bytes(hostile.png())
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    *bad, good = open_source(folder if kind == "datasets" else folder / "t.parquet").images()
    assert good.read() == hostile.png()
    for image, path in zip(bad, outside, strict=True):
        if path in ("~/x", "in"):
            assert "cannot be read" in reason(image) or "not a regular file" in reason(image)
        else:
            assert reason(image).endswith("which is outside its folder, so it is not read")
            assert repr(path)[:200] in reason(image)


def test_a_saved_dataset_names_files_of_its_folder_only(tmp_path: Path) -> None:
    rows = {"image": [hostile.png()], "id": ["private"]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "private")
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "source")
    state = json.loads((tmp_path / "source/state.json").read_text())
    for name in ("../private/data-00000-of-00001.arrow", str(tmp_path / "private/data-00000-of-00001.arrow")):
        state["_data_files"] = [{"filename": name}]
        (tmp_path / "source/state.json").write_text(json.dumps(state))
        with pytest.raises(AtollError, match=r"state.json names the file .*private.*outside the folder"):
            open_source(tmp_path / "source")
    for broken in ("{}", "[]", '{"_data_files": 3}'):
        (tmp_path / "source/state.json").write_text(broken)
        with pytest.raises(AtollError):
            open_source(tmp_path / "source")


@pytest.mark.parametrize("stored", [b"[", b"[]", b'{"info": 3}', b'{"info": {"features": {"text": {"names": 5}}}}'])
def test_invalid_class_names_in_the_schema_are_ignored(stored: bytes, tmp_path: Path) -> None:
    table = pa.table({"image": [hostile.png()], "text": ["a"]}).replace_schema_metadata({b"huggingface": stored})
    pq.write_table(table, tmp_path / "t.parquet")
    (image,) = open_source(tmp_path).images()
    assert (image.caption, image.read()) == ("a", hostile.png())


@pytest.mark.parametrize("suffix", [".tar", ".parquet"])
def test_tars_and_tables_must_be_in_the_folder(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "source").mkdir()
    file = tmp_path / "private" / f"t{suffix}"
    if suffix == ".tar":
        file.write_bytes(hostile.stored("good.png", hostile.png()) + hostile.END)
    else:
        pq.write_table(pa.table({"image": [hostile.png()]}), file)
    (tmp_path / "source" / f"link{suffix}").symlink_to(file)
    for spec in (tmp_path / "source", f"{tmp_path}/source/*{suffix}"):
        with pytest.raises(AtollError, match=rf"link{suffix} is a link to .*private/t{suffix}, which is outside"):
            open_source(spec)
    (image,) = open_source(tmp_path / "source" / f"link{suffix}").images()  # the user named this file
    assert image.read() == hostile.png()


# The verb


def configured(source: Path) -> Config:
    values = {"source": str(source), "max_rejects": 1.0, "resolution": 8, "workers": 2}
    return resolve({"data": values}, source="test")


@pytest.mark.hostile
@pytest.mark.parametrize("kind", ["links", "bombs", "tars"])
def test_prepare_lists_attacks_as_rejects_and_continues(kind: str, tmp_path: Path) -> None:
    write = {"links": hostile.folder_of_links, "bombs": hostile.folder_of_bombs, "tars": hostile.tars}[kind]
    run = tmp_path / "run"
    prepare(run, configured(write(tmp_path / "source")), ["ingest"])
    images = pq.read_table(run / "data/ingest/images.parquet")
    rejected = [line.split("\t") for line in (run / "data/ingest/rejected.txt").read_text().splitlines()]
    expected = {"links": {"good", "own"}, "bombs": {"good"}}.get(kind)
    assert expected is None or set(images["id"].to_pylist()) == expected
    assert len(rejected) >= 9
    assert all(len(line) == 2 and line[1] for line in rejected)
    assert all(hostile.SECRET not in file.read_bytes() for file in run.rglob("*") if file.is_file())


# Models


def test_a_path_that_does_not_exist_is_not_asked_for_at_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    import atoll

    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/mine").mkdir(parents=True)

    def ask(*given: object, **_: object) -> None:
        raise AssertionError(f"the hub was asked for {given}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", ask)
    monkeypatch.setattr(datasets, "load_dataset", ask)
    with pytest.raises(AtollError, match=r"runs/nope: no such folder; runs has mine\. For the model"):
        atoll.load("runs/nope")
    with pytest.raises(AtollError, match=r"runs/nope: no such folder; runs has mine\. For the dataset"):
        open_source("runs/nope")
    for name in ("Meine Fotos", "photos", "a/b/c"):
        with pytest.raises(AtollError, match=f"{name}: no such file or folder"):
            open_source(name)


def test_a_bare_name_is_a_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of that name in the working directory is not read; the message says how to name it."""
    from atoll.experts.pipeline_folder import fetch, is_folder

    monkeypatch.chdir(tmp_path)
    shutil.copytree(EMOJI, tmp_path / "owner/name")
    requested: list[str] = []

    def download(name: str, **_: object) -> str:
        requested.append(name)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    words = (
        r"could not be downloaded .*owner/name is a name on the hub; for the folder of that name here, write \./owner"
    )
    for open_it in (
        autoencoder.open_codec,
        pretrained.model_folder,
        lambda name: text.open_text_encoder(name, 8),
        fetch,
    ):
        with pytest.raises(AtollError, match=words):
            open_it("owner/name")
        assert "note: owner/name is a name on the hub" in capsys.readouterr().err
    assert requested == ["owner/name"] * 4
    assert is_folder("owner/name")
    for name in ("./owner/name", str(tmp_path / "owner/name"), "owner/../owner/name"):
        assert pretrained.model_folder(name).resolve() == tmp_path / "owner/name"
    assert fetch(Path("owner/name")) == tmp_path / "owner/name"
    assert not is_folder("./owner/name")  # no pipeline
    assert len(requested) == 4


def test_a_bare_name_of_a_source_is_not_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/name").mkdir(parents=True)
    (tmp_path / "owner/name/good.png").write_bytes(hostile.png())
    with pytest.raises(AtollError, match=r"owner/name is a name on the hub; .* write \./owner/name"):
        open_source("owner/name")
    for spec in ("./owner/name", str(tmp_path / "owner/name"), "owner"):
        assert len(list(open_source(spec).images())) == 1


def test_encoders_are_compared_with_the_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "vae"
    shutil.copytree(EMOJI, folder)
    right = pretrained.fingerprint(folder)
    spec = LatentSpec(autoencoder=str(folder), weights=right, resolution=64, shape=(12, 8, 8))
    assert Encoders.of(spec, None).autoencoder() is not None
    changed = tmp_path / "other"
    shutil.copytree(folder, changed)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**config, "scaling_factor": 9.0}))
    wrong = pretrained.fingerprint(changed)
    words = f"the autoencoder {changed} has the fingerprint {wrong}, but these networks were trained with {right}"
    with pytest.raises(AtollError, match=words):
        Encoders.of(spec.model_copy(update={"autoencoder": str(changed)}), None).autoencoder()
    spec_of_text = TextSpec(encoder="minilm", weights="0" * 64, max_tokens=8, dimensions=384, pooled=384)
    found = text.weights_of("minilm")
    with pytest.raises(AtollError, match=f"the text encoder minilm has the fingerprint {found}, .* with {'0' * 64}"):
        Encoders.of(spec, spec_of_text).text_encoder()
    same = spec_of_text.model_copy(update={"weights": found})
    assert Encoders.of(spec, same).text_encoder().max_tokens == 8


@pytest.mark.parametrize("name", ["source.spm", "vocab.bpe", "sub/tokenizer.vocab"])
def test_files_beyond_the_fingerprint_are_refused(name: str, tmp_path: Path) -> None:
    shutil.copytree(EMOJI, tmp_path / "vae")
    (tmp_path / "vae" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "vae" / name).write_text("")
    with pytest.raises(AtollError, match=f"{name} would be loaded, but is not part of the folder's fingerprint"):
        autoencoder.open_codec(str(tmp_path / "vae"))


@pytest.mark.parametrize("shard", ["../private.safetensors", "/tmp/x.safetensors", "a/b.safetensors"])
def test_weights_outside_the_folder_are_refused(shard: str, tmp_path: Path) -> None:
    shutil.copytree(EMOJI, tmp_path / "vae")
    index = tmp_path / "vae/diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"x": shard}}))
    with pytest.raises(AtollError, match=f"index.json names the file '{shard}', which is not beside it"):
        autoencoder.open_codec(str(tmp_path / "vae"))


def test_a_text_that_is_not_utf8_rejects_its_row_only(tmp_path: Path) -> None:
    raw = pa.array([b"fine", b"caf\xe9", None])
    texts = pa.StringArray.from_buffers(3, *raw.buffers()[1:], raw.buffers()[0])
    pq.write_table(
        pa.table({"image": [hostile.png()] * 3, "id": ["a", "b", "c"], "text": texts}), tmp_path / "t.parquet"
    )
    fine, bad, none = open_source(tmp_path).images()
    assert (fine.caption, none.caption) == ("fine", None)
    assert fine.read() == none.read() == hostile.png()
    assert reason(bad).startswith("its caption is not UTF-8")
