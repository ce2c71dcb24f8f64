"""A contributor with a key for an expert writes lease records that the worker would never write."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll import cli
from atoll.apps.share import lease_records, worker
from atoll.apps.share.lease_records import Record, key_of, list_leases
from atoll.apps.share.leases import KEPT_EPOCHS, Lease, LeaseLost
from atoll.apps.share.remote_run import Access, RemoteRun
from atoll.apps.share.status import status
from atoll.apps.share.store import Store
from atoll.apps.share.worker import open_worker
from atoll.core.artifacts import to_json
from atoll.core.errors import AtollError
from share.conftest import Published
from share.shared import key_file, lease_of, person, remote
from share.test_records import GOOD

JOB = "experts/002"
"""Ann and bob may publish it. Bob is hostile."""


def write(store: Store, epoch: int, by: str = "bob", **changes: Any) -> Record:
    """Create a record that somebody signs."""
    values = {**GOOD, "checkpoint": None, "images": 0, "state": "held", "holder": by, **changes, "epoch": epoch}
    made = Record.model_validate(values)
    made = made.model_copy(update={"signature": remote(store, by=by).sign("lease", JOB, made.digest)})
    assert store.create(key_of(JOB, epoch), to_json(json.loads(made.model_dump_json())))
    return made


def held(store: Store, duration: float = 3600.0) -> Lease:
    lease = Lease.acquire(store, JOB, duration, holder="ann", authority=remote(store, by="ann"))
    assert lease is not None
    return lease


def current(store: Store, reader: RemoteRun | None = None) -> Record | None:
    found = list_leases(store, f"leases/{JOB}", authority=reader or remote(store)).leases.get(JOB)
    return found.record if found else None


OVER: dict[str, Callable[[Store, Lease], object]] = {
    "next epoch": lambda store, _: write(store, 1),
    "for a day": lambda store, _: write(store, 1, duration=86400.0),
    "last epoch": lambda store, _: write(store, 999_999),
    "jump": lambda store, _: write(store, 40),
    "made before": lambda store, _: [write(store, epoch) for epoch in (2, 3, 4)],
    "many": lambda store, _: [write(store, epoch) for epoch in range(1, 30)],
    "released": lambda store, _: write(store, 1, state="released"),
    "failed": lambda store, _: write(store, 1, state="failed", failures=3),
    "done": lambda store, _: write(store, 1, state="done", manifest="1" * 64),
    "done without a manifest": lambda store, _: write(store, 1, state="done"),
    "proposed": lambda store, _: write(store, 1, state="proposed", manifest="1" * 64),
    "fast": lambda store, _: write(store, 1, rate=1e9, total=1000, images=999, published=999),
    "nonce of the holder": lambda store, lease: write(store, 1, nonce=lease.record.nonce),
    "end with the nonce of the holder": lambda store, lease: write(
        store, 1, nonce=lease.record.nonce, state="released"
    ),
}


@pytest.mark.parametrize("name", OVER)
def test_a_live_lease_cannot_be_taken(name: str, published: Published, tmp_path: Path) -> None:
    """The holder goes on, others see it, and status shows the record."""
    store = Store.open(tmp_path / "store")
    published.copy(store)
    lease = held(store)
    OVER[name](store, lease)
    assert current(store) == lease.record
    line = next(line for line in status(store, remote(store)) if line.job == JOB)
    assert (line.state, line.where) == ("running", "ann")
    assert f"ignored a record: leases/{JOB}/" in line.why
    reader = remote(store)
    for images in range(1, KEPT_EPOCHS + 4):  # until old records were deleted
        lease.renew(images=images)
        assert current(store, reader) == lease.record
    lease.end("released")
    assert current(store) == lease.record
    other = Lease.acquire(store, JOB, 3600, authority=remote(store, by="bob"))
    assert other is not None, "what is free can be taken"
    assert lease_of(store, JOB).record.images == KEPT_EPOCHS + 3


def test_a_contributor_cannot_stop_the_join_of_another(place: Store, tmp_path: Path) -> None:
    """On files and on an S3 server: bob writes over the lease while ann trains; then the expert is admitted."""
    renew, attacks = Lease.renew, iter(range(1, 999_999))

    def attacked(self: Lease, **changes: Any) -> None:
        write(place, self.record.epoch + 1, state=("held", "failed", "released")[next(attacks) % 3])
        renew(self, **changes)

    fingerprint = remote(place).trust.roots[0].digest
    url = f"{place.url}#sha256={fingerprint}"
    options = ("--folder", str(tmp_path / "ann"), "--expert", "2", "--publish-every", "0")
    write(place, 999_999)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lease, "renew", attacked)
        assert cli.main(["join", url, "--key", str(key_file("ann", tmp_path)), *options]) == 0
    assert next(attacks) > 1, "bob wrote a record, at least one: renewals depend on the time"
    found = current(place)
    assert found is not None
    assert (found.state, found.key) == ("proposed", person("ann").public)
    write(place, found.epoch + 1, state="failed", failures=3)
    owner = ("--key", str(key_file("owner", tmp_path)), "--folder", str(tmp_path / "owner"))
    assert cli.main(["admit", url, *owner]) == 0
    assert JOB in remote(place).networks()


@pytest.mark.parametrize("state", ["proposed", "done"])
def test_a_contribution_that_waits_cannot_be_replaced(state: Any, published: Published, tmp_path: Path) -> None:
    store = Store.open(f"memory://{tmp_path.name}{state}")
    published.copy(store)
    lease = Lease.acquire(store, JOB, 3600, authority=remote(store, by="owner" if state == "done" else "ann"))
    assert lease is not None
    lease.end(state, manifest="1" * 64)
    for epoch, changes in enumerate([{}, {"state": "released"}, {"state": "proposed", "manifest": "2" * 64}], 2):
        write(store, epoch, **changes)
    assert current(store) == lease.record


def test_a_first_record_far_above_does_not_block_a_job(published: Published, tmp_path: Path) -> None:
    store = Store.open(f"memory://{tmp_path.name}")
    published.copy(store)
    write(store, 999_999)
    write(store, lease_records.MAX_FIRST_EPOCH + 1)
    assert current(store) is None
    lease = held(store)
    lease.renew()
    assert (lease.record.epoch, lease.lost) == (1, False)


def test_a_deleted_epoch_that_is_written_again_does_not_count(published: Published, tmp_path: Path) -> None:
    store = Store.open(f"memory://{tmp_path.name}")
    published.copy(store)
    lease = held(store)
    for _ in range(KEPT_EPOCHS + 6):
        lease.renew()
    reader = remote(store)
    assert not store.taken(key_of(JOB, 2))
    for epoch in (2, 3, 0):
        write(store, epoch)
    assert current(store) == lease.record
    for _ in range(2 * KEPT_EPOCHS):
        lease.renew()
        assert current(store, reader) == lease.record
    assert len(store.entries(f"leases/{JOB}")) <= KEPT_EPOCHS + 1


def test_links_and_folders_at_keys_do_not_end_the_chain(published: Published, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    published.copy(store)
    lease = held(store)
    assert store.path is not None
    (store.path / key_of(JOB, 1)).symlink_to(tmp_path)
    (store.path / key_of(JOB, 2)).mkdir()
    (store.path / key_of(JOB, 2) / "x").write_bytes(b"x")
    lease.renew()
    assert (lease.record.epoch, current(store)) == (3, lease.record)


def test_an_expired_lease_can_be_taken_and_stays_taken(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the sleeper writes far above, and after the key of the taker was used elsewhere."""
    monkeypatch.setattr(lease_records, "MARGIN", 0.1)
    store = Store.open(f"memory://{tmp_path.name}")
    published.copy(store)
    bob = Lease.acquire(store, JOB, 0.5, authority=remote(store, by="bob"))
    assert bob is not None
    time.sleep(0.8)
    lease = held(store)
    assert lease.record.epoch == 1
    bob._deadline = time.monotonic() + 1000
    with pytest.raises(LeaseLost):
        bob.renew()
    write(store, 2, nonce=bob.record.nonce)
    write(store, 50, nonce=bob.record.nonce)
    lease.renew()
    assert (lease.record.epoch, current(store)) == (3, lease.record)


