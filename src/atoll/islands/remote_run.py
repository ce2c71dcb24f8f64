"""A whole run in a store: put it there, let contributions in, bring the finished model back."""

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
from atoll.islands.leases import Lease, LeaseLost, Seen, State, look
from atoll.islands.safetensors_headers import safetensors_header
from atoll.islands.shared_settings import not_shared, read_shared, shared_part
from atoll.islands.store import Store
from atoll.islands.transfer import commit, fetch, publish, read_manifest, signature_key

_MAX_SETTINGS = 1 << 20


def push(run: Path, store: Store, signer: Signer | None = None) -> list[str]:
    """Put a run's settings, policy, shards and finished networks into a store; what is there is not sent again."""
    store.probe()
    config = configuration.load(run)
    files = {CONFIG_FILE: shared_part(config)}
    if (run / POLICY_FILE).is_file():
        files[POLICY_FILE] = (run / POLICY_FILE).read_bytes()
    if kept := not_shared(config):
        print(f"not shared, because it belongs to this machine: {', '.join(kept)}", flush=True)
    for file, data in files.items():
        if not store.create(file, data):
            raise AtollError(f"{store.url}/{file} is there already and differs from {run / file}; use another place")
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
    """Sign one's own network in every role that the policy has, in the store and beside the artifact."""
    roles: list[Role] = [role for role in ("publish", "admit") if policy.keys(role)]
    if roles and (signer is None or any(signer.public not in policy.keys(role).values() for role in roles)):
        raise AtollError(f"{artifact.name} must be signed for {store.url} by someone whom the policy lists; give --key")
    signed = {role: signer.sign(role, artifact.name, manifest) for role in roles if signer}
    for role, signature in signed.items():
        store.write(signature_key(artifact.name, manifest.digest, role), signature)
    beside = to_json({role: json.loads(signature) for role, signature in signed.items()})
    Artifact(artifact.run, ".").write(SIGNATURES_FILE.format(name=artifact.name), beside)


def open_config(store: Store, folder: Path) -> tuple[Config, Policy | None]:
    """Return settings and policy of a shared run, kept in this machine's copy: once seen, they must not change.

    The copy may have settings of this machine beside the shared ones, such as `island`; they stay as they are.
    """
    settings = store.read(CONFIG_FILE, _MAX_SETTINGS)
    if settings is None:
        raise AtollError(f"{store.url} holds no run; put one there with: atoll push RUN {store.url}")
    config = read_shared(settings, f"{store.url}/{CONFIG_FILE}")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / CONFIG_FILE).exists():
        mine = configuration.load(folder)
        _check_unchanged(store, folder / CONFIG_FILE, shared_part(mine) == shared_part(config))
    else:
        mine = config
        Artifact(folder, ".").write(CONFIG_FILE, settings)
    data, file = store.read(POLICY_FILE, _MAX_SETTINGS), folder / POLICY_FILE
    if file.exists():
        _check_unchanged(store, file, file.read_bytes() == data)
    elif data is not None:
        Artifact(folder, ".").write(POLICY_FILE, data)
    return mine, policy_of(folder)


def _check_unchanged(store: Store, mine: Path, unchanged: bool) -> None:
    if not unchanged:
        raise AtollError(f"{store.url}/{mine.name} is not what it was ({mine}); if that is right, delete {mine}")


def settle(store: Store, job: str, seen: Seen | None) -> None:
    """Finish what a worker left undone that was stopped between its last record and the manifest."""
    if seen is None or seen.record.state != "done" or store.entry(f"{layout.final(job)}/{MANIFEST_FILE}"):
        return
    manifest = read_manifest(store, layout.final(job), seen.record.manifest)
    if manifest is not None:
        commit(store, layout.final(job), manifest)


# Letting contributions in


def admit(store: Store, run: Path, signer: Signer) -> dict[str, str]:
    """Check every contribution that waits; the verdict for each job: `admitted`, or the reason of the refusal."""
    config, policy = open_config(store, run)
    if policy is None or signer.public not in policy.admitters.values():
        raise AtollError(f"{store.url}: its policy does not list your key ({signer.public}) among the admitters")
    verdicts = {}
    for expert in range(config.clusters.count):
        job = layout.expert_job(expert)
        seen = look(store, job)
        if seen is None or not seen.proposed:
            settle(store, job, seen)
            continue
        states: tuple[State, ...] = ("proposed", "held")
        mine = f"admission {signer.public[:8]}"
        lease = Lease.take(store, job, holder=mine, state=states, epoch=seen.record.epoch)
        if lease is not None:
            with lease, suppress(LeaseLost):
                verdicts[job] = _judge_or_leave(store, run, expert, lease=lease, policy=policy, signer=signer)
    return verdicts


