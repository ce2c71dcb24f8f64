"""A run in a store: push it, admit contributions, pull the finished model."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact, Manifest, to_json
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.core.layout import CONFIG_FILE, MANIFEST_FILE, POLICY_FILE
from atoll.core.manifests import EXPERT
from atoll.core.policy import Policy, Role, policy_of
from atoll.core.signing import SIGNATURES_FILE, Signer, verify
from atoll.core.untrusted import Refused, strict_json
from atoll.islands.leases import Lease, LeaseLost, LeaseStatus, State, get_lease
from atoll.islands.safetensors_headers import safetensors_header
from atoll.islands.shared_settings import not_shared, read_shared, shared_part
from atoll.islands.store import Store
from atoll.islands.transfer import commit, fetch, publish, read_manifest, signature_key

# Far above real files (`shared_settings.MAX_BYTES`, 64 kB, limits the settings themselves), far below a problem.
_MAX_SETTINGS = 1 << 20
"""Maximum number of bytes of atoll.yaml and policy.json in a store."""


def push(run: Path, store: Store, signer: Signer | None = None) -> list[str]:
    """Upload settings, policy, shards and finished networks of a run; return the names of the artifacts.

    Objects that the store already has are not sent again.
    """
    store.probe()
    config = configuration.load(run)
    files = {CONFIG_FILE: shared_part(config)}
    if (run / POLICY_FILE).is_file():
        files[POLICY_FILE] = (run / POLICY_FILE).read_bytes()
    if kept := not_shared(config):
        print(f"not shared, because these settings belong to this machine: {', '.join(kept)}", flush=True)
    for file, data in files.items():
        if not store.create(file, data):
            raise AtollError(f"{store.url}/{file} exists and differs from {run / file}; use another URL")
    policy, sent = policy_of(run), []
    networks = [layout.final(job) for job in layout.jobs(run)]
    for name in (*layout.shard_folders(run), *networks):
        artifact = Artifact(run, name)
        manifest = artifact.manifest()
        if manifest is None:
            continue
        if policy is not None and name in networks:
            _sign(store, artifact, manifest, policy=policy, signer=signer)
        publish(store, artifact, manifest)
        sent.append(artifact.name)
    if not sent:
        raise AtollError(f"{run} has nothing to share yet; prepare it with: atoll prepare {run}")
    return sent


def _sign(store: Store, artifact: Artifact, manifest: Manifest, *, policy: Policy, signer: Signer | None) -> None:
    """Sign a network in every role that the policy requires; write the signatures to the store and to the run."""
    roles: list[Role] = [role for role in ("publish", "admit") if policy.keys(role)]
    if roles and (signer is None or any(signer.public not in policy.keys(role).values() for role in roles)):
        raise AtollError(
            f"{artifact.name} must be signed for {store.url} with a key that the policy lists; pass it with --key"
        )
    signed = {role: signer.sign(role, artifact.name, manifest) for role in roles if signer}
    for role, signature in signed.items():
        store.write(signature_key(artifact.name, manifest.digest, role), signature)
    content = to_json({role: json.loads(signature) for role, signature in signed.items()})
    Artifact(artifact.run, ".").write(SIGNATURES_FILE.format(name=artifact.name), content)


def open_config(store: Store, folder: Path) -> tuple[Config, Policy | None]:
    """Return settings and policy of a shared run, and store them in the local copy.

    On later calls they must equal the local copy: the owner of the store cannot change a run that others have joined.
    The local copy may also hold settings of this machine, such as `island`; these are kept.
    """
    settings = store.read(CONFIG_FILE, _MAX_SETTINGS)
    if settings is None:
        raise AtollError(f"{store.url} holds no run; upload one with: atoll push RUN {store.url}")
    config = read_shared(settings, f"{store.url}/{CONFIG_FILE}")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / CONFIG_FILE).exists():
        local = configuration.load(folder)
        _check_unchanged(store, folder / CONFIG_FILE, shared_part(local) == shared_part(config))
    else:
        local = config
        Artifact(folder, ".").write(CONFIG_FILE, settings)
    data, file = store.read(POLICY_FILE, _MAX_SETTINGS), folder / POLICY_FILE
    if file.exists():
        _check_unchanged(store, file, file.read_bytes() == data)
    elif data is not None:
        Artifact(folder, ".").write(POLICY_FILE, data)
    return local, policy_of(folder)


def _check_unchanged(store: Store, local: Path, unchanged: bool) -> None:
    if not unchanged:
        raise AtollError(
            f"{store.url}/{local.name} has changed since {local} was written; to accept it, delete {local}"
        )


def finish_commit(store: Store, job: str, lease_status: LeaseStatus | None) -> None:
    """Commit the manifest of a job if its worker stopped between its last record and the commit.

    The record in state `done` decides; the manifest that it names is already uploaded. So any worker may finish.
    """
    if (
        lease_status is None
        or lease_status.record.state != "done"
        or store.entry(f"{layout.final(job)}/{MANIFEST_FILE}")
    ):
        return
    manifest = read_manifest(store, layout.final(job), lease_status.record.manifest)
    if manifest is not None:
        commit(store, layout.final(job), manifest)


# Admission of contributions


def admit(store: Store, run: Path, signer: Signer) -> dict[str, str]:
    """Review every waiting contribution; return `admitted` or the reason of the refusal for each job."""
    config, policy = open_config(store, run)
    if policy is None or signer.public not in policy.admitters.values():
        raise AtollError(f"{store.url}: the policy does not list your key ({signer.public}) among the admitters")
    verdicts = {}
    for expert in range(config.clusters.count):
        job = layout.expert_job(expert)
        lease_status = get_lease(store, job)
        if lease_status is None or not lease_status.proposed:
            finish_commit(store, job, lease_status)
            continue
        # The reviewer holds the lease during the review, so that two admitters do not check the same contribution.
        # State `held` is for a contribution whose earlier reviewer stopped; `epoch` excludes a record that came since.
        states: tuple[State, ...] = ("proposed", "held")
        holder = f"admission {signer.public[:8]}"
        lease = Lease.acquire(store, job, holder=holder, state=states, epoch=lease_status.record.epoch)
        if lease is not None:
            with lease, suppress(LeaseLost):
                verdicts[job] = _review_or_return(store, run, expert, lease=lease, policy=policy, signer=signer)
    return verdicts


def _review_or_return(store: Store, run: Path, expert: int, *, lease: Lease, policy: Policy, signer: Signer) -> str:
    """Return the verdict; if the review itself fails, return the contribution to the queue and raise the error."""
    try:
        return _review(store, run, expert, lease=lease, policy=policy, signer=signer)
    except LeaseLost:
        raise
    except BaseException:
        with suppress(LeaseLost, AtollError):
            lease.end("proposed")
        raise


def _review(store: Store, run: Path, expert: int, *, lease: Lease, policy: Policy, signer: Signer) -> str:
    from atoll.islands.admission import review

    name, digest = layout.final(layout.expert_job(expert)), lease.record.manifest
    try:
        artifact = review(store, expert, digest, policy=policy, quarantine=run / ".quarantine" / lease.job)
    except Refused as reason:
        lease.end("refused", why=str(reason), manifest=None)
        return str(reason)
    manifest = artifact.open(EXPERT)
    shutil.rmtree(run / ".quarantine" / lease.job, ignore_errors=True)
    store.write(signature_key(name, manifest.digest, "admit"), signer.sign("admit", name, manifest))
    lease.end("done")
    commit(store, name, manifest)
    return "admitted"


# Download of the model


def pull(store: Store, run: Path, shards: bool = False) -> dict[str, str]:
    """Download the finished networks of a run after checking each; return the outcome of each job."""
    config, policy = open_config(store, run)
    verdicts = {}
    for expert in range(config.clusters.count):
        job = layout.expert_job(expert)
        finish_commit(store, job, get_lease(store, job))
        verdicts[job] = _pull_expert(store, run, expert, policy=policy)
        if shards:
            _pull_artifact(store, run, layout.shards(expert), policy=None)
    for job in layout.OTHERS:
        if read_manifest(store, layout.final(job)) is not None:
            verdicts[job] = _pull_artifact(store, run, layout.final(job), policy=policy)
    return verdicts


def _pull_expert(store: Store, run: Path, expert: int, *, policy: Policy | None) -> str:
    from atoll.islands.admission import Contribution, check_signatures, review

    name = layout.final(layout.expert_job(expert))
    target, quarantine = Artifact(run, name), run / ".quarantine" / f"{expert:03d}"
    notice = run / "quarantine" / f"experts-{expert:03d}.json"
    try:
        manifest = read_manifest(store, name)
        local = target.manifest()
        if manifest is None:
            return "missing"
        if local is not None and local.digest == manifest.digest:
            return "up to date"
        artifact = review(store, expert, None, policy=policy, quarantine=quarantine)
        contribution = Contribution(expert, manifest, manifest, policy or Policy())
        signatures = check_signatures(store, contribution, ("publish", "admit"))
    except Refused as reason:
        notice.parent.mkdir(exist_ok=True)
        notice.write_bytes(to_json({"job": name, "reason": str(reason)}))
        return f"refused: {reason}"
    _move_into_run(run, artifact, target, signatures=signatures)
    notice.unlink(missing_ok=True)
    shutil.rmtree(quarantine, ignore_errors=True)
    return "fetched"


def _move_into_run(run: Path, artifact: Artifact, target: Artifact, *, signatures: dict[Role, object]) -> None:
    if target.folder.exists():
        raise AtollError(f"{target.folder} differs from the store; move it away, or pull into another folder")
    target.folder.parent.mkdir(parents=True, exist_ok=True)
    if signatures:
        Artifact(run, ".").write(SIGNATURES_FILE.format(name=target.name), to_json(signatures))
    artifact.folder.rename(target.folder)


def _pull_artifact(store: Store, run: Path, name: str, *, policy: Policy | None) -> str:
    """Download an artifact of the run's owner; verify its hashes and, if the policy lists publishers, a signature."""
    manifest = read_manifest(store, name)
    if manifest is None:
        return "missing"
    signature = _signature(store, name, manifest) if policy and policy.publishers else None
    verify(policy, "publish", name, manifest=manifest, signature=signature)
    target = Artifact(run, name)
    if policy is not None and signature is not None:  # before the manifest, because every reader of it checks them
        Artifact(run, ".").write(SIGNATURES_FILE.format(name=name), to_json({"publish": signature}))
    fetch(store, name, manifest, target=target)
    for file in manifest.files:
        if file.endswith(".safetensors"):
            safetensors_header(target.path(file))
    return "fetched"


def _signature(store: Store, name: str, manifest: Manifest) -> object:
    key = signature_key(name, manifest.digest, "publish")
    return strict_json(store.read(key, 4096) or b"null", key)
