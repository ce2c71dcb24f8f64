"""Attacks on versions of the root, on snapshots, and on what a user remembers of a run."""

import hashlib
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from atoll import cli
from atoll.apps.share.admit import admit
from atoll.apps.share.leases import Lease
from atoll.apps.share.owners import change_root, push
from atoll.apps.share.pull import pull
from atoll.apps.share.remote_run import RemoteRun
from atoll.apps.share.status import status
from atoll.apps.share.store import Store
from atoll.apps.share.transfer import upload
from atoll.core import layout
from atoll.core.artifacts import Artifact, FileEntry
from atoll.core.manifests import EXPERT, SHARDS
from atoll.nets.io import WEIGHTS_FILE, weights_digest
from atoll.verify.trust import Root, RootChain, Signed, parse_signed
from share.conftest import Published
from share.shared import key_file, person, publishers, remote

pytestmark = pytest.mark.hostile
JOB = "experts/002"


@pytest.fixture
def store(published_store: Store) -> Store:
    """A store with expert 0, in which ann may publish all experts and bob only expert 2, and eve admits."""
    return published_store


def publish_version(run: Path, store: Store, **changes: Any) -> None:
    change_root(run, person("owner"), **changes)
    push(run, store, person("owner"))


def propose(signer: RemoteRun, holder: RemoteRun, reference: Path) -> None:
    """Publish a trained expert with the signature of `signer`, and propose it with the lease of `holder`."""
    artifact = Artifact(reference, layout.final(JOB))
    manifest = artifact.open(EXPERT)
    weights = weights_digest(sorted(load_file(artifact.path(WEIGHTS_FILE)).items()))
    signer.write_signature("publish", artifact.name, manifest.digest, weights=weights)
    upload(signer.store, artifact, manifest, name=artifact.name)
    lease = Lease.acquire(signer.store, JOB, 60, authority=holder)
    if lease is not None:
        lease.end("proposed", manifest=manifest.digest)


NARROWED: dict[str, tuple[Any, Any, str]] = {
    "closed": ("anyone", publishers("ann"), "mallory"),
    "other expert": (publishers("bob", experts=(2,)), publishers("bob", experts=(0,)), "bob"),
    "replaced key": (publishers("bob"), {"bob": publishers("ann")["ann"]}, "bob"),
}
"""Publishers of one version and of the next one, and who uses the rights of the first afterwards."""


@pytest.mark.parametrize("name", NARROWED)
@pytest.mark.parametrize("holder", ["itself", "owner"])
def test_a_right_ends_with_the_version_that_gave_it(
    name: str, holder: str, store: Store, run: Path, reference: Path, tmp_path: Path
) -> None:
    """The signer names the earlier version; an owner's lease for the same expert does not help either."""
    before, after, who = NARROWED[name]
    for each in (before, after):
        publish_version(run, store, publishers=each)
    current = remote(store, by=who)
    late = replace(current, trust=RootChain(current.trust.roots[:-1]))
    propose(late, late if holder == "itself" else remote(store, by="owner"), reference)
    verdicts = admit(remote(store, by="owner"), tmp_path / "a")
    if holder == "itself":
        assert verdicts == {}
        line = next(line for line in status(store, remote(store)) if line.job == JOB)
        assert line.state == "free"
        assert "signed by a key that the root does not allow for it" in line.why
    else:
        assert "signed by a key that the root does not allow for it" in verdicts[JOB]
    assert JOB not in remote(store).networks()


def test_an_admitted_expert_outlives_the_right_of_its_publisher(
    store: Store, run: Path, reference: Path, tmp_path: Path
) -> None:
    propose(remote(store, by="bob"), remote(store, by="bob"), reference)
    assert admit(remote(store, by="eve"), tmp_path / "a") == {JOB: "admitted"}
    publish_version(run, store, publishers={}, admitters={})
    assert pull(remote(store, tmp_path / "m"), tmp_path / "m")[JOB] == "fetched"


def hostile_twin(published: Published, place: Path, *, versions: int, **changes: Any) -> Store:
    """A run of mallory's with the number and the settings of an honest one."""
    twin = Store.open(place)
    twin.write("atoll.yaml", published.objects["atoll.yaml"])
    first = next(data for name, data in published.objects.items() if name.startswith("root/000001"))
    values = parse_signed(Root, first, "it").content.model_dump() | {"owners": {"m": person("mallory").public}}
    previous = None
    for version in range(1, versions + 1):
        root = Root.model_validate(values | changes | {"version": version, "previous": previous})
        signed = Signed(root, person("mallory").sign(root.statement()))
        twin.write(layout.root(version, root.digest), signed.to_json())
        previous = root.digest
    return twin


def test_a_run_with_the_same_number_does_not_lock_out_its_readers(
    store: Store, published: Published, tmp_path: Path
) -> None:
    """A user looks first at mallory's run, whose root has more versions."""
    twin = hostile_twin(published, tmp_path / "twin", versions=4)
    assert cli.main(["trust", f"file://{twin.path}"]) == 0
    assert cli.main(["pull", twin.url, str(tmp_path / "t"), "--unsigned"]) == 0
    assert cli.main(["pull", f"{store.url}#sha256={published.fingerprint}", str(tmp_path / "m")]) == 0


