"""Attacks on whole verbs, on files and on an S3 server: nothing is lost or accepted, and honest work goes on."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll import cli
from atoll.apps.share import worker as join
from atoll.apps.share.admit import admit
from atoll.apps.share.lease_records import Record, key_of
from atoll.apps.share.leases import Lease
from atoll.apps.share.owners import change_root, push
from atoll.apps.share.pull import pull
from atoll.apps.share.remote_run import Access
from atoll.apps.share.status import status
from atoll.apps.share.store import Store
from atoll.apps.share.worker import open_worker
from atoll.core import layout
from atoll.core.artifacts import Artifact, to_json
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT
from atoll.verify.trust import Root, Signed, Snapshot, parse_signed
from share.conftest import Published
from share.servers import proxy
from share.shared import acquire, key_file, network_by, person, remote
from share.test_records import GOOD

pytestmark = pytest.mark.hostile
JOB = "experts/001"
DONE = {"experts/000": "fetched", "experts/001": "missing", "experts/002": "missing"}
Verb = Callable[..., tuple[int, str]]


@pytest.fixture
def verb(capfd: pytest.CaptureFixture[str], tmp_path: Path, published: Published) -> Verb:
    """Run a verb in this process; return its exit code and all that it printed. The owner's key is the default."""
    owner = key_file("owner", tmp_path)

    def run(name: str, store: Store, *options: str, trusted: bool = True) -> tuple[int, str]:
        url = f"{store.url}#sha256={published.fingerprint}" if trusted else store.url
        signing = ("--key", str(owner)) if name in ("admit", "join") and "--key" not in options else ()
        capfd.readouterr()
        code = cli.main([name, url, *options, *signing])
        output = capfd.readouterr()
        return code, output.out + output.err

    return run


def key_below(store: Store, prefix: str) -> str:
    """Return the key of the largest object below a prefix."""
    return max(store.entries(prefix), key=lambda entry: entry.size).key


def state_of(store: Store) -> dict[str, bytes]:
    return {entry.key: store.read(entry.key, 1 << 30) or b"" for entry in store.entries("")}


# The store replaces objects


def replace_settings(store: Store, published: Published) -> None:
    store.write("atoll.yaml", published.objects["atoll.yaml"].replace(b"lr: 0.006", b"lr: 0.002"))


def replace_with_own_root(store: Store, published: Published) -> None:
    """Mallory signs a root of the same run, with the same data."""
    for entry in store.entries("root"):
        store.delete([entry.key])
    old = next(data for name, data in published.objects.items() if name.startswith("root/000001"))
    content = parse_signed(Root, old, "it").content.model_copy(update={"owners": {"m": person("mallory").public}})
    forged = Signed(content, person("mallory").sign(content.statement()))
    store.write(f"root/000001-{content.digest}.json", forged.to_json())


def edit_root(store: Store, published: Published) -> None:
    """Every version lists mallory among the publishers; the signatures are kept."""
    for name, data in published.objects.items():
        if name.startswith("root/"):
            value = json.loads(data)
            value["signed"]["publishers"]["mallory"] = {"key": person("mallory").public, "experts": None}
            store.write(name, to_json(value))


def remove_root(store: Store, published: Published) -> None:
    store.delete([entry.key for entry in store.entries("root")])


def replaced(prefix: str, data: bytes | None) -> Callable[[Store, Published], None]:
    def apply(store: Store, published: Published) -> None:
        name = key_below(store, prefix)
        if data is None:
            store.delete([name])
        else:
            store.write(name, data or bytes(len(published.objects[name])))

    return apply


def other_network(store: Store, published: Published) -> None:
    """The manifest of the expert, with other weights, under the digest of the admitted one."""
    name = key_below(store, "experts/000/final/manifests")
    store.write(name, published.objects[name].replace(b'"images": 640', b'"images": 641'))


def snapshot_by_mallory(store: Store, published: Published) -> None:
    """A later snapshot with another expert, by somebody who is not an admitter, replaces the true one."""
    name = key_below(store, "snapshot")
    content = parse_signed(Snapshot, published.objects[name], "it").content
    store.delete([entry.key for entry in store.entries("snapshot")])
    content = content.model_copy(update={"version": 9, "networks": {}})
    forged = Signed(content, person("mallory").sign(content.statement()))
    store.write("snapshot/000002-000009.json", forged.to_json())


