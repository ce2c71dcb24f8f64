"""What the owners of a shared run do: create its root, change it, sign it, and push the run.

A change makes the next version of the root in the owner's folder. It is valid once a threshold of the owners of both
versions have signed it; with one owner, that is at once. `atoll push` publishes it.
"""

import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import ValidationError

from atoll.apps.share.admission import (
    Contribution,
    check_behavior,
    check_declaration,
    check_files,
    check_new,
    find_base,
)
from atoll.apps.share.remote_run import RemoteRun, read_all
from atoll.apps.share.shared_settings import not_shared, shared_part
from atoll.apps.share.store import Store
from atoll.apps.share.transfer import upload
from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact, Manifest
from atoll.core.errors import AtollError, wrong_fields
from atoll.core.layout import CONFIG_FILE
from atoll.core.manifests import SHARDS
from atoll.train.spec import shared_start
from atoll.verify.local_trust import check_seen, files_below, local_trust, save_root, save_snapshot
from atoll.verify.signing import Signer
from atoll.verify.trust import (
    VALID_DAYS,
    Network,
    Root,
    RootChain,
    Signed,
    parse_signed,
)
from atoll.verify.untrusted import Refused


def create_root(run: Path, signer: Signer) -> RootChain:
    """Create version 1 of the root. Its owner is the signer, who may also publish and admit; `add` lists others."""
    shards = [Artifact(run, name).manifest() for name in layout.shard_folders(run)]
    count = configuration.load(run).clusters.count
    if len(shards) != count or None in shards:
        raise AtollError(f"{run} has nothing to share yet; prepare it with: atoll prepare {run}")
    root = Root(
        run=uuid4().hex,
        version=1,
        previous=None,
        expires=_expiry(),
        owners={"owner": signer.public},
        publishers={},
        settings=_settings_digest(run),
        shards=tuple(manifest.digest for manifest in shards if manifest is not None),
    )
    save_root(run, Signed(root, (signer.sign(root.statement()),)))
    return _own_trust(run)


def draft_of(run: Path, trust: RootChain) -> Signed[Root] | None:
    """Return the next version of the root, if one waits for signatures."""
    for name, data in files_below(run, layout.ROOTS).items():
        signed = parse_signed(Root, data, name)
        if signed.content.version == trust.current.version + 1:
            return signed
    return None


def change_root(run: Path, signer: Signer, **changes: Any) -> Signed[Root]:
    """Make the next version of the root, or change the one that waits for signatures, and sign it."""
    trust = _own_trust(run)
    draft = draft_of(run, trust)
    base = draft.content if draft else trust.current
    values = base.model_dump() | {"expires": _expiry()} | changes
    values |= {"version": trust.current.version + 1, "previous": trust.current.digest}
    try:
        root = Root.model_validate(values)
    except ValidationError as error:
        raise AtollError(f"the root would not be valid: {wrong_fields(error)}") from error
    if draft:
        (run / layout.root(draft.content.version, draft.content.digest)).unlink()
    return _sign(run, Signed(root), trust, signer=signer)


def sign_root(run: Path, signer: Signer) -> Signed[Root]:
    """Add a signature to the version that waits for it."""
    trust = _own_trust(run)
    draft = draft_of(run, trust)
    if draft is None:
        raise AtollError(
            f"{run}: version {trust.current.version} of the root is complete; nothing waits for a signature"
        )
    return _sign(run, draft, trust, signer=signer)


def _sign(run: Path, signed: Signed[Root], trust: RootChain, *, signer: Signer) -> Signed[Root]:
    root = signed.content
    if signer.public not in (*root.owners.values(), *trust.current.owners.values()):
        raise AtollError(f"your key ({signer.public}) is not that of an owner of this run; pass it with --key")
    others = tuple(one for one in signed.signatures if one.key != signer.public)
    made = Signed(root, (*others, signer.sign(root.statement())))
    save_root(run, made)
    return made


def _own_trust(run: Path) -> RootChain:
    trust = local_trust(run)
    if trust is None:
        raise AtollError(f"{run} is not shared yet; share it with: atoll push {run} URL")
    return trust


def _expiry() -> Any:
    return datetime.now(UTC).date() + timedelta(days=VALID_DAYS)


def _settings_digest(run: Path) -> str:
    return hashlib.sha256(shared_part(configuration.load(run))).hexdigest()


# Push