def test_a_snapshot_of_a_run_with_the_same_number_does_not_count(
    store: Store, published: Published, tmp_path: Path
) -> None:
    """Eve also admits for mallory, who copies what she signed there into the honest run."""
    twin = hostile_twin(published, tmp_path / "twin", versions=2, admitters={"eve": person("eve").public})
    with pytest.MonkeyPatch.context() as patch:  # eve is another user
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path / "eve"))
        for _ in range(3):
            signed = remote(twin, by="eve").write_snapshot({})
    store.write(layout.snapshot(2, 3), signed.to_json())
    assert "experts/000" in remote(store).networks()


def test_keys_of_snapshots_that_strangers_take_cost_one_read_each(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 40
    for version in range(2, 2 + taken):
        store.create(layout.snapshot(2, version), b"x")
    store.create(layout.snapshot(2, 99), bytes(2 << 20))
    eve, reads = remote(store, by="eve"), []
    read = Store.read
    monkeypatch.setattr(Store, "read", lambda self, key, *limit: reads.append(key) or read(self, key, *limit))
    signed = eve.write_snapshot({})
    assert signed.content.order == (2, 2 + taken)
    assert len(reads) < 2 * taken
    assert "experts/000" in remote(store).networks()


@pytest.mark.parametrize("unpublished", [False, True], ids=["nothing new", "new expert"])
def test_withdrawing_the_only_admitter_locks_out_nobody(
    unpublished: bool, store: Store, run: Path, reference: Path, tmp_path: Path
) -> None:
    """Every snapshot of the run is eve's, and the owner may have trained another expert since."""
    store.delete([entry.key for entry in store.entries("snapshot")])
    for folder in ("experts", "snapshot"):
        shutil.rmtree(run / folder)
    propose(remote(store, by="bob"), remote(store, by="bob"), reference)
    assert admit(remote(store, by="eve"), tmp_path / "a") == {JOB: "admitted"}
    if unpublished:
        shutil.copytree(reference / "experts/001", run / "experts/001")
    publish_version(run, store, admitters={}, withdrawn_keys=(person("eve").public,))
    assert sorted(remote(store).networks()) == (["experts/001"] if unpublished else [])
    assert admit(remote(store, by="owner"), tmp_path / "a") == {JOB: "admitted"}
    assert pull(remote(store, tmp_path / "m"), tmp_path / "m")[JOB] == "fetched"


def test_objects_among_roots_and_snapshots_cost_no_memory(store: Store) -> None:
    """Names of another pattern are not read. The others are read one by one and dropped."""
    before = remote(store, by="eve")
    for number in range(30):
        digest = f"{number:064x}"
        store.write(f"root/{number}", bytes(1 << 20))
        store.write(layout.root(1, digest), bytes(1 << 20))
        store.write(layout.root(3, digest), bytes(1 << 20))
        store.write(layout.snapshot(2, 100 + number), bytes(1 << 20))
    reads: list[str] = []
    read = Store.read
    tracemalloc.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "read", lambda self, key, *limit: reads.append(key) or read(self, key, *limit))
        opened = remote(store, by="eve", trust=before.trust.roots[0].fingerprint)
        assert opened.networks().keys() == before.networks().keys()
    assert tracemalloc.get_traced_memory()[1] < 12 << 20, "one object, as bytes and as text"
    tracemalloc.stop()
    assert not [key for key in reads if key.startswith(("root/000001-0000", "root/1"))]


LIES: dict[str, tuple[str, bytes, str]] = {
    "another file": ("../x.pem", b"x", "only letters, digits"),
    "a hidden name": ("notes.pkl", b"x", "which is no file of shards"),
    "no safetensors": ("train-000000.safetensors", b"x" * 100, "is not a shard"),
    "no images": ("train-000000.safetensors", save({"x": torch.zeros(1)}), "is not a shard"),
}


@pytest.mark.parametrize("name", LIES)
def test_signed_shards_that_lie_are_refused(
    name: str, published: Published, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hostile owner signs the digests of these shards; whoever joins gets an error of Atoll, and no other file."""
    file, data, reason = LIES[name]
    twin = Store.open(tmp_path / "twin")
    artifact = Artifact(published.run, layout.shards(1))
    manifest = artifact.open(SHARDS)
    entry = FileEntry(len(data), hashlib.sha256(data).hexdigest())
    lying = replace(manifest, files={**manifest.files, file: entry})
    upload(twin, artifact, manifest, name=artifact.name)
    twin.write(f"{artifact.name}/sha256/{entry.sha256}", data)
    twin.write(f"{artifact.name}/manifests/{lying.digest}.json", lying.to_json())
    root = Root.model_validate(
        remote(Store.open(_copy(published, tmp_path))).trust.roots[0].model_dump()
        | {"owners": {"m": person("mallory").public}, "publishers": "anyone"}
        | {"shards": (lying.digest,) * 3}
    )
    twin.write("atoll.yaml", published.objects["atoll.yaml"])
    twin.write(layout.root(1, root.digest), Signed(root, person("mallory").sign(root.statement())).to_json())
    key = ("--key", str(key_file("ann", tmp_path)))
    url = f"{twin.url}#sha256={root.fingerprint}"
    assert cli.main(["join", url, "--expert", "1", "--folder", str(tmp_path / "ann"), *key]) == 2
    output = capsys.readouterr()
    assert reason in output.out + output.err
    assert not list(tmp_path.rglob("notes.pkl"))


def _copy(published: Published, folder: Path) -> Path:
    published.copy(Store.open(folder / "honest"))
    return folder / "honest"