REPLACED: dict[str, tuple[Callable[[Store, Published], None], str]] = {
    "settings": (replace_settings, "atoll.yaml is not the one that the owners signed"),
    "no settings": (lambda store, _: store.delete(["atoll.yaml"]), "atoll.yaml is missing"),
    "own root": (replace_with_own_root, "has no valid root with the fingerprint"),
    "edited root": (edit_root, "has no valid root with the fingerprint"),
    "no root": (remove_root, "its root is missing"),
    "shard manifest": (replaced("data/shards/cluster_001/manifests", b"{}"), "is not a manifest"),
    "no shard manifest": (
        replaced("data/shards/cluster_001/manifests", None),
        "has no manifest of data/shards/cluster_001",
    ),
    "shard file": (replaced("data/shards/cluster_001/sha256", b""), "its SHA-256 differs"),
    "no shard file": (replaced("data/shards/cluster_001/sha256", None), "is missing though a manifest lists it"),
    "weights": (replaced("experts/000/final/sha256", b""), "its SHA-256 differs"),
    "short weights": (replaced("experts/000/final/sha256", b"short"), "has 5 bytes; its manifest lists"),
    "no weights": (replaced("experts/000/final/sha256", None), "is missing though a manifest lists it"),
    "expert": (other_network, "does not match the digest in its name"),
    "no expert": (replaced("experts/000/final/manifests", None), "has no manifest of experts/000/final"),
}


IN_THE_QUICK_TESTS = ("settings", "edited root", "weights")
"""Attacks that the quick tests play on S3, too; the slow tests play all of them."""
EVERYWHERE = [
    pytest.param(name, where, marks=[pytest.mark.slow] * (where == "s3" and name not in IN_THE_QUICK_TESTS))
    for name in REPLACED
    for where in ("file", "s3")
]


@pytest.mark.parametrize(("name", "place"), EVERYWHERE, indirect=["place"])
def test_a_replaced_object_is_refused(
    name: str, place: Store, published: Published, verb: Verb, tmp_path: Path
) -> None:
    attack, reason = REPLACED[name]
    attack(place, published)
    before = state_of(place)
    code, output = verb("pull", place, str(tmp_path / "victim"), "--shards")
    assert code == 2
    assert reason in output
    assert state_of(place) == before
    assert not (tmp_path / "victim/experts/000/final/manifest.json").exists() or "shard" in name
    assert not (tmp_path / "victim/data/shards/cluster_001/manifest.json").exists() or "experts" in output


def remove_snapshots(store: Store, published: Published) -> None:
    store.delete([entry.key for entry in store.entries("snapshot")])


def keep_the_first_snapshot(store: Store, published: Published) -> None:
    store.delete([entry.key for entry in store.entries("snapshot")][1:])


@pytest.mark.parametrize("attack", [snapshot_by_mallory, remove_snapshots, keep_the_first_snapshot])
def test_a_snapshot_that_was_seen_cannot_be_removed(
    attack: Callable[[Store, Published], None], place: Store, published: Published, verb: Verb, tmp_path: Path
) -> None:
    assert verb("pull", place, str(tmp_path / "a"))[0] == 0
    attack(place, published)
    for name in ("pull", "status", "admit", "join"):
        code, output = verb(name, place, *VERBS[name](tmp_path))
        assert code == 2, name
        assert "Somebody rolled it back" in output
    assert atoll.load(tmp_path / "a", "expert:0") is not None, "the verified copy still works"


# Strangers create objects


def by_mallory(place: Store, **changes: Any) -> bytes:
    """A well-formed record that mallory signs for a run in which the root does not list her."""
    shared = remote(place, by="mallory")
    record = {**GOOD, "checkpoint": None, "images": 0, "published": 0, "idle": 0.0, **changes}
    made = Record.model_validate(record)
    signed = made.model_copy(update={"signature": shared.sign("lease", JOB, made.digest)})
    return to_json(json.loads(signed.model_dump_json()))


def stranger_snapshot(place: Store) -> bytes:
    shared = remote(place, by="mallory")
    network = network_by(shared, "router")
    content = Snapshot(run=shared.trust.run, root=2, version=999_999, networks={"router": network})
    return Signed(content, person("mallory").sign(content.statement())).to_json()


