"""The root and snapshot of a local copy of a shared run, and what this user has seen of shared runs.

A local run that was never shared has no root, and needs no signatures.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from atoll.core import layout
from atoll.core.artifacts import Artifact, ArtifactKind, Content, Manifest, to_json
from atoll.core.errors import AtollError
from atoll.verify.signing import config_folder
from atoll.verify.trust import MAX_BYTES, Network, Root, RootChain, Signed, Snapshot
from atoll.verify.verified_files import VerifiedFiles


def files_below(run: Path, folder: str) -> dict[str, bytes]:
    """Return the roots or snapshots of a local run, by file name."""
    files = sorted((run / folder).glob("[0-9]*.json"))
    return {str(file): file.read_bytes() for file in files if file.stat().st_size <= MAX_BYTES}


def local_trust(run: Path) -> RootChain | None:
    """Return the root of a local copy of a shared run; None if the run was never shared."""
    files = files_below(run, layout.ROOTS)
    return _verified_chain(tuple(files.items()), str(run)) if files else None


# The result depends on the bytes alone, and a model with many networks asks for it once per network.
@lru_cache(maxsize=4)
def _verified_chain(files: tuple[tuple[str, bytes], ...], source: str) -> RootChain:
    return RootChain.of(dict(files), None, source)


def local_snapshot(run: Path, trust: RootChain) -> Signed[Snapshot] | None:
    """Return the newest snapshot of a local copy of a shared run."""
    return trust.newest_snapshot(files_below(run, layout.SNAPSHOTS))


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
        listed = signed.content.networks if signed else {}
        usable = trust.usable(signed.content) if signed else {}
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


def copy_trust(run: Path, target: Artifact, networks: Mapping[str, str]) -> bool:
    """Write the root and the newest snapshot of a shared run into an export, which then states its origin.

    Return whether that was done: not if one of the networks (digests of manifests by job) is not published.
    """
    trust = local_trust(run)
    signed = local_snapshot(run, trust) if trust else None
    if trust is None or signed is None:
        return False
    usable = trust.usable(signed.content)
    if any(job not in usable or usable[job].manifest != digest for job, digest in networks.items()):
        return False
    for name, data in files_below(run, layout.ROOTS).items():
        target.write(f"{layout.ROOTS}/{Path(name).name}", data)
    target.write(layout.snapshot(*signed.content.order), signed.to_json())
    return True


def signed_network(export: Path, job: str) -> Network | None:
    """Return what the snapshot in an export lists for a network; None if the export carries no root."""
    trust = local_trust(export)
    if trust is None:
        return None
    signed = local_snapshot(export, trust)
    listed = trust.usable(signed.content) if signed else {}
    if job not in listed:
        raise AtollError(f"{export}: the signed snapshot in this export does not list {job}; copy or export it again")
    return listed[job]


class Seen(Content):
    """The newest root and snapshot of a run that this user has seen."""

    root: int = 0
    digest: str = ""
    snapshot: tuple[int, int] = (0, 0)


def check_seen(trust: RootChain, snapshot: tuple[int, int] | None = None) -> None:
    """Raise `AtollError` if this user has seen a later root or snapshot of the run; else remember these.

    `snapshot` is the order of the newest snapshot, (0, 0) if there is none; None if it was not looked for.
    """
    file = config_folder() / "runs" / f"{trust.run}.json"
    try:
        seen = Seen.model_validate_json(file.read_bytes()) if file.is_file() else Seen()
    except ValidationError as error:
        raise AtollError(f"{file} is damaged; delete it if you trust the current state of the run") from error
    root, order = trust.current, snapshot or (0, 0)
    replaced = 0 < seen.root <= root.version and trust.roots[seen.root - 1].digest != seen.digest
    if root.version < seen.root or replaced or (snapshot is not None and order < seen.snapshot):
        raise AtollError(
            f"the store shows an older state of run {trust.run[:8]}… than you have seen (root {root.version}, you saw "
            f"{seen.root}; snapshot {order}, you saw {seen.snapshot}): somebody rolled it back. If the owner confirms "
            f"that, delete {file}"
        )
    now = Seen(root=root.version, digest=root.digest, snapshot=max(order, seen.snapshot))
    if now != seen:
        file.parent.mkdir(parents=True, exist_ok=True)
        Artifact(file.parent, ".").write(file.name, to_json(now.model_dump(mode="json")))
