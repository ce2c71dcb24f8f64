"""Lease records written by strangers: malformed ones are ignored, and none can cause a deletion."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from atoll.apps.share.checkpoint_publisher import CheckpointPublisher, is_checkpoint_key
from atoll.apps.share.lease_records import MAX_WHY, key_of, list_leases
from atoll.apps.share.leases import Lease
from atoll.apps.share.remote_run import Access
from atoll.apps.share.status import status
from atoll.apps.share.store import Store
from atoll.apps.share.worker import Worker, open_worker
from atoll.core import config
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import CHECKPOINT
from atoll.train import resolve_job
from share.shared import acquire, lease_of, person, publishers, remote, share
from train.conftest import Copy

JOB, OTHER = "experts/001", "experts/002"
ATTEMPT, DIGEST = "0123456789abcdef", "1" * 64
GOOD: dict[str, Any] = {
    "epoch": 0, "state": "released", "holder": "mallory", "nonce": "0" * 32, "duration": 60.0,
    "images": 8, "total": 160, "rate": 1.0, "overrides": {}, "checkpoint": f"{JOB}/checkpoints/{ATTEMPT}@{DIGEST}",
    "manifest": None, "why": "", "failures": 0,
}  # fmt: skip
POINTERS: list[Any] = [
    "@x", "", "@", "x", "/@x", f"@{DIGEST}", f"/@{DIGEST}", f"../@{DIGEST}", f"{JOB}/checkpoints/../..@{DIGEST}",
    f"data@{DIGEST}", f"leases@{DIGEST}", f"experts@{DIGEST}", f"experts/00@{DIGEST}", f"experts/0@{DIGEST}",
    f"{JOB}@{DIGEST}", f"{JOB}/final@{DIGEST}", f"{JOB}/checkpoints@{DIGEST}", f"{JOB}/checkpoints/@{DIGEST}",
    f"{OTHER}/checkpoints/{ATTEMPT}@{DIGEST}", f"{JOB}0/checkpoints/{ATTEMPT}@{DIGEST}",
    f"{JOB}/checkpoints/{ATTEMPT[:-1]}@{DIGEST}", f"{JOB}/checkpoints/{ATTEMPT.upper()}@{DIGEST}",
    f"{JOB}/checkpoints/{ATTEMPT}@{DIGEST[:-1]}", f"{JOB}/checkpoints/{ATTEMPT}@{DIGEST}\n",
    f"{JOB}/checkpoints/{ATTEMPT}/@{DIGEST}", f"{JOB}/checkpoints/{ATTEMPT}", f"\0{JOB}/checkpoints/{ATTEMPT}@{DIGEST}",
    f"experts/\uff10\uff10\uff11/checkpoints/{ATTEMPT}@{DIGEST}", f"experts/00\u0661/checkpoints/{ATTEMPT}@{DIGEST}",
    "a" * 4000, "@" * 4000, "experts/" * 500, 5, True, [], {}, [f"{JOB}/checkpoints/{ATTEMPT}@{DIGEST}"],
]  # fmt: skip
"""Invalid values of `checkpoint`: not the name of a checkpoint of this job."""
FIELDS: list[dict[str, Any]] = [
    {"epoch": 7}, {"epoch": -1}, {"epoch": "0"}, {"epoch": True}, {"epoch": 10**30}, {"state": "mine"}, {"state": None},
    {"holder": "a" * 201}, {"holder": 5}, {"nonce": ""}, {"nonce": "../" * 10}, {"nonce": "0" * 31 + "/"},
    {"nonce": "0" * 32 + "\n"}, {"issued": 0.0}, {"duration": 0}, {"duration": 1e9}, {"duration": "60"},
    {"images": -1}, {"images": 1.5}, {"images": 1 << 60}, {"total": "160"}, {"rate": -1.0}, {"rate": 1e300},
    {"overrides": {"island.setup": "[rm -r .]"}}, {"overrides": {"data.source": "/"}},
    {"overrides": {"train.ema.../x": "1"}},
    {"overrides": {"train.a.b.c.d": "1"}}, {"overrides": {"train.lr": 1}}, {"overrides": {"train.lr": "\x1b[2J"}},
    {"overrides": {"train.lr": "1" * 4100}}, {"overrides": {f"train.a{n}": "1" for n in range(65)}}, {"overrides": []},
    {"manifest": "../x"}, {"manifest": "0" * 63}, {"manifest": "0" * 64 + "\n"}, {"manifest": 5},
    {"why": "a" * (MAX_WHY + 1)}, {"failures": -1}, {"unknown": 1},
]  # fmt: skip
RAW: list[bytes] = [
    b"", b"x", b"{}", b"[]", b"null", b"\x80\x04", b"[" * 8000, b'"' + b'\\"' * 4000, bytes(9000), bytes(2 << 20),
    json.dumps(GOOD).replace("60.0", "NaN").encode(), json.dumps(GOOD).replace("60.0", "1e999").encode(),
    json.dumps(GOOD).replace('"epoch": 0', '"epoch": 0, "epoch": 0').encode(),
]  # fmt: skip
MALFORMED = [json.dumps({**GOOD, "checkpoint": pointer}).encode() for pointer in POINTERS]
MALFORMED += [json.dumps({**GOOD, **change}).encode() for change in FIELDS] + RAW


def short(value: object) -> str:
    """Return a short test id."""
    return repr(value)[-50:]


@pytest.fixture
def store() -> Store:
    return Store.open(f"memory://{uuid4().hex}")


def taken(store: Store, job: str = JOB) -> Lease:
    return acquire(store, job, 3600, holder="ann")


def test_the_unmodified_record_is_well_formed(store: Store) -> None:
    store.write(key_of(JOB, 0), json.dumps(GOOD).encode())
    assert taken(store).record.checkpoint == GOOD["checkpoint"]


@pytest.mark.parametrize("data", MALFORMED, ids=short)
def test_a_malformed_record_is_ignored(store: Store, data: bytes) -> None:
    store.write(key_of(JOB, 0), data)
    assert list_leases(store).leases == {}
    lease = taken(store)
    assert (lease.record.epoch, lease.record.checkpoint, lease.record.overrides) == (1, None, {})
    lease_status = lease_of(store, JOB)
    assert lease_status.record == lease.record


@pytest.mark.parametrize("data", RAW, ids=short)
def test_a_holder_renews_above_a_malformed_record(store: Store, data: bytes) -> None:
    """Skip several malformed records, and one with a far higher epoch; other workers still find the well-formed one."""
    lease = taken(store)
    for epoch in (1, 2, 4, 999_999):
        store.write(key_of(JOB, epoch), data)
    assert Lease.acquire(store, JOB, 3600, holder="bob") is None, "it is held"
    lease.renew(images=5)
    assert lease.record.epoch == 3
    lease.renew(images=6)
    assert (lease.record.epoch, lease.lost) == (5, False)
    lease.end("released")
    assert taken(store).record.images == 6


@pytest.mark.parametrize(
    "key", ["x", "zzz", "\u00b2", "1", "0000001", "00000\u0661", "000001/x", "-00001", "000001x", "%2e%2e"]
)
def test_keys_that_are_not_those_of_leases_are_ignored(store: Store, key: str) -> None:
    store.write(f"leases/{JOB}/{key}", json.dumps(GOOD).encode())
    store.write(f"leases/{key}/000000", b"x")
    lease = taken(store)
    lease.renew()
    assert set(list_leases(store).leases) == {JOB}
    assert lease.record.epoch == 1


def test_the_longest_valid_record_can_be_read(store: Store) -> None:
    wide = "\U0001f3dd"  # four bytes in UTF-8
    lease = acquire(store, JOB, 3600, holder=wide * 200, overrides={"train.ema": wide * 1000})
    lease.end("failed", why=wide * 5000, failures=1)
    lease_status = lease_of(store, JOB)
    assert lease_status.record == lease.record
    assert lease_status.record.why == wide * MAX_WHY


@pytest.mark.parametrize("overrides", [{"train.lr": "1" * 5000}, {"island.setup": "x"}, {"train.lr": "a\nb"}])
def test_an_invalid_record_is_not_written(store: Store, overrides: dict[str, str]) -> None:
    with pytest.raises(AtollError, match="cannot be written into a lease: overrides"):
        Lease.acquire(store, JOB, 3600, holder="ann", overrides=overrides)
    assert store.entries("leases") == []


# What a worker deletes


def published(run: Path, images: int) -> Artifact:
    """Write a checkpoint as training would save it."""
    artifact = Artifact(run, f"{JOB}/checkpoints/{images:012d}")
    artifact.begin(CHECKPOINT, {})
    artifact.write("state.bin", bytes([images]))
    artifact.commit({"images": images, "seconds": 0.0})
    return artifact


def keys_of(store: Store) -> set[str]:
    return {entry.key for entry in store.entries("") if not entry.key.startswith("leases/")}


def bystanders(store: Store) -> set[str]:
    """Write objects of every kind that the worker must not delete; return their keys."""
    names = [f"{job}/checkpoints/{ATTEMPT}" for job in (JOB, OTHER)] + [f"{job}/final" for job in (JOB, OTHER)]
    keys = [f"{name}/{part}" for name in names for part in (f"sha256/{DIGEST}", f"manifests/{DIGEST}.json")]
    keys += ["x", "x/y", "@x", f"data/shards/cluster_000/sha256/{DIGEST}", f"{JOB}/checkpoints/notes.txt"]
    for key in keys:
        store.write(key, b"kept")
    return set(keys)


@pytest.mark.parametrize("pointer", [*POINTERS, GOOD["checkpoint"], None], ids=short)
def test_no_record_can_cause_a_deletion(store: Store, shared: Store, new_run: Copy, pointer: Any) -> None:
    """A worker deletes only keys that it wrote or resumed from, even if the pointer is well-formed."""
    kept = bystanders(store)
    store.write(key_of(JOB, 0), json.dumps({**GOOD, "checkpoint": pointer}).encode())
    run = new_run(only=[])
    lease = taken(store)
    spec, options = resolve_job(run, config.load(run), "expert", expert=1), {"every": 0.0, "stop": threading.Event()}
    with CheckpointPublisher(replace(remote(shared, by="ann"), store=store), lease, spec, **options) as publisher:
        for images in (8, 16, 24):
            publisher._waiting = published(run, images)
            publisher._send()
            publisher._upload.result()
    assert kept <= keys_of(store)
    own = {key for key in keys_of(store) - kept if "/signatures/" not in key}
    assert {key.split("/")[3] for key in own} == {lease.record.nonce[:16]}
    assert len(own) == 2, "one file and its manifest: older checkpoints of this worker are gone"
    pointer_now = lease.record.checkpoint
    assert pointer_now.startswith(publisher.name)


def worker_on(store: Store, new_run: Copy, tmp_path: Path, name: str) -> Worker:
    if store.entry("atoll.yaml") is None:
        share(new_run(), store, publishers=publishers("ann"))
    options: dict[str, Any] = {"duration": 60.0, "publish_every": 0.0, "name": name}
    return open_worker(store.url, tmp_path / name, Access(None, True, person("ann")), **options)


def test_a_worker_deletes_only_the_checkpoints_of_its_job(store: Store, new_run: Copy, tmp_path: Path) -> None:
    """A known attack: this record once made a worker delete 39 of 46 objects of a store with a policy."""
    worker = worker_on(store, new_run, tmp_path, "ann")
    store.write(key_of(JOB, 0), json.dumps({**GOOD, "checkpoint": "@x"}).encode())
    kept = keys_of(store) | {key for key in bystanders(store) if not is_checkpoint_key(key, JOB)}
    assert worker.run(expert=1) == 1
    assert kept <= keys_of(store)
    left = [entry.key for entry in store.entries(f"{JOB}/checkpoints") if "/signatures/" not in entry.key]
    assert left == [f"{JOB}/checkpoints/notes.txt"]
    assert next(line for line in status(store, remote(store)) if line.job == JOB).state == "proposed"


def test_only_the_checkpoint_that_was_resumed_from_is_deleted(
    store: Store, new_run: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = worker_on(store, new_run, tmp_path, "first")
    kept = bystanders(store)
    on_checkpoint: Callable[[CheckpointPublisher, Artifact], None] = CheckpointPublisher.on_checkpoint

    def leave(self: CheckpointPublisher, checkpoint: Artifact) -> None:
        on_checkpoint(self, checkpoint)
        self.stop.set()

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointPublisher, "on_checkpoint", leave)
        assert first.run(expert=1) == 0
        lease_status = lease_of(store, JOB)
        handed_over = lease_status.record.checkpoint.split("@")[0]
        assert store.entries(handed_over)
        second = worker_on(store, new_run, tmp_path, "second")
        assert second.run(expert=1) == 0
    left = [entry.key for entry in store.entries(handed_over) if "/signatures/" not in entry.key]
    assert left == [], "the second worker's checkpoint contains its progress"
    assert kept <= keys_of(store)
    lease_status = lease_of(store, JOB)
    assert store.entries(lease_status.record.checkpoint.split("@")[0])


@pytest.mark.parametrize(
    ("key", "is_one"),
    [
        (f"{JOB}/checkpoints/{ATTEMPT}/sha256/{DIGEST}", True),
        (f"{JOB}/checkpoints/{ATTEMPT}/sha256/{DIGEST}.0001", True),
        (f"{JOB}/checkpoints/{ATTEMPT}/manifests/{DIGEST}.json", True),
        (f"{JOB}/checkpoints/{ATTEMPT}/signatures/{DIGEST}.json", False),
        (f"{OTHER}/checkpoints/{ATTEMPT}/sha256/{DIGEST}", False),
        (f"{JOB}/final/sha256/{DIGEST}", False),
        (f"{JOB}/checkpoints/{ATTEMPT}/sha256/{DIGEST}\n", False),
        (f"{JOB}/checkpoints/{ATTEMPT}/sha256/../{DIGEST}", False),
        (f"{JOB}/checkpoints/{ATTEMPT}/{DIGEST}", False),
        (f"x/{JOB}/checkpoints/{ATTEMPT}/sha256/{DIGEST}", False),
        (f"{JOB}/checkpoints/000000000032/manifest.json", False),
    ],
)
def test_keys_of_checkpoints(key: str, is_one: bool) -> None:
    assert is_checkpoint_key(key, JOB) is is_one