def stranger_root(place: Store, version: int) -> bytes:
    root = remote(place).trust.current
    changes = {"version": version, "previous": root.digest if version > 1 else None}
    content = root.model_copy(update={**changes, "owners": {"m": person("mallory").public}})
    return Signed(content, person("mallory").sign(content.statement())).to_json()


ONES = "1" * 64
CREATED: dict[str, tuple[str | None, bytes | Callable[[Store], bytes]]] = {
    "lease x": (f"leases/{JOB}/x", b"x"), "lease zzz": ("leases/zzz", b"x"),
    "lease of a square": (f"leases/{JOB}/\u00b2", b"x"),
    "lease 999999": (f"leases/{JOB}/999999", b"{}"), "lease of nobody": (f"leases/nobody/{'0' * 6}", b"x"),
    "unsigned lease": (key_of(JOB, 0), json.dumps({**GOOD, "state": "held"}).encode()),
    "lease of a stranger": (key_of(JOB, 0), lambda place: by_mallory(place, state="held", duration=86400.0)),
    "last lease of a stranger": (key_of(JOB, 999_999), lambda place: by_mallory(place, epoch=999_999, state="held")),
    "proposal of a stranger": (
        key_of(JOB, 3), lambda place: by_mallory(place, epoch=3, state="proposed", manifest=ONES),
    ),
    "done by a stranger": (key_of(JOB, 0), lambda place: by_mallory(place, state="done", manifest=ONES)),
    "three failures of a stranger": (key_of(JOB, 0), lambda place: by_mallory(place, state="failed", failures=3)),
    "huge lease": (key_of(JOB, 0), bytes(1 << 20)), "deep lease": (key_of(JOB, 0), b"[" * 8000),
    "lease of the router": ("leases/router/000000", b"x"),
    "root x": ("root/x", b"x"), "root {}": (f"root/000003-{ONES}.json", b"{}"),
    "huge root": (f"root/000003-{ONES}.json", bytes(2 << 20)),
    "deep root": (f"root/000003-{ONES}.json", b'{"a":' * 5000),
    "root of a stranger": (None, lambda place: stranger_root(place, 1)),
    "next root of a stranger": (None, lambda place: stranger_root(place, 3)),
    "snapshot x": ("snapshot/x", b"x"), "next snapshot {}": ("snapshot/000002-000002.json", b"{}"),
    "last snapshot": ("snapshot/999999-999999.json", b"[]"),
    "huge snapshot": ("snapshot/000002-000003.json", bytes(2 << 20)),
    "snapshot of a stranger": ("snapshot/000002-999999.json", stranger_snapshot),
    "manifest x": (f"{JOB}/final/manifest.json", b"x"), "manifest {}": (f"{JOB}/final/manifest.json", b"{}"),
    "manifest of ones": (f"{JOB}/final/manifests/{ONES}.json", b"{}"),
    "manifest of the router": ("router/final/manifest.json", b"{}"),
    "router": (f"router/final/manifests/{ONES}.json", b"{}"),
    "signature": (f"{JOB}/final/signatures/{ONES}.json", b"{}"), "policy": ("policy.json", b'{"publishers": {}}'),
    "expert 999": ("experts/999/final/manifest.json", b"{}"),
    "expert without a number": ("experts/x/final/manifest.json", b"{}"),
    "checkpoint": (f"{JOB}/checkpoints/{'0' * 16}/manifests/{ONES}.json", b"{}"),
    "shards 999": ("data/shards/cluster_999/manifest.json", b"{}"),
    "metrics": (f"{JOB}/metrics.jsonl", b"\xff\n{}\n[1"),
    "probe": ("probe/x", b"x"), "long name": ("x" * 200, b"x"),
}  # fmt: skip


def create(place: Store, name: str) -> None:
    key, data = CREATED[name]
    made = data(place) if callable(data) else data
    if key is None:
        root = parse_signed(Root, made, "it").content
        key = layout.root(root.version, root.digest)
    assert place.create(key, made)


