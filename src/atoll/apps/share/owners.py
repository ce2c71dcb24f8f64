"""What an owner of a shared run does: create its root, change it, and push the run.

A change makes the next version of the root in the owner's folder, signed with the owner's key. `atoll push` publishes
it.
"""

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml
from pydantic import ValidationError

from atoll.apps.share.admission import check_network, find_base
from atoll.apps.share.remote_run import FRAGMENT, Access, RemoteRun, split_url, stored_objects
from atoll.apps.share.shared_settings import not_shared, shared_part
from atoll.apps.share.store import Store
from atoll.apps.share.transfer import upload
from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError, unknown, wrong_fields
from atoll.core.layout import CONFIG_FILE
from atoll.core.manifests import SHARDS
from atoll.verify.local_trust import check_seen, local_snapshot, local_trust, save_root, save_snapshot
from atoll.verify.signing import Signer
from atoll.verify.trust import VALID_DAYS, Network, Policy, Root, RootChain, Signed
from atoll.verify.untrusted import Refused


def create_root(run: Path, signer: Signer) -> RootChain:
    """Create version 1 of the root. Its owner is the signer, who may also publish and admit; `add` lists others."""
    shards = [Artifact(run, name).manifest() for name in layout.shard_folders(run)]
    config = configuration.load(run)
    if len(shards) != config.clusters.count or None in shards:
        raise AtollError(f"{run} has nothing to share yet; prepare it with: atoll prepare {run}")
    root = Root(
        run=uuid4().hex,
        version=1,
        previous=None,
        expires=datetime.now(UTC).date() + timedelta(days=VALID_DAYS),
        owners={"owner": signer.public},
        publishers={},
        settings=hashlib.sha256(shared_part(config)).hexdigest(),
        shards=tuple(manifest.digest for manifest in shards if manifest is not None),
    )
    save_root(run, Signed(root, signer.sign(root.statement())))
    return own_trust(run)


def change_root(run: Path, signer: Signer, **changes: Any) -> Root:
    """Make and sign the next version of the root."""
    trust = own_trust(run)
    _check_owner(trust, signer)
    before = trust.current
    values = before.model_dump() | {"expires": datetime.now(UTC).date() + timedelta(days=VALID_DAYS)} | changes
    try:
        root = Root.model_validate(values | {"version": before.version + 1, "previous": before.digest})
    except ValidationError as error:
        raise AtollError(f"the root would not be valid: {wrong_fields(error)}") from error
    save_root(run, Signed(root, signer.sign(root.statement())))
    return root


def _check_owner(trust: RootChain, signer: Signer) -> None:
    if trust.current.signer_name(signer.public, "root", "") is None:
        raise AtollError(f"your key ({signer.public}) is not that of an owner of this run; pass it with --key")


def own_trust(run: Path) -> RootChain:
    """Return the root in the folder of its owner."""
    trust = local_trust(run)
    if trust is None:
        raise AtollError(f"{run} is not shared yet; share it with: atoll push {run} URL")
    return trust


# Changes as an owner types them


def show_root(source: str) -> RootChain:
    """Return the root of a shared run, given by its local folder or its URL."""
    url, fingerprint = split_url(source)
    if "://" not in url and (trust := local_trust(Path(url))):
        return trust
    # The root is only printed: whoever reads it compares the fingerprint.
    return RemoteRun.open(Store.open(url), None, Access(fingerprint, unsigned=True)).trust


def describe(trust: RootChain) -> str:
    """Return the root as text."""
    root = trust.current
    lines = [
        f"fingerprint  {trust.roots[0].fingerprint}   (never changes; others open URL{FRAGMENT}FINGERPRINT@VERSION)",
        f"version      {root.version}, valid until {root.expires}, fingerprint {root.fingerprint}",
        *(f"owner        {name}  {key}" for name, key in root.owners.items()),
        *(f"admitter     {name}  {key}" for name, key in root.admitters.items()),
    ]
    if root.publishers == "anyone":
        lines.append("publisher    anyone, for experts")
    else:
        for name, one in root.publishers.items():
            experts = "all experts" if one.experts is None else f"experts {', '.join(map(str, one.experts))}"
            lines.append(f"publisher    {name}  {one.key}  {experts}")
    lines += [f"withdrawn    {one}" for one in (*root.withdrawn_keys, *root.withdrawn)]
    limits = root.policy.model_dump(exclude_defaults=True)
    lines += [f"limit        {name} {value}" for name, value in limits.items()]
    return "\n".join(lines)


