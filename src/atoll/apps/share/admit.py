"""`atoll admit`: review the experts that contributors propose, and add those that pass to the snapshot."""

from contextlib import suppress
from pathlib import Path

from atoll.apps.share.lease_records import LeaseState, LeaseStatus, list_leases
from atoll.apps.share.leases import Lease, LeaseLost
from atoll.apps.share.remote_run import RemoteRun
from atoll.core import layout
from atoll.core.errors import AtollError
from atoll.verify.untrusted import Refused

REVIEWABLE: tuple[LeaseState, ...] = ("proposed", "held", "done")
"""States of a contribution that an admitter may take: also of one whose earlier reviewer stopped before the end."""


def waits_for_review(lease_status: LeaseStatus) -> bool:
    """Return whether the record of a job that no snapshot lists names a contribution to review."""
    # `done` without a snapshot: the reviewer stopped in between, or its key was withdrawn with all that it admitted.
    return lease_status.proposed or (lease_status.record.state == "done" and lease_status.record.manifest is not None)


def admit(remote: RemoteRun, folder: Path) -> dict[str, str]:
    """Review every waiting contribution; return `admitted` or the reason of the refusal for each job."""
    from atoll.apps.share.admission import find_base

    if not remote.trust.current.admits(remote.key):
        raise AtollError(f"{remote.store.url}: your key ({remote.key}) is neither that of an admitter nor of an owner")
    find_base(remote, folder)
    verdicts, finished = {}, remote.networks()
    leases = list_leases(remote.store, authority=remote).leases
    for expert in range(remote.config.clusters.count):
        job = layout.expert_job(expert)
        lease_status = leases.get(job)
        withdrawn = remote.trust.current.withdrawn
        if job in finished or lease_status is None or lease_status.record.manifest in withdrawn:
            continue
        if waits_for_review(lease_status):
            # The reviewer holds the lease during the review, so that two admitters do not check the same contribution.
            # `epoch` excludes a record that came since.
            lease = Lease.acquire(
                remote.store,
                job,
                holder=f"admission {remote.key[:8]}",
                state=REVIEWABLE,
                epoch=lease_status.record.epoch,
                authority=remote,
            )
            if lease is not None:
                with lease, suppress(LeaseLost):
                    verdicts[job] = _review_or_return(remote, folder, lease)
    return verdicts


def _review_or_return(remote: RemoteRun, folder: Path, lease: Lease) -> str:
    """Return the verdict; if the review itself fails, return the contribution to the queue and raise the error."""
    try:
        return _review(remote, folder, lease)
    except LeaseLost:
        raise
    except BaseException:
        with suppress(LeaseLost, AtollError):
            lease.end("proposed")
        raise


def _review(remote: RemoteRun, folder: Path, lease: Lease) -> str:
    from atoll.apps.share import admission

    try:
        assert lease.record.manifest is not None  # `waits_for_review`
        quarantine = folder / layout.QUARANTINE / lease.job
        network = admission.review(remote, lease.job, lease.record.manifest, quarantine=quarantine)
    except Refused as reason:
        lease.end("refused", why=str(reason), manifest=None)
        return str(reason)
    lease.check()
    # The snapshot is the commit. The record after it only informs.
    remote.write_snapshot({lease.job: network})
    lease.end("done")
    return "admitted"