def check_honest_work(place: Store, verb: Verb, tmp_path: Path) -> None:
    """Pull, status and admit work, and a worker can take the expert."""
    code, output = verb("pull", place, str(tmp_path / "model"), "--json")
    assert (code, json.loads(output.splitlines()[-1])) == (0, DONE)
    code, output = verb("status", place, "--json")
    states = {line["job"]: line["state"] for line in json.loads(output.splitlines()[-1])}
    assert code == 0
    assert [states[job] for job in ("experts/000", JOB, "experts/002")] == ["done", "free", "free"]
    code, output = verb("admit", place, "--folder", str(tmp_path / "o"))
    assert (code, "no expert waits for admission" in output) == (0, True)
    ann = open_worker(place.url, tmp_path / "ann", Access(None, True, person("ann")))
    lease, unfinished = ann._acquire_any(1)
    assert unfinished
    lease.renew()
    assert not lease.lost


@pytest.mark.parametrize("place", ["file"], indirect=True)
@pytest.mark.parametrize("name", CREATED)
def test_objects_of_strangers_stop_nobody(
    name: str, place: Store, published: Published, verb: Verb, tmp_path: Path
) -> None:
    create(place, name)
    check_honest_work(place, verb, tmp_path)


def test_objects_of_many_strangers_stop_nobody_on_s3(
    bucket: str, published: Published, verb: Verb, tmp_path: Path
) -> None:
    place = Store.open(bucket)
    published.copy(place)
    time.sleep(1.1)  # S3 has times of whole seconds, and with --unsigned the oldest root is used
    taken: set[str] = set()
    for name, (key, _) in CREATED.items():
        if key not in taken:
            create(place, name)
            taken.add(key)
    assert len(taken) > 25
    check_honest_work(place, verb, tmp_path)


def forked_root(place: Store, published: Published) -> str:
    """Mallory's own root, with two different next versions."""
    made = [stranger_root(place, 1)]
    first = parse_signed(Root, made[0], "it").content
    for name in ("a", "b"):
        owners = {name: person("mallory").public}
        content = first.model_copy(update={"version": 2, "previous": first.digest, "owners": owners})
        made.append(Signed(content, person("mallory").sign(content.statement())).to_json())
    for data in made:
        root = parse_signed(Root, data, "it").content
        assert place.create(layout.root(root.version, root.digest), data)
    return first.digest


@pytest.mark.parametrize("name", ["pull", "status", "join", "admit"])
def test_a_second_root_stops_nobody(name: str, place: Store, published: Published, verb: Verb, tmp_path: Path) -> None:
    """With a fingerprint it is ignored. With --unsigned, the root that the store has had for longer is used."""
    if place.path is None:
        time.sleep(1.1)  # S3 has times of whole seconds
    other = forked_root(place, published)
    options = (*VERBS[name](tmp_path), *(("--expert", "0") if name == "join" else ()))  # expert 0 is done
    assert verb(name, place, *options)[0] == 0
    code, output = verb(name, place, *options, "--unsigned", trusted=False)
    assert code == 0
    code, output = verb("status", place, "--unsigned", trusted=False)
    assert f"has other roots ({other}). The oldest, {published.fingerprint}, is used" in output
    code, output = verb("status", place, "--trust", f"{published.fingerprint}@3", trusted=False)
    assert (code, "shows version 2 of the root, and its owner named version 3" in output) == (2, True)
    assert verb("status", place, "--trust", f"{published.fingerprint}@2", trusted=False)[0] == 0


# Contributors and roles


OWNERS_ONLY = [("router", who) for who in ("ann", "mallory", "eve")]
OWNERS_ONLY += [(job, "ann") for job in ("start", "monolith", "student", "merged")]
FOREIGN = [*OWNERS_ONLY, ("experts/001", "bob"), ("experts/002", "mallory"), ("experts/002", "eve")]
"""Slots, and people who must not publish them."""


@pytest.mark.parametrize("place", ["file"], indirect=True)
@pytest.mark.parametrize(("job", "who"), FOREIGN)
def test_only_owners_publish_router_monolith_and_student(
    job: str, who: str, place: Store, published: Published, tmp_path: Path
) -> None:
    """An admitter lists a network that a contributor signed for a slot that is not theirs."""
    store = place
    name = f"{job}/final"
    artifact = Artifact(published.run, "experts/000/final")
    manifest = artifact.open(EXPERT)
    contributor, eve = remote(store, by=who), remote(store, by="eve")
    join.upload(store, artifact, manifest, name=name)
    contributor.write_signature("publish", name, manifest.digest)
    eve.write_snapshot({job: network_by(contributor, job, manifest.digest)})
    verdicts = pull(remote(store, tmp_path / "m"), tmp_path / "m")
    assert verdicts.get(job, "missing") == "missing"
    assert not (tmp_path / "m" / name).exists()
    assert verdicts["experts/000"] == "fetched"