def test_the_owner_takes_any_lease(published: Published, tmp_path: Path) -> None:
    store = Store.open(f"memory://{tmp_path.name}")
    published.copy(store)
    lease = held(store)
    taken = write(store, 1, by="owner")
    assert current(store) == taken
    with pytest.raises(LeaseLost):
        lease.renew()


def test_a_withdrawn_key_leaves_the_work_of_others(published: Published, tmp_path: Path) -> None:
    """Bob's records count as none, and those of ann after them still count."""
    from atoll.apps.share.owners import change_root, push

    store = Store.open(f"memory://{tmp_path.name}")
    published.copy(store)
    write(store, 0, state="failed", failures=3)
    ann = open_worker(store.url, tmp_path / "a", Access(None, True, person("ann")))
    assert ann._acquire_any(2)[0] is None, "three failures: nobody takes it"
    run = tmp_path / "owner"
    shutil.copytree(published.run, run)
    change_root(run, person("owner"), withdrawn_keys=(person("bob").public,))
    push(run, store, person("owner"))
    lease, _ = ann._acquire_any(2)
    assert lease is not None
    lease.renew()
    assert current(store) == lease.record


CHOICES: dict[str, dict[str, str]] = {
    "allowed": {"train.lr": "0.5"},
    "endless": {"train.total_images": "1000000000000000"},
    "five times": {"train.total_images": "800"},
    "batch": {"train.batch_size": "4000000000"},
    "batch that fits the limits of shared settings": {"train.batch_size": "1048576"},
    "EMAs": {"train.ema": "{" + ", ".join(f"e{n}: 1" for n in range(120)) + "}"},
    "EMAs one by one": {f"train.ema.e{n}": "1" for n in range(9)},
    "layers": {"networks.2.depth": "1000000000"},
    "nested": {"train.lr": "[" * 4000},
    "aliases": {"train.seed": "[&a0 [1], " + ", ".join(f"&a{n} [{f'*a{n - 1}, ' * 8}]" for n in range(1, 6)) + "]"},
}
"""Settings of a lease record. Ann's worker has those of the run: 160 images in batches of 8."""