def push(run: Path, store: Store, signer: Signer) -> tuple[RootChain, list[str]]:
    """Upload root, settings, shards and finished networks of a run; return the root and the names of the artifacts.

    Objects that the store already has are not sent again. Networks pass all checks before they are signed.
    """
    store.probe()
    config = configuration.load(run)
    settings = shared_part(config)
    if kept := not_shared(config):
        print(f"not shared, because these settings belong to this machine: {', '.join(kept)}", flush=True)
    trust = local_trust(run) or create_root(run, signer)
    if trust.current.settings != hashlib.sha256(settings).hexdigest():
        raise AtollError(
            f"{run / CONFIG_FILE} has changed since the run was shared, and contributors rely on it; change it back, "
            f"or share another run: delete {run / layout.ROOTS} and use another URL"
        )
    if trust.current.signer_name(signer.public, "root", "") is None:
        raise AtollError(f"your key ({signer.public}) is not that of an owner of this run; pass it with --key")
    _check_store(store, run, trust)
    if not store.create(CONFIG_FILE, settings):
        raise AtollError(f"{store.url}/{CONFIG_FILE} exists and differs from {run / CONFIG_FILE}; use another URL")
    sent = []
    for cluster, digest in enumerate(trust.current.shards):
        artifact = Artifact(run, layout.shards(cluster))
        manifest = artifact.open(SHARDS)
        if manifest.digest != digest:
            raise AtollError(f"{artifact.folder} has changed since the run was shared; share it again with another URL")
        upload(store, artifact, manifest, name=artifact.name)
        sent.append(artifact.name)
    for name, data in files_below(run, layout.ROOTS).items():
        signed = parse_signed(Root, data, name)
        if signed.content in trust.roots:
            store.create(layout.root(signed.content.version, signed.content.digest), data)
    check_seen(trust)
    remote = RemoteRun(store, trust, config, signer)
    find_base(remote, run)
    return trust, sent + _push_networks(remote, run)


def _check_store(store: Store, run: Path, trust: RootChain) -> None:
    """Raise an error if the store holds another run, or a later version of this one."""
    files = read_all(store, layout.ROOTS)
    if not files and store.entry(CONFIG_FILE):
        # An interrupted push is finished.
        if store.read(CONFIG_FILE) != shared_part(configuration.load(run)):
            raise AtollError(f"{store.url}/{CONFIG_FILE} exists and differs from {run / CONFIG_FILE}; use another URL")
    elif files:
        try:
            stored = RootChain.of(files, trust.roots[0].digest, store.url)
        except AtollError as error:
            raise AtollError(f"{store.url} holds another run than {run}; use another URL ({error})") from error
        if len(stored.roots) > len(trust.roots):
            raise AtollError(
                f"{store.url} has version {stored.current.version} of the root, and {run} has version "
                f"{trust.current.version}; get it with: atoll pull {store.url} {run}"
            )


def _push_networks(remote: RemoteRun, run: Path) -> list[str]:
    """Check, sign and upload the finished networks that the snapshot lacks, and add them to it."""
    check = not remote.trust.current.withdrawn_keys
    signed = remote.snapshot(check=check)
    if signed is None or signed.content.root < remote.trust.current.version:
        # Every version of the root has a snapshot, even an empty one: without it, users who saw a snapshot of an
        # admitter whose key was withdrawn would refuse the run as rolled back.
        signed = remote.write_snapshot({}, check=check)
    listed = remote.trust.usable(signed.content)
    added: dict[str, Network] = {}
    for job in layout.jobs(run):
        manifest = Artifact(run, layout.final(job)).manifest()
        if manifest is None or manifest.digest in remote.trust.current.withdrawn:
            continue
        if job in listed and listed[job].manifest != manifest.digest:
            raise AtollError(
                f"{remote.store.url} has another {job}; withdraw it first: atoll trust {run} withdraw {job}"
            )
        if job not in listed:
            added[job] = _push_network(remote, run, job, manifest=manifest)
    if added:
        signed = remote.write_snapshot(added)
    save_snapshot(run, signed)
    return [layout.final(job) for job in sorted({*added, *listed})]


def _push_network(remote: RemoteRun, run: Path, job: str, *, manifest: Manifest) -> Network:
    artifact = Artifact(run, layout.final(job))
    number = layout.expert_number(job)
    clusters = range(len(remote.trust.current.shards)) if number is None else [number]
    data = [Artifact(run, layout.shards(cluster)) for cluster in clusters]
    start = shared_start(run) if number is not None and remote.config.shared_start.flops_share else None
    contribution = Contribution(job, manifest, tuple(own.open(SHARDS) for own in data), remote.policy, start)
    try:
        check_declaration(contribution)
        network = Network(manifest=manifest.digest, weights=check_files(contribution, artifact), publisher=remote.key)
        check_new(remote, job, network)
        check_behavior(contribution, artifact, data)
    except Refused as reason:
        raise AtollError(f"{artifact.folder} is not shared: {reason}") from reason
    remote.write_signature("publish", artifact.name, manifest.digest)
    upload(remote.store, artifact, manifest, name=artifact.name)
    return network
