"""`atoll pull`: download the networks of the newest snapshot of a shared run. It only reads from the store."""

import shutil
from pathlib import Path

from atoll.apps.share.admission import check_network
from atoll.apps.share.remote_run import RemoteRun
from atoll.apps.share.transfer import fetch, read_manifest
from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.verify.local_trust import save_snapshot
from atoll.verify.trust import Network
from atoll.verify.untrusted import Refused


def pull(remote: RemoteRun, run: Path, shards: bool = False) -> dict[str, str]:
    """Download the finished networks of a run after checking each; return the outcome of each job."""
    signed = remote.snapshot()
    networks = remote.trust.usable(signed)
    experts = [layout.expert_job(expert) for expert in range(remote.config.clusters.count)]
    verdicts = {
        job: pull_network(remote, run, job, network=networks[job]) if job in networks else "missing"
        for job in sorted({*experts, *networks}, key=lambda job: (not layout.is_expert(job), job))
    }
    # Written last: `atoll.load` accepts the networks that it lists, and these were checked before.
    if signed is not None:
        save_snapshot(run, signed)
    if shards:
        for cluster in range(remote.config.clusters.count):
            name = layout.shards(cluster)
            fetch(remote.store, name, remote.shards(cluster), target=Artifact(run, name))
    return verdicts


def pull_start(remote: RemoteRun, run: Path) -> None:
    """Download and check the shared start, with which an expert begins, if the run has one."""
    if remote.shared_start() is not None:
        verdict = pull_network(remote, run, layout.START, network=remote.networks()[layout.START])
        if verdict.startswith("refused"):
            raise AtollError(f"the shared start of this run is {verdict}")


def pull_network(remote: RemoteRun, run: Path, job: str, *, network: Network) -> str:
    """Download one network of the snapshot after checking it; return the outcome."""
    target, quarantine = Artifact(run, layout.final(job)), run / layout.QUARANTINE / job
    shutil.rmtree(quarantine, ignore_errors=True)
    try:
        local = target.manifest()
        if local is not None and local.digest == network.manifest:
            return "up to date"
        if target.folder.exists():
            raise AtollError(f"{target.folder} differs from the store; move it away, or pull into another folder")
        manifest = read_manifest(remote.store, target.name, network.manifest)
        if check_network(remote, job, manifest, quarantine, measure=False).weights != network.weights:
            raise Refused("its weights are not those that its publisher signed")
        target.folder.parent.mkdir(parents=True, exist_ok=True)
        (quarantine / target.name).rename(target.folder)
        return "fetched"
    except AtollError as error:
        return f"refused: {error}"
    finally:
        shutil.rmtree(quarantine, ignore_errors=True)
