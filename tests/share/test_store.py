"""The guarantees of a store: on a file system, in memory, and on real S3 servers."""

import hashlib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from atoll.apps.share import transfer
from atoll.apps.share.store import Store
from atoll.apps.share.transfer import fetch, parts_of, read_manifest, upload
from atoll.core.artifacts import Artifact, FileEntry, Manifest
from atoll.core.errors import AtollError
from atoll.core.manifests import SHARDS
from atoll.verify.untrusted import Refused
from share.servers import proxy, server_without_conditions


def make(run: Path, name: str = "data/shards/cluster_000", sizes: tuple[int, ...] = (10, 0, 3_000_000)) -> Artifact:
    artifact = Artifact(run, name)
    artifact.begin(SHARDS, {"name": name})
    for number, size in enumerate(sizes):
        artifact.write(f"file-{number}.bin", np.random.default_rng(number).bytes(size))
    artifact.commit({"rows": 1})
    return artifact


def content(artifact: Artifact) -> dict[str, str]:
    files = [path for path in artifact.folder.rglob("*") if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def manifest_of(artifact: Artifact) -> Manifest:
    found = artifact.manifest()
    assert found is not None
    return found


def test_keys_are_created_once(store: Store) -> None:
    store.probe()
    assert store.create("a/b", b"first")
    assert not store.create("a/b", b"second")
    assert store.create("a/b", b"first"), "writing equal content is not a conflict"
    assert store.read("a/b") == b"first"
    assert store.read("a/c") is None
    assert store.entry("a/c") is None
    store.write("a/c", b"")
    assert [(entry.key, entry.size) for entry in store.entries("a")] == [("a/b", 5), ("a/c", 0)]
    store.delete(["a/b", "a/never"])
    assert [entry.key for entry in store.entries("a")] == ["a/c"]
    assert store.entries("leases") == []


def test_an_object_that_is_too_large_is_not_read(store: Store) -> None:
    store.write("a", bytes(1001))
    with pytest.raises(AtollError, match="1,001 bytes; the limit is 1,000"):
        store.read("a", 1000)


def test_the_clock_of_the_store_matches_modification_times(store: Store) -> None:
    before = store.now()
    store.write("a", b"")
    entry = store.entry("a")
    assert -1.5 < entry.modified - before < 10


def test_a_store_that_ignores_conditional_writes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server accepts every conditional write with status 200, like several S3 clones."""
    with server_without_conditions() as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        with pytest.raises(AtollError, match="ignores conditional writes"):
            Store.open("s3://bucket/run").probe()


def test_an_unknown_url_scheme_is_refused() -> None:
    with pytest.raises(AtollError, match="gopher://x: cannot be opened"):
        Store.open("gopher://x")


def test_an_artifact_makes_the_round_trip(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts divide the large file; stored objects are not sent again."""
    monkeypatch.setattr(transfer, "PART_BYTES", 1 << 20)
    source = make(tmp_path / "a")
    upload(store, source, manifest_of(source), name=source.name)
    assert len(store.entries(f"{source.name}/sha256")) == 2 + 3
    target = Artifact(tmp_path / "b", source.name)
    manifest = read_manifest(store, source.name, manifest_of(source).digest)
    fetch(store, source.name, manifest, target=target)
    assert target.open(SHARDS, verify=True).digest == manifest.digest
    assert content(target) == content(source)
    written = {entry.key: entry.modified for entry in store.entries(source.name)}
    upload(store, source, manifest, name=source.name)
    assert {entry.key for entry in store.entries(source.name)} == set(written)
    fetch(store, source.name, manifest, target=target)


def test_a_huge_file_is_refused_before_its_parts_are_listed(store: Store, tmp_path: Path) -> None:
    """A manifest may claim 2^44 bytes, half a million parts; the disk is looked at first."""
    huge = Manifest("shards", {}, {}, {"a.safetensors": FileEntry(1 << 44, "0" * 64)})
    tracemalloc.start()
    with pytest.raises(AtollError, match="bytes are needed to download"):
        fetch(store, "x", huge, target=Artifact(tmp_path, "x"))
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_two_contents_under_one_name_do_not_mix(store: Store, tmp_path: Path) -> None:
    first, second = make(tmp_path / "a"), make(tmp_path / "b", sizes=(11,))
    for source in (first, second):
        upload(store, source, manifest_of(source), name=source.name)
    for number, source in enumerate((first, second)):
        manifest = read_manifest(store, source.name, manifest_of(source).digest)
        assert manifest is not None
        target = Artifact(tmp_path / f"c{number}", source.name)
        fetch(store, source.name, manifest, target=target)
        assert content(target) == content(source)


def test_a_damaged_object_is_refused(store: Store, tmp_path: Path) -> None:
    source = make(tmp_path / "a")
    manifest = manifest_of(source)
    upload(store, source, manifest, name=source.name)
    part = parts_of(source.name, manifest.files["file-2.bin"])[0]
    data = bytearray(store.read(part.key, 1 << 30) or b"")
    data[1000] ^= 1
    store.write(part.key, bytes(data))
    target = Artifact(tmp_path / "b", source.name)
    with pytest.raises(Refused, match=r"file-2.bin does not match its manifest \(its SHA-256 differs\)"):
        fetch(store, source.name, manifest, target=target)
    assert target.manifest() is None
    assert not target.path("file-2.bin").exists()
    store.write(part.key, source.path("file-2.bin").read_bytes())
    fetch(store, source.name, manifest, target=target)
    assert content(target) == content(source)


def test_an_interrupted_upload_leaves_no_partial_object(
    s3: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut every connection after 100 kB: the upload fails and leaves only complete objects. A later upload finishes."""
    monkeypatch.setattr(transfer, "PART_BYTES", 1 << 20)
    monkeypatch.setattr("atoll.apps.share.store.ATTEMPTS", 1)
    source = make(tmp_path / "a", sizes=(50_000, 3_000_000))
    manifest = manifest_of(source)
    with proxy(s3) as line:
        monkeypatch.setenv("AWS_ENDPOINT_URL", line.address)
        store = Store.open(bucket)
        line.cut_up = [100_000] * 1000
        with pytest.raises(AtollError, match="does not respond"):
            upload(store, source, manifest, name=source.name)
        assert line.cuts >= 3
        line.cut_up = []
        sizes = {part.key: part.size for entry in manifest.files.values() for part in parts_of(source.name, entry)}
        there = store.entries(source.name)
        assert all(sizes[entry.key] == entry.size for entry in there)
        assert len(there) < len(sizes)
        with pytest.raises(Refused, match="has no manifest"):
            read_manifest(store, source.name, manifest.digest)
        before = line.up
        line.cut_up = [700_000, 300_000]  # two more cuts, which the retries survive
        upload(store, source, manifest, name=source.name)
        assert line.up - before < 1.5 * 3_050_000
        fetch(store, source.name, manifest, target=Artifact(tmp_path / "b", source.name))
    assert content(Artifact(tmp_path / "b", source.name)) == content(source)


def test_an_interrupted_download_leaves_no_partial_file_and_resumes(
    s3: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "a", sizes=(4_000_000,))
    manifest = manifest_of(source)
    upload(Store.open(bucket), source, manifest, name=source.name)
    target = Artifact(tmp_path / "b", source.name)
    with proxy(s3) as line:
        monkeypatch.setenv("AWS_ENDPOINT_URL", line.address)
        monkeypatch.setattr("atoll.apps.share.store._RETRY_CONFIG", {"max_retries": 0})
        monkeypatch.setattr(transfer, "ATTEMPTS", 2)
        monkeypatch.setattr(transfer, "backoff", lambda _: 0)
        store = Store.open(bucket)
        line.cut_down = [1_500_000, *[0] * 50]
        with pytest.raises(AtollError, match="of 4,000,000 bytes"):
            fetch(store, source.name, manifest, target=target)
        assert target.manifest() is None
        assert not target.path("file-0.bin").exists()
        line.cut_down = [1_000_000]
        fetch(store, source.name, manifest, target=target)
        assert line.cuts >= 3
        assert line.down < 1.2 * 4_000_000, "a download must resume where it was cut"
    assert content(target) == content(source)


def test_little_more_than_the_artifact_is_transferred(
    s3: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "a", sizes=(2_000_000, 2_000_000, 500_000))
    size = sum(entry.size for entry in manifest_of(source).files.values())
    with proxy(s3) as line:
        monkeypatch.setenv("AWS_ENDPOINT_URL", line.address)
        store = Store.open(bucket)
        upload(store, source, manifest_of(source), name=source.name)
        assert line.up < 1.05 * size
        fetch(store, source.name, manifest_of(source), target=Artifact(tmp_path / "b", source.name))
        assert line.down < 1.05 * size
