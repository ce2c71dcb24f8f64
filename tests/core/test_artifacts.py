import hashlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.core import artifacts as run
from atoll.core.artifacts import Artifact, ArtifactKind, Content, differences
from atoll.core.errors import AtollError
from atoll.core.layout import MANIFEST_FILE


class Things(Content):
    rows: int = 0


THINGS, OTHERS = ArtifactKind("things", Things), ArtifactKind("others", Things)


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return Artifact(tmp_path, "data/things")


def make(artifact: Artifact, made_from: dict[str, object] | None = None) -> None:
    assert artifact.begin(THINGS, made_from or {"seed": 0}) is None
    artifact.write("b.json", b"{}")
    artifact.write_tensors("sub/a.safetensors", {"x": torch.arange(4)})
    artifact.commit({"rows": 4})


def test_a_committed_artifact_reads_back(artifact: Artifact) -> None:
    make(artifact)
    manifest = artifact.open(THINGS, verify=True)
    assert manifest.content == {"rows": 4}
    assert manifest.made_from == {"seed": 0}
    assert list(manifest.files) == ["b.json", "sub/a.safetensors"]
    assert manifest.files["b.json"].sha256 == hashlib.sha256(b"{}").hexdigest()
    assert manifest.files["b.json"].size == 2
    assert manifest.digest == hashlib.sha256(artifact.path(MANIFEST_FILE).read_bytes()).hexdigest()
    assert torch.equal(load_file(artifact.path("sub/a.safetensors"))["x"], torch.arange(4))