@pytest.mark.parametrize("who", ["bob", "mallory"])
def test_a_worker_gets_only_what_is_delegated_to_it(who: str, place: Store, verb: Verb, tmp_path: Path) -> None:
    key = ("--key", str(key_file(who, tmp_path)), "--folder", str(tmp_path / "w"), "--expert", "1")
    code, output = verb("join", place, *key)
    assert place.entries("leases") == []
    assert (code, "does not list your key" in output) == ((2, True) if who == "mallory" else (0, False))
    lease = Lease.acquire(place, JOB, 3600, holder=who, authority=remote(place, by=who))
    assert lease is None or next(line for line in status(place, remote(place)) if line.job == JOB).state == "free"


# Fingerprints and versions


VERBS = {
    "pull": lambda folder: (str(folder / "p"),), "status": lambda _: (),
    "join": lambda folder: ("--folder", str(folder / "j")), "admit": lambda folder: ("--folder", str(folder / "a")),
}  # fmt: skip


@pytest.mark.parametrize("name", VERBS)
def test_a_run_without_its_fingerprint_is_refused(name: str, place: Store, verb: Verb, tmp_path: Path) -> None:
    code, output = verb(name, place, *VERBS[name](tmp_path), trusted=False)
    assert code == 2
    assert "anyone could have written this run" in output
    assert "--unsigned" in output
    code, output = verb(name, place, *VERBS[name](tmp_path), "--trust", "0" * 64, trusted=False)
    assert (code, "no valid root with the fingerprint 000000000000" in output) == (2, True)
    for wrong in ("x", "0" * 31, "0" * 64 + "g", "G" * 64, "0" * 32 + "@", "0" * 32 + "@x"):
        code, output = verb(name, place, *VERBS[name](tmp_path), "--trust", wrong, trusted=False)
        assert (code, "is not a fingerprint" in output) == (2, True)
    assert not (tmp_path / "p").exists()
    assert not (tmp_path / "j").exists()


@pytest.mark.parametrize("name", VERBS)
@pytest.mark.parametrize("state", ["no root", "format 2"])
def test_a_store_without_a_valid_root_is_refused_with_what_to_do(
    name: str, state: str, published: Published, verb: Verb, tmp_path: Path
) -> None:
    store = Store.open(tmp_path / "store")
    store.write("atoll.yaml", published.objects["atoll.yaml"])
    if state == "no root":
        for key, data in published.objects.items():
            if key.startswith("data/shards/cluster_000/"):
                store.write(key, data)
    if state == "format 2":
        for key, data in published.objects.items():
            if key.startswith("root/"):
                store.write(key, data.replace(b'"format": 1', b'"format": 2'))
    for options in ((), ("--unsigned",)):
        code, output = verb(name, store, *VERBS[name](tmp_path), *options, trusted=state == "format 2" and not options)
        assert code == 2
        if state == "format 2":
            assert "has no valid root" in output
            assert "format: Input should be 1" in output
        else:
            assert "its root is missing: its owner did not finish atoll push, or somebody deleted it" in output