def _judge_or_leave(store: Store, run: Path, expert: int, *, lease: Lease, policy: Policy, signer: Signer) -> str:
    """The verdict; if none can be given, the contribution waits on."""
    try:
        return _judge(store, run, expert, lease=lease, policy=policy, signer=signer)
    except LeaseLost:
        raise
    except BaseException:
        with suppress(LeaseLost, AtollError):
            lease.end("proposed")
        raise


def _judge(store: Store, run: Path, expert: int, *, lease: Lease, policy: Policy, signer: Signer) -> str:
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


# Bringing the model back


def pull(store: Store, run: Path, shards: bool = False) -> dict[str, str]:
    """Bring a run's finished networks into a folder. Each is checked first; what is refused stays out."""
    config, policy = open_config(store, run)
    verdicts = {}
    for expert in range(config.clusters.count):
        job = layout.expert_job(expert)
        settle(store, job, look(store, job))
        verdicts[job] = _bring_expert(store, run, expert, policy=policy)
        if shards:
            _bring(store, run, layout.shards(expert), policy=None)
    for job in layout.OTHERS:
        if read_manifest(store, layout.final(job)) is not None:
            verdicts[job] = _bring(store, run, layout.final(job), policy=policy)
    return verdicts


def _bring_expert(store: Store, run: Path, expert: int, *, policy: Policy | None) -> str:
    from atoll.islands.admission import Contribution, check_signatures, review

    name = layout.final(layout.expert_job(expert))
    target, quarantine = Artifact(run, name), run / ".quarantine" / f"{expert:03d}"
    notice = run / "quarantine" / f"experts-{expert:03d}.json"
    try:
        manifest = read_manifest(store, name)
        mine = target.manifest()
        if manifest is None:
            return "missing"
        if mine is not None and mine.digest == manifest.digest:
            return "there"
        artifact = review(store, expert, None, policy=policy, quarantine=quarantine)
        offered = Contribution(expert, manifest, manifest, policy or Policy())
        signatures = check_signatures(store, offered, ("publish", "admit"))
    except Refused as reason:
        notice.parent.mkdir(exist_ok=True)
        notice.write_bytes(to_json({"job": name, "reason": str(reason)}))
        return f"refused: {reason}"
    _place(run, artifact, target, signatures=signatures)
    notice.unlink(missing_ok=True)
    shutil.rmtree(quarantine, ignore_errors=True)
    return "fetched"


def _place(run: Path, artifact: Artifact, target: Artifact, *, signatures: dict[Role, object]) -> None:
    if target.folder.exists():
        raise AtollError(f"{target.folder} is there and is not what the store has; move it away, or pull elsewhere")
    target.folder.parent.mkdir(parents=True, exist_ok=True)
    if signatures:
        Artifact(run, ".").write(SIGNATURES_FILE.format(name=target.name), to_json(signatures))
    artifact.folder.rename(target.folder)


def _bring(store: Store, run: Path, name: str, *, policy: Policy | None) -> str:
    """An artifact of the run's owner: hashes, and a publisher's signature if the policy names publishers."""
    manifest = read_manifest(store, name)
    if manifest is None:
        return "missing"
    signature = _signature(store, name, manifest) if policy and policy.publishers else None
    verify(policy, "publish", name, manifest=manifest, signature=signature)
    target = Artifact(run, name)
    if policy is not None and signature is not None:  # first, for whoever looks at the manifest asks for it
        Artifact(run, ".").write(SIGNATURES_FILE.format(name=name), to_json({"publish": signature}))
    fetch(store, name, manifest, target=target)
    for file in manifest.files:
        if file.endswith(".safetensors"):
            safetensors_header(target.path(file))
    return "fetched"


def _signature(store: Store, name: str, manifest: Manifest) -> object:
    key = signature_key(name, manifest.digest, "publish")
    return strict_json(store.read(key, 4096) or b"null", key)