@pytest.mark.parametrize("name", CHOICES)
def test_settings_without_a_checkpoint_do_not_bind_the_next_worker(
    name: str, published: Published, tmp_path: Path
) -> None:
    """The record names a checkpoint that nobody has published."""
    store = Store.open(f"memory://{tmp_path.name}")
    published.copy(store)
    write(store, 0, state="released", overrides=CHOICES[name], checkpoint=f"{JOB}/checkpoints/{'0' * 16}@{'1' * 64}")
    ann = open_worker(store.url, tmp_path / "a", Access(None, True, person("ann")))
    lease, _ = ann._acquire_any(2)
    assert lease is not None
    assert ann._open_job(lease, 2) == (ann._resolve(2, {"train.precision": "float32"}), set())
    assert lease.record.overrides == {"train.precision": "float32"}
    assert (lease.record.checkpoint, lease.record.images, lease.record.published) == (None, 0, 0)


@pytest.mark.parametrize("name", list(CHOICES)[1:])
def test_settings_far_beyond_those_of_the_run_are_refused(name: str, published: Published, tmp_path: Path) -> None:
    """Also with a checkpoint: before the worker downloads it, or builds the network."""
    store = Store.open(f"memory://{tmp_path.name}")
    published.copy(store)
    ann = open_worker(store.url, tmp_path / "a", Access(None, True, person("ann")))
    with pytest.raises(AtollError) as refused:
        ann._resolve(2, CHOICES[name])
    assert len(str(refused.value)) < 300


def test_a_worker_without_enough_memory_goes_on(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(f"memory://{tmp_path.name}")
    published.copy(store)

    def exhausted(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(worker, "train_job", exhausted)
    ann = open_worker(store.url, tmp_path / "a", Access(None, True, person("ann")))
    assert ann.run() == 0
    assert sorted(ann.failed) == ["experts/001", "experts/002"]
    found = current(store)
    assert found is not None
    assert (found.state, found.failures) == ("failed", 1)