def test_a_store_with_other_settings_is_not_pushed_over(
    published: Published, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store, run = Store.open(tmp_path / "store"), tmp_path / "run"
    shutil.copytree(published.run, run, ignore=shutil.ignore_patterns("root", "snapshot"))
    store.write("atoll.yaml", published.objects["atoll.yaml"] + b"island: {}\n")
    before = state_of(store)
    assert cli.main(["push", str(run), store.url, "--key", str(key_file("owner", tmp_path))]) == 2
    assert "another URL" in capfd.readouterr().err
    assert state_of(store) == before
    assert cli.main(["trust", f"file://{tmp_path}/store"]) == 2
    assert "its root is missing" in capfd.readouterr().err


def test_a_root_that_was_seen_cannot_be_removed(place: Store, run: Path, verb: Verb, tmp_path: Path) -> None:
    """The owner withdraws ann, and the store hides that version."""
    change_root(run, person("owner"), withdrawn_keys=(person("ann").public,), publishers={})
    push(run, place, person("owner"))
    assert verb("status", place)[0] == 0
    place.delete([entry.key for entry in place.entries("root") if "000003" in entry.key])
    for name in VERBS:
        code, output = verb(name, place, *VERBS[name](tmp_path))
        assert (code, "Somebody rolled it back" in output) == (2, True)


def test_an_expired_root_is_refused(published_store: Store, run: Path, verb: Verb, tmp_path: Path) -> None:
    store = published_store
    change_root(run, person("owner"), expires="2020-01-01")
    push(run, store, person("owner"))
    code, output = verb("pull", store, str(tmp_path / "m"))
    assert (code, "expired on 2020-01-01; the owner renews it" in output) == (2, True)
    assert cli.main(["trust", str(run), "renew", "--key", str(key_file("owner", tmp_path))]) == 0
    push(run, store, person("owner"))
    assert verb("pull", store, str(tmp_path / "m"))[0] == 0


def test_a_withdrawn_expert_is_not_loaded_and_can_be_trained_again(
    place: Store, run: Path, verb: Verb, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    assert verb("pull", place, str(model))[0] == 0
    owner = ("--key", str(key_file("owner", tmp_path)))
    assert cli.main(["trust", str(run), "withdraw", "network", "experts/000", *owner]) == 0
    assert cli.main(["push", str(run), place.url, *owner]) == 0
    code, output = verb("pull", place, str(model), "--json")
    assert (code, json.loads(output.splitlines()[-1])["experts/000"]) == (0, "missing")
    for folder in (model, run):
        with pytest.raises(AtollError, match="withdrawn from"):
            atoll.load(folder, "expert:0")
    ann = open_worker(place.url, tmp_path / "ann", Access(None, True, person("ann")))
    lease, _ = ann._acquire_any(0)
    assert lease is not None
    assert cli.main(["push", str(run), place.url, *owner]) == 0
    assert "experts/000" not in remote(place).networks(), "the owner's copy stays withdrawn"


# What a worker resumes, and what it reveals


TEXTS = [
    "\x1b[2J\x1b[H",
    "\x1b]0;owned\x07",
    "\r" + " " * 80,
    "\u202e",
    "a\x00b",
    "x" * 5_000_000,
    "\x9b2J",
    "\x08" * 40,
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:10]))
def test_texts_of_strangers_are_printed_without_control_characters(
    text: str, published: Published, verb: Verb, tmp_path: Path
) -> None:
    """In the name of a key, of a holder, in a reason, in a manifest: as far as the store takes it."""
    store = Store.open(f"memory://{tmp_path.name}{abs(hash(text))}")
    published.copy(store)
    ann = remote(store, by="ann")
    manifest = Artifact(published.run, "experts/000/final").open(EXPERT)
    claims = {**manifest.content, "job": text, "conditioning": [text], "objective": {text: text}}
    hostile = type(manifest)(manifest.kind, manifest.made_from, claims, manifest.files)
    if len(text) < 1000:
        ann.write_signature("publish", f"{JOB}/final", hostile.digest)
        store.write(f"{JOB}/final/manifests/{hostile.digest}.json", hostile.to_json())
        lease = acquire(store, JOB, 3600, holder=text[:100], authority=ann)
        lease.end("proposed", manifest=hostile.digest)
        verdict = admit(remote(store, by="owner"), tmp_path / "o")[JOB]
        assert verdict.isprintable()
        assert len(verdict) <= 1000
    store.write(f"leases/{JOB}/000009", json.dumps({**GOOD, "epoch": 9, "why": text, "holder": text}).encode())
    for line in status(store, remote(store)):
        assert (line.where + line.why).isprintable()
        assert len(line.why) < 2000


def test_pull_and_status_only_read(s3: str, bucket: str, published: Published, verb: Verb, tmp_path: Path) -> None:
    published.copy(Store.open(bucket))
    lease = Lease.acquire(Store.open(bucket), JOB, 3600, authority=remote(Store.open(bucket), by="ann"))
    assert lease is not None
    with proxy(s3) as line, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", line.address)
        store = Store.open(bucket)
        assert verb("pull", store, str(tmp_path / "m"), "--shards")[0] == 0
        assert verb("status", store)[0] == 0
        assert cli.main(["trust", f"{bucket}#sha256={published.fingerprint}"]) == 0
    assert len(line.requests) > 20
    assert {request.split()[0] for request in line.requests} <= {"GET", "HEAD"}
