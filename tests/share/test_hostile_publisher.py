"""A contributor with a key for an expert writes lease records that the worker would never write."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.apps.share import worker
from atoll.apps.share.admit import admit
from atoll.apps.share.lease_records import Record, key_of, list_leases
from atoll.apps.share.leases import Lease
from atoll.apps.share.owners import change_root, push
from atoll.apps.share.remote_run import Access, RemoteRun
from atoll.apps.share.status import status
from atoll.apps.share.store import Store
from atoll.apps.share.worker import open_worker
from atoll.core.artifacts import to_json
from atoll.core.errors import AtollError
from share.shared import acquire, person, publishers, remote
from share.test_records import GOOD

JOB = "experts/002"
"""Ann and bob may publish it. Bob is hostile."""


@pytest.fixture
def store(published_store: Store) -> Store:
    return published_store


def write(store: Store, epoch: int, by: str = "bob", **changes: Any) -> Record:
    """Create a record that somebody signs."""
    values = {**GOOD, "checkpoint": None, "images": 0, "state": "held", "holder": by, **changes, "epoch": epoch}
    made = Record.model_validate(values)
    made = made.model_copy(update={"signature": remote(store, by=by).sign("lease", JOB, made.digest)})
    assert store.create(key_of(JOB, epoch), to_json(json.loads(made.model_dump_json())))
    return made


def held(store: Store, duration: float = 3600.0) -> Lease:
    return acquire(store, JOB, duration, holder="ann", authority=remote(store, by="ann"))


def current(store: Store, reader: RemoteRun | None = None) -> Record | None:
    found = list_leases(store, f"leases/{JOB}", authority=reader or remote(store)).leases.get(JOB)
    return found.record if found else None


def test_a_contributor_who_takes_a_live_lease_costs_time_and_nothing_else(
    store: Store, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bob may publish the expert, too. Ann's worker stops; without bob's key she trains it to its end."""
    renew, taken = Lease.renew, list[Record]()

    def attacked(self: Lease, **changes: Any) -> None:
        if not taken:
            taken.append(write(store, self.record.epoch + 1, duration=86400.0))
        renew(self, **changes)

    ann = open_worker(store.url, tmp_path / "a", Access(None, True, person("ann")), publish_every=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lease, "renew", attacked)
        assert ann.run(expert=2) == 0
    assert current(store) == taken[0]
    assert "nothing was published" in capsys.readouterr().out
    line = next(line for line in status(store, remote(store)) if line.job == JOB)
    assert (line.state, line.where) == ("running", "bob")
    withdraw_bob(run, store)
    ann.store._clock = ann.store.now() - time.monotonic() + 300  # her own lease has expired, too
    assert ann.run(expert=2) == 1
    assert admit(remote(store, by="owner"), tmp_path / "o") == {JOB: "admitted"}


def withdraw_bob(run: Path, store: Store) -> None:
    change_root(run, person("owner"), withdrawn_keys=(person("bob").public,), publishers=publishers("ann"))
    push(run, store, person("owner"))


@pytest.mark.parametrize("state", ["released", "proposed"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_the_highest_epoch_counts_and_no_time(state: Any, order: str, store: Store) -> None:
    """Bob writes a lower epoch, which the store has had for longer, or for less time, than ann's."""
    manifest = "1" * 64 if state == "proposed" else None
    for by, epoch in (("bob", 3), ("ann", 7))[:: 1 if order == "before" else -1]:
        made = write(store, epoch, by, **({"state": state, "manifest": manifest} if by == "bob" else {}))
    lease = current(store)
    assert (lease.epoch, lease.holder) == (7, "ann")
    assert made.epoch == (7 if order == "before" else 3)


def test_links_and_folders_at_keys_stop_no_holder(store: Store, tmp_path: Path) -> None:
    lease = held(store)
    assert store.path is not None
    (store.path / key_of(JOB, 1)).symlink_to(tmp_path)
    (store.path / key_of(JOB, 2)).mkdir()
    (store.path / key_of(JOB, 2) / "x").write_bytes(b"x")
    lease.renew()
    assert (lease.record.epoch, current(store)) == (3, lease.record)


def test_a_withdrawn_key_leaves_the_work_of_others(store: Store, run: Path, tmp_path: Path) -> None:
    """Bob's records count as none: also the last epoch, after which there is none."""
    write(store, 999_999, state="failed", failures=3)
    ann = open_worker(store.url, tmp_path / "a", Access(None, True, person("ann")))
    assert ann._acquire_any(2)[0] is None, "three failures: nobody takes it"
    withdraw_bob(run, store)
    lease, _ = ann._acquire_any(2)
    lease.renew()
    assert current(store) == lease.record


CHOICES: dict[str, dict[str, str]] = {
    "allowed": {"train.lr": "0.5"},
    "endless": {"train.total_images": "1000000000000000"},
    "five times": {"train.total_images": "3200"},
    "batch": {"train.batch_size": "4000000000"},
    "batch that fits the limits of shared settings": {"train.batch_size": "1048576"},
    "EMAs": {"train.ema": "{" + ", ".join(f"e{n}: 1" for n in range(120)) + "}"},
    "EMAs one by one": {f"train.ema.e{n}": "1" for n in range(9)},
    "layers": {"networks.2.depth": "1000000000"},
    "nested": {"train.lr": "[" * 4000},
    "aliases": {"train.seed": "[&a0 [1], " + ", ".join(f"&a{n} [{f'*a{n - 1}, ' * 8}]" for n in range(1, 6)) + "]"},
}
"""Settings of a lease record. Ann's worker has those of the run: 640 images in batches of 8."""


@pytest.mark.parametrize("name", CHOICES)
def test_settings_without_a_checkpoint_do_not_bind_the_next_worker(name: str, store: Store, tmp_path: Path) -> None:
    """The record names a checkpoint that nobody has published."""
    write(store, 0, state="released", overrides=CHOICES[name], checkpoint=f"{JOB}/checkpoints/{'0' * 16}@{'1' * 64}")
    ann = open_worker(store.url, tmp_path / "a", Access(None, True, person("ann")))
    lease, _ = ann._acquire_any(2)
    assert ann._open_job(lease, 2) == (ann._resolve(2, {"train.precision": "float32"}), set())
    assert lease.record.overrides == {"train.precision": "float32"}
    assert (lease.record.checkpoint, lease.record.images, lease.record.published) == (None, 0, 0)


@pytest.mark.parametrize("name", list(CHOICES)[1:])
def test_settings_far_beyond_those_of_the_run_are_refused(name: str, store: Store, tmp_path: Path) -> None:
    """Also with a checkpoint: before the worker downloads it, or builds the network."""
    ann = open_worker(store.url, tmp_path / "a", Access(None, True, person("ann")))
    with pytest.raises(AtollError) as refused:
        ann._resolve(2, CHOICES[name])
    assert len(str(refused.value)) < 300


def test_a_worker_without_enough_memory_goes_on(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def exhausted(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(worker, "train_job", exhausted)
    ann = open_worker(store.url, tmp_path / "a", Access(None, True, person("ann")))
    assert ann.run() == 0
    assert sorted(ann.failed) == ["experts/001", "experts/002"]
    found = current(store)
    assert (found.state, found.failures) == ("failed", 1)