def change(run: Path, action: str, words: Sequence[str], *, experts: tuple[int, ...], signer: Signer) -> Root:
    """Make the next version of the root in the folder of its owner."""
    trust = own_trust(run)
    root, policy = trust.current, tuple(Policy.model_fields)
    people = {} if root.publishers == "anyone" else root.publishers
    made: dict[str, object] = {}  # new values of fields of the root
    match (action, *words):
        case ("renew",):
            pass  # every new version is valid for a year
        case ("add", "publisher", "anyone"):
            made["publishers"] = "anyone"
        case ("invite", name, key) | ("add", "publisher", name, key):
            made["publishers"] = {**people, name: {"key": key, "experts": experts or None}}
        case ("add", "admitter", name, key):
            made["admitters"] = {**root.admitters, name: key}
        case ("add", "owner", name, key):
            made["owners"] = {**root.owners, name: key}
        case ("withdraw", "network", job):
            snapshot = local_snapshot(run, trust)
            listed = snapshot.content.networks.get(job) if snapshot else None
            # The weights, too, so that the same weights with another manifest stay out.
            digests = (listed.manifest, listed.weights) if listed else (job,)
            made["withdrawn"] = (*root.withdrawn, *digests)
        case ("withdraw", "key", word):  # also from every list
            key = {**{name: one.key for name, one in people.items()}, **root.admitters, **root.owners}.get(word, word)
            made["withdrawn_keys"] = (*root.withdrawn_keys, key)
            made["owners"] = {name: one for name, one in root.owners.items() if one != key}
            made["admitters"] = {name: one for name, one in root.admitters.items() if one != key}
            if root.publishers != "anyone":
                made["publishers"] = {name: one for name, one in people.items() if one.key != key}
        case ("rotate", name, key):  # signatures of the old key stay valid; withdraw it if it was stolen
            if name in root.owners:
                made["owners"] = {**root.owners, name: key}
            if name in root.admitters:
                made["admitters"] = {**root.admitters, name: key}
            if name in people:
                made["publishers"] = {**people, name: {"key": key, "experts": people[name].experts}}
            if not made:
                raise AtollError(unknown("name", name, (*root.owners, *root.admitters, *people)))
        case ("set", name, text) if name in (*policy, "expires"):
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise AtollError(f"{text!r} is not a value of {name}: {error}") from error
            made = {"policy": root.policy.model_dump() | {name: value}} if name in policy else {name: value}
        case _:
            raise AtollError(
                "expected: atoll trust RUN invite NAME KEY, add publisher|admitter|owner NAME KEY, add publisher "
                "anyone, withdraw network JOB|DIGEST, withdraw key NAME|KEY, rotate NAME KEY, renew, or set FIELD "
                f"VALUE with a field of {', '.join(policy)}, expires"
            )
    return change_root(run, signer, **made)


# Push


def push(run: Path, store: Store, signer: Signer) -> tuple[RemoteRun, list[str]]:
    """Upload root, settings, shards and finished networks of a run; return it and the names of the artifacts.

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
    _check_owner(trust, signer)
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
    for root in trust.roots:
        name = layout.root(root.version, root.digest)
        store.create(name, (run / name).read_bytes())
    check_seen(trust)
    Artifact(run, ".").write(layout.STORE_URL, store.url.encode())
    remote = RemoteRun(store, trust, config, signer)
    find_base(remote, run)
    return remote, sent + _push_networks(remote, run)


def pushed_url(run: Path) -> str:
    """Return the store to which a run was pushed before."""
    file = run / layout.STORE_URL
    if not file.is_file():
        raise AtollError(f"{run} was not pushed from this folder yet; name the store: atoll push {run} URL")
    return file.read_text(encoding="utf-8")


def _check_store(store: Store, run: Path, trust: RootChain) -> None:
    """Raise an error if the store holds another run, or a later version of this one."""
    objects = stored_objects(store, layout.ROOTS)
    if not objects.roots():
        return  # a new store, or an interrupted push
    published = [root for root in trust.roots if (root.version, root.digest) in objects.roots()]
    if not published:
        raise AtollError(f"{store.url} holds another run than {run}; use another URL")
    # From the newest version that both have: a version that somebody else adds beside one of ours does not count.
    stored = RootChain(trust.roots[: published[-1].version]).extended(objects)
    if stored.roots != trust.roots[: len(stored.roots)]:
        raise AtollError(
            f"{store.url} has a version {stored.current.version} of the root that {run} lacks. Look at it with: atoll "
            f"trust {store.url}. Then get it with: atoll pull {store.url} ANOTHER_FOLDER, and make your change there"
        )


def _push_networks(remote: RemoteRun, run: Path) -> list[str]:
    """Check, sign and upload the finished networks that the snapshot lacks, and add them to it."""
    signed = remote.snapshot(check=False)
    if signed is None or signed.content.root < remote.trust.current.version:
        # Every version of the root has a snapshot, even an empty one: without it, users who saw a snapshot of an
        # admitter whose key was withdrawn, or one that somebody deleted, would refuse the run as rolled back.
        signed = remote.write_snapshot({}, check=False)
    check_seen(remote.trust, signed.content.order)
    listed = remote.trust.usable(signed)
    # The shared start first: an expert must declare the one that is published.
    for job in sorted(layout.jobs(run), key=lambda job: job != layout.START):
        artifact = Artifact(run, layout.final(job))
        manifest = artifact.manifest()
        if manifest is None or manifest.digest in remote.trust.current.withdrawn:
            continue
        if job in listed and listed[job].manifest != manifest.digest:
            raise AtollError(
                f"{remote.store.url} has another {job}; withdraw it first: atoll trust {run} withdraw network {job}"
            )
        if job not in listed:
            try:
                # Owners decide how long they train their own networks.
                checked = check_network(remote, job, manifest, run, measure=True, finished=False)
            except Refused as reason:
                raise AtollError(f"{artifact.folder} is not shared: {reason}") from reason
            signature = remote.write_signature("publish", artifact.name, manifest.digest, weights=checked.weights)
            upload(remote.store, artifact, manifest, name=artifact.name)
            network = Network(manifest=manifest.digest, signature=signature, error=checked.error)
            signed = remote.write_snapshot({job: network})
            listed[job] = network
    save_snapshot(run, signed)
    return [layout.final(job) for job in sorted(listed)]
