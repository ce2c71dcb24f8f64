"""The root and snapshot of a local copy of a shared run, and what this user has seen of shared runs.

A local run that was never shared has no root, and needs no signatures.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from atoll.core import layout
from atoll.core.artifacts import Artifact, ArtifactKind, Content, Manifest, to_json
from atoll.core.errors import AtollError
from atoll.verify.signing import config_folder
from atoll.verify.trust import MAX_BYTES, Network, Objects, Root, RootChain, Signed, Snapshot
from atoll.verify.verified_files import VerifiedFiles


def local_objects(run: Path, folder: str) -> Objects:
    """Return the roots or snapshots of a local run."""

    def read(name: str) -> bytes | None:
        file = run / name
        return file.read_bytes() if file.is_file() and file.stat().st_size <= MAX_BYTES else None

    return Objects(tuple(f"{folder}/{file.name}" for file in sorted((run / folder).glob("[0-9]*.json"))), read)


def local_trust(run: Path) -> RootChain | None:
    """Return the root of a local copy of a shared run; None if the run was never shared."""
    objects = local_objects(run, layout.ROOTS)
    if not objects.names:
        return None
    return _verified_chain(tuple((name, objects.read(name)) for name in objects.names), str(run))


# The result depends on the bytes alone, and a model with many networks asks for it once per network.
@lru_cache(maxsize=4)
def _verified_chain(files: tuple[tuple[str, bytes | None], ...], source: str) -> RootChain:
    objects = Objects(tuple(name for name, _ in files), dict(files).get)
    return RootChain.up_to(objects, None, source).extended(objects)


def local_snapshot(run: Path, trust: RootChain) -> Signed[Snapshot] | None:
    """Return the newest snapshot of a local copy of a shared run."""
    return trust.newest_snapshot(local_objects(run, layout.SNAPSHOTS))


def open_network(
    artifact: Artifact, kind: ArtifactKind[Any], *, verify: bool = False
) -> tuple[Manifest, VerifiedFiles | None]:
    """Return the manifest of a finished network, and how to read its files if they must be verified.

    In a local copy of a shared run, the network must be the one that the run's newest snapshot lists. One that was
    made here (it has metrics, or is merged) and that no snapshot lists yet needs no signature. Its manifest is checked
    here, and every file when it is read; `verify` checks all files here too.
    """
    trust = local_trust(artifact.run)
    manifest = artifact.open(kind, verify=verify)
    if trust is not None:
        job = artifact.name.removesuffix(layout.final(""))
        signed = local_snapshot(artifact.run, trust)
        listed, usable = signed.content.networks if signed else {}, trust.usable(signed, job)
        made_here = job == layout.MERGED or (artifact.run / layout.metrics(job)).is_file()
        withdrawn = manifest.digest in trust.current.withdrawn
        own = made_here and job not in listed and not withdrawn
        if not own and (job not in usable or usable[job].manifest != manifest.digest):
            state = "differs from that of, or was withdrawn from," if job in listed or withdrawn else "is not part of"
            raise AtollError(
                f"{artifact.folder} {state} the signed snapshot of this shared run; move it away, and get the networks "
                "of the snapshot with atoll pull"
            )
    return manifest, VerifiedFiles(artifact, manifest) if verify or trust is not None else None


def save_root(run: Path, signed: Signed[Root]) -> None:
    """Write a version of the root into a local run."""
    root = signed.content
    Artifact(run, ".").write(layout.root(root.version, root.digest), signed.to_json())


def save_snapshot(run: Path, signed: Signed[Snapshot]) -> None:
    """Write a snapshot into a local run."""
    Artifact(run, ".").write(layout.snapshot(*signed.content.order), signed.to_json())


def copy_trust(run: Path, target: Artifact, networks: Mapping[str, str], *, whole: bool) -> bool:
    """Write the root and the newest snapshot of a shared run into an export, which then states its origin.

    Return whether that was done: not if one of the networks (digests of manifests by job) is not published, or if an
    export of the `whole` model lacks one that is.
    """
    trust = local_trust(run)
    signed = local_snapshot(run, trust) if trust else None
    if trust is None or signed is None:
        return False
    published = {job: network.manifest for job, network in trust.usable(signed).items()}
    if not networks.items() <= published.items() or (whole and set(networks) != whole_model(published)):
        return False
    for root in trust.roots:
        name = layout.root(root.version, root.digest)
        target.write(name, (run / name).read_bytes())
    target.write(layout.snapshot(*signed.content.order), signed.to_json())
    return True


def whole_model(listed: Iterable[str]) -> set[str]:
    """Return the jobs of the model `experts` among those of a snapshot: all experts, and the router."""
    return {job for job in listed if layout.is_expert(job) or job == layout.ROUTER}


def signed_networks(export: Path) -> Mapping[str, Network] | None:
    """Return what the signed snapshot in an export lists, by job; None if the export carries no root."""
    trust = local_trust(export)
    return trust.usable(local_snapshot(export, trust)) if trust else None


class Seen(Content):
    """The newest root and snapshot of a run that this user has seen."""

    root: int = 0
    digest: str = ""
    snapshot: tuple[int, int] = (0, 0)


def _seen(run: str) -> tuple[Path, Seen]:
    """Return what this user has seen of a run, by the digest of version 1, and the file that has it."""
    file = config_folder() / "runs" / f"{run}.json"
    try:
        return file, Seen.model_validate_json(file.read_bytes()) if file.is_file() else Seen()
    except ValidationError as error:
        raise AtollError(
            f"{file} is damaged, which has the versions that you have seen. Move it away, and open the run with the "
            "version that its owner names: URL#sha256=FINGERPRINT@VERSION"
        ) from error


def open_chain(objects: Objects, fingerprint: str | None, source: str) -> RootChain:
    """Verify the versions of a root and remember the newest one.

    They are read back from the fingerprint, or from the newest version that this user has seen; then all that follow.
    """
    chain = RootChain.up_to(objects, fingerprint, source)
    _, seen = _seen(chain.run)
    if seen.root > chain.current.version and (seen.root, seen.digest) in objects.roots():
        later = RootChain.up_to(objects, seen.digest, source)
        chain = later if later.roots[: len(chain.roots)] == chain.roots else chain
    chain = chain.extended(objects)
    check_seen(chain)
    return chain


def check_seen(trust: RootChain, snapshot: tuple[int, int] | None = None) -> None:
    """Raise `AtollError` if this user has seen a later root or snapshot of the run; else remember these.

    `snapshot` is the order of the newest snapshot, (0, 0) if there is none; None if it was not looked for.
    """
    file, seen = _seen(trust.run)
    root, order, run = trust.current, snapshot or (0, 0), trust.run[:8]
    replaced = 0 < seen.root <= root.version and trust.roots[seen.root - 1].digest != seen.digest
    if root.version < seen.root or replaced or (snapshot is not None and order < seen.snapshot):
        raise AtollError(
            f"the store shows an older state of run {run}… than you have seen: root {root.version}, "
            f"you saw {seen.root}; snapshot {order}, you saw {seen.snapshot}. Somebody rolled it back, so nothing was "
            "read. Ask the owner, who publishes a newer version with: atoll trust RUN renew --push"
        )
    now = Seen(root=root.version, digest=root.digest, snapshot=max(order, seen.snapshot))
    if now != seen:
        file.parent.mkdir(parents=True, exist_ok=True)
        Artifact(file.parent, ".").write(file.name, to_json(now.model_dump(mode="json")))
