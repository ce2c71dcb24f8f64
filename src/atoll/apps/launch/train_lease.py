"""The lease of a job that `atoll train` trains without a launcher."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from atoll.apps.launch.launcher import SUBMISSION_VARIABLE
from atoll.apps.launch.supervisor import try_lease
from atoll.apps.share.lease_records import MARGIN, get_lease
from atoll.apps.share.leases import Lease, LeaseLost
from atoll.apps.share.store import Store
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.train.loop import TrainCallback
from atoll.train.spec import TrainSpec


class LeaseCallback(TrainCallback):
    """Writes the progress of training into the lease; saves and stops if the lease is lost."""

    def __init__(self, lease: Lease, total: int) -> None:
        self._lease, self._total = lease, total
        self._first: tuple[int, float] | None = None

    def on_step(self, images: int) -> bool:
        """Note the progress for the next renewal."""
        now = time.monotonic()
        first, began = self._first = self._first or (images, now)
        rate = (images - first) / (now - began) if now > began else 0.0
        self._lease.set_pending(images=images, total=self._total, rate=rate)
        return self._lease.lost

    def on_checkpoint(self, checkpoint: Artifact) -> None:
        """Do nothing: the job resumes from its folder."""


@contextmanager
def train_lease(spec: TrainSpec) -> Iterator[LeaseCallback | None]:
    """Hold the lease of a job while it trains; raise an error at once if another process trains it.

    It is a lease and not a file lock, because network file systems may keep file locks on one machine (NFS, Lustre),
    and because `atoll launch` and `atoll status` read leases. The lease of a killed process ends at once on its own
    machine, where its process id is gone, and after a minute on others.
    """
    # A launcher's supervisor holds the lease for its command; under torchrun, the main process holds it for all.
    supervised = SUBMISSION_VARIABLE in os.environ or os.environ.get("RANK", "0") != "0"
    if supervised or spec.result.manifest() is not None:
        yield None
        return
    store = Store.open(spec.run)
    lease = try_lease(store, spec.job, f"process-{os.getpid()}")
    if lease is None:
        held = get_lease(store, spec.job)
        if held is None:
            raise AtollError(f"{spec.job}: another process has just begun to train it")
        left = max(1.0, held.record.duration + MARGIN - held.age)
        raise AtollError(
            f"{spec.job} is being trained by {held.record.holder.partition(' ')[0]} ({held.record.images:,} images so "
            f"far). If that process was killed, its lease ends in {left:.0f} s: run the command again then"
        )
    with lease:
        try:
            yield LeaseCallback(lease, spec.settings.total_images)
        except BaseException:
            with suppress(LeaseLost, AtollError):  # the error of training is the one to show
                lease.end("released")
            raise
        made = spec.result.manifest()
        with suppress(LeaseLost):  # the result is committed
            lease.end("done", images=spec.settings.total_images, manifest=made.digest if made else None)