def test_a_file_written_in_parts_is_hashed_once(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit reads other files only."""
    artifact.begin(THINGS, {"seed": 0})
    data = bytes(range(256)) * 1000
    entry = artifact.write_parts("parts.bin", [data[:7], memoryview(data)[7:100_000], data[100_000:]])
    artifact.write("b.json", b"{}")
    read: list[str] = []
    hash_file = run.sha256_of
    monkeypatch.setattr(run, "sha256_of", lambda file: read.append(file.name) or hash_file(file))
    made = artifact.commit({"rows": 4}, hashed={"parts.bin": entry})
    assert read == ["b.json"]
    assert (entry.size, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert made == artifact.open(THINGS, verify=True)
    assert list(made.files) == ["b.json", "parts.bin"]
    assert artifact.path("parts.bin").read_bytes() == data


def test_a_hashed_file_that_is_missing_is_not_committed(artifact: Artifact) -> None:
    artifact.begin(THINGS, {"seed": 0})
    entry = artifact.write_parts("parts.bin", [b"content"])
    artifact.path("parts.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"parts.bin"):
        artifact.commit({"rows": 4}, hashed={"parts.bin": entry})
    assert artifact.manifest() is None


def test_making_it_again_does_nothing(artifact: Artifact) -> None:
    make(artifact)
    before = artifact.path(MANIFEST_FILE).read_bytes()
    done = artifact.begin(THINGS, {"seed": 0})
    assert done is not None
    assert done == artifact.open(THINGS)
    assert artifact.path(MANIFEST_FILE).read_bytes() == before


def test_the_error_of_a_stale_artifact_names_what_changed(artifact: Artifact) -> None:
    make(artifact, {"model": "dinov2", "size": {"width": 224, "height": 224}, "weights": "a" * 64})
    with pytest.raises(AtollError) as caught:
        artifact.begin(THINGS, {"model": "clip", "size": {"width": 256, "height": 224}, "weights": "b" * 64})
    message = str(caught.value)
    assert "model was dinov2, now clip" in message
    assert "size.width was 224, now 256" in message
    assert "height" not in message
    assert "weights was aaaaaaaaaaaa…, now bbbbbbbbbbbb…" in message
    assert "change this one back, or use another run folder" in message


def test_a_half_made_artifact_is_not_continued_with_other_settings(artifact: Artifact) -> None:
    assert artifact.begin(THINGS, {"seed": 0}) is None
    artifact.write("a", b"1")
    assert artifact.begin(THINGS, {"seed": 0}) is None
    with pytest.raises(AtollError, match="seed was 0, now 1"):
        artifact.begin(THINGS, {"seed": 1})
    with pytest.raises(AtollError, match="is not finished; make it with: atoll prepare"):
        artifact.open(THINGS)


def test_a_missing_artifact_and_another_kind_are_refused(artifact: Artifact) -> None:
    with pytest.raises(AtollError, match="does not exist"):
        artifact.open(THINGS)
    make(artifact)
    with pytest.raises(AtollError, match="is an artifact of kind 'things'; expected 'others'"):
        artifact.open(OTHERS)


def test_damaged_files_are_errors(artifact: Artifact) -> None:
    make(artifact)
    file = artifact.path("sub/a.safetensors")
    good = file.read_bytes()
    file.write_bytes(good[:-1] + b"\xff")
    artifact.open(THINGS)
    with pytest.raises(AtollError, match="SHA-256 differs"):
        artifact.open(THINGS, verify=True)
    file.write_bytes(good[:-1])
    with pytest.raises(AtollError, match=f"has {len(good) - 1} bytes, but the manifest lists {len(good)}"):
        artifact.open(THINGS)
    file.unlink()
    with pytest.raises(AtollError, match="is missing"):
        artifact.open(THINGS)
    artifact.path(MANIFEST_FILE).write_text('{"format": 1}')
    with pytest.raises(AtollError, match="is not a manifest"):
        artifact.open(THINGS)


def test_an_unknown_format_is_refused(artifact: Artifact) -> None:
    make(artifact)
    value = json.loads(artifact.path(MANIFEST_FILE).read_text())
    artifact.path(MANIFEST_FILE).write_text(json.dumps({**value, "format": 2}))
    with pytest.raises(AtollError, match="has format 2; this version of Atoll reads format 1"):
        artifact.manifest()


def test_scratch_files_are_removed_by_the_commit(artifact: Artifact) -> None:
    artifact.begin(THINGS, {"seed": 0})
    artifact.write("a", b"1")
    artifact.write(".parts/0", b"2")
    artifact.path(".left-by-a-killed-job.123").write_bytes(b"3")
    assert list(artifact.commit({}).files) == ["a"]
    assert sorted(path.name for path in artifact.folder.iterdir()) == ["a", MANIFEST_FILE]


def test_files_are_flushed_to_disk_before_the_manifest(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also files that were not written through the artifact, as networks write theirs."""
    flushed, flush = list[str](), run._flush
    monkeypatch.setattr(run, "_flush", lambda path: (flushed.append(path.name), flush(path)))
    artifact.begin(THINGS, {"seed": 0})
    artifact.path("weights").write_bytes(b"1")
    artifact.commit({})
    assert flushed.index("weights") < next(place for place, name in enumerate(flushed) if MANIFEST_FILE in name)


def test_a_failing_writer_leaves_no_file(artifact: Artifact) -> None:
    artifact.begin(THINGS, {"seed": 0})

    def fail_half_way() -> None:
        with artifact.writing("a") as path:
            path.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_half_way()
    assert not artifact.path("a").exists()


def test_two_jobs_can_commit_the_same_files(tmp_path: Path) -> None:
    one, two = Artifact(tmp_path, "x"), Artifact(tmp_path, "x")
    one.begin(THINGS, {"seed": 0})
    two.begin(THINGS, {"seed": 0})
    one.write("a", b"1")
    plan = one.path(".plan.json").read_bytes()
    first = one.commit({"rows": 1})
    assert two.commit({"rows": 1}).digest == first.digest
    two.path(".plan.json").write_bytes(plan)
    assert two.commit({"rows": 1}).digest == first.digest
    two.path(".plan.json").write_bytes(plan)
    with pytest.raises(AtollError, match="another job with other content, which is complete") as raised:
        two.commit({"rows": 2})
    assert "delete" not in str(raised.value)
    two.path(".plan.json").write_bytes(plan)
    two.write("a", b"2")
    with pytest.raises(AtollError, match="x/a does not match the manifest"):
        two.commit({"rows": 2})


def test_many_concurrent_jobs_commit_once(tmp_path: Path) -> None:
    for round in range(30):
        run = tmp_path / str(round)

        def job(number: int, run: Path = run) -> str:
            artifact = Artifact(run, "x")
            if done := artifact.begin(THINGS, {"seed": 0}):
                return done.digest
            artifact.write("a" if number % 2 else "b", b"1")
            while not (artifact.path("a").exists() and artifact.path("b").exists()):
                pass
            return artifact.commit({"rows": 2}).digest

        with ThreadPoolExecutor(4) as pool:
            assert len(set(pool.map(job, range(4)))) == 1
        assert sorted(path.name for path in (run / "x").iterdir()) == ["a", "b", MANIFEST_FILE]


def test_commit_without_begin_is_an_error(artifact: Artifact) -> None:
    with pytest.raises(ValueError, match="commit without begin"):
        artifact.commit({})


WRITER = """
import sys
from itertools import count
from pathlib import Path
from atoll.core.artifacts import Artifact, ArtifactKind, Content
artifact = Artifact(Path(sys.argv[1]), "x")
artifact.begin(ArtifactKind("things", Content), {"seed": 0})
for number in count():
    artifact.write("a", bytes([number % 256]) * 3_000_000)
    print("written", flush=True)
"""


def test_no_file_is_half_written_after_kill_9(tmp_path: Path) -> None:
    for moment in range(5):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(0.02 * moment)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        data = (tmp_path / "x/a").read_bytes()
        assert len(data) == 3_000_000
        assert len(set(data)) == 1


def test_differences_name_every_leaf_once() -> None:
    assert differences({"a": 1}, {"a": 1}) == []
    assert differences({"a": 1, "b": 2}, {"a": 1, "c": 3}) == ["b was 2, now null", "c was null, now 3"]
    assert differences({"kind": "x", "made_from": {"a": {"b": 1}}}, {"kind": "x", "made_from": {"a": {"b": [2]}}}) == [
        "a.b was 1, now [2]"
    ]


def test_the_plan_of_a_half_made_artifact_is_not_removed(artifact: Artifact) -> None:
    artifact.begin(THINGS, {"seed": 0})
    artifact.write("a", b"1")
    artifact.sweep()
    with pytest.raises(AtollError, match="seed was 0, now 1"):
        artifact.begin(THINGS, {"seed": 1})


def test_files_without_a_plan_or_manifest_are_orphans(artifact: Artifact) -> None:
    assert not artifact.orphaned()
    artifact.begin(THINGS, {"seed": 0})
    artifact.write("a", b"1")
    assert not artifact.orphaned()
    artifact.path(".plan.json").unlink()
    assert artifact.orphaned()


@pytest.mark.parametrize("file", ["../outside", "a/../../outside", "/outside", "", "..", "a\\b", "c:x", "a\0b"])
def test_a_file_name_that_leads_out_of_the_folder_is_refused(artifact: Artifact, file: str, tmp_path: Path) -> None:
    artifact.begin(THINGS, {})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(AtollError, match="is not the name of a file in"):
        artifact.write(file, b"stolen")
    with pytest.raises(AtollError, match="is not the name of a file in"):
        artifact.read_json(file)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_manifest_that_lists_a_file_outside_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    artifact.begin(THINGS, {})
    artifact.commit({})
    (tmp_path / "outside").write_bytes(b"mine")
    values = json.loads(artifact.path("manifest.json").read_text())
    values["files"] = {"../outside": {"size": 4, "sha256": hashlib.sha256(b"mine").hexdigest()}}
    artifact.path("manifest.json").write_text(json.dumps(values))
    with pytest.raises(AtollError, match="outside' is not the name of a file in"):
        artifact.open(THINGS, verify=True)
