"""`atoll admit`: review the experts that contributors propose, and add those that pass to the snapshot."""

from contextlib import suppress
from pathlib import Path

from atoll.apps.share.admission import find_base, review
from atoll.apps.share.lease_records import list_leases
from atoll.apps.share.leases import Lease, LeaseLost
from atoll.apps.share.remote_run import RemoteRun
from atoll.core import layout
from atoll.core.errors import AtollError
from atoll.verify.untrusted import Refused


def admit(remote: RemoteRun, folder: Path) -> dict[str, str]:
    """Review every waiting contribution; return `admitted` or the reason of the refusal for each job."""
    root = remote.trust.current
    if not root.admits(remote.key):
        raise AtollError(f"{remote.store.url}: your key ({remote.key}) is neither that of an admitter nor of an owner")
    find_base(remote, folder)
    verdicts, finished = {}, remote.networks()
    leases = list_leases(remote.store, authority=remote).leases
    for job in map(layout.expert_job, range(remote.config.clusters.count)):
        found = leases.get(job)
        if job in finished or found is None or not found.waiting or found.record.manifest in root.withdrawn:
            continue
        # The reviewer holds the lease during the review, so that two admitters do not check the same contribution.
        lease = Lease.acquire(remote.store, job, holder=f"admission {remote.key[:8]}", over=found, authority=remote)
        if lease is not None:
            with lease, suppress(LeaseLost):
                verdicts[job] = _review(remote, folder, lease)
    return verdicts


def _review(remote: RemoteRun, folder: Path, lease: Lease) -> str:
    """Return the verdict; if the review itself fails, return the contribution to the queue and raise the error."""
    assert lease.record.manifest is not None  # it waits
    try:
        try:
            network = review(
                remote, lease.job, lease.record.manifest, quarantine=folder / layout.QUARANTINE / lease.job
            )
        except Refused as reason:
            lease.end("refused", why=str(reason), manifest=None)
            return str(reason)
        lease.check()
        # The snapshot is the commit. The record after it only informs.
        remote.write_snapshot({lease.job: network})
        lease.end("done")
        return "admitted"
    except LeaseLost:
        raise
    except BaseException:
        with suppress(LeaseLost, AtollError):
            lease.end("proposed")
        raise
