"""Upload and download of artifacts: files first, the manifest last.

    NAME/sha256/HASH            a file, named by the hash of its content; above 32 MB in parts HASH.0000, HASH.0001, …
    NAME/manifests/DIGEST.json  a manifest; it counts only if root, snapshot or a lease record names its digest
    NAME/signatures/DIGEST.json the signature of its author

Content addressing makes concurrent uploads safe: equal bytes have equal names, and other bytes have other names, so two
writers cannot mix their files. It also makes uploads resumable: objects that exist are not sent again. A download is
written to scratch files, resumes after an interruption, and is moved to its final name after its hash was verified.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from obstore import exceptions

from atoll.apps.share.store import ATTEMPTS, Store, backoff
from atoll.core.artifacts import Artifact, ArtifactKind, Content, FileEntry, Manifest, sha256_of
from atoll.core.errors import AtollError, first_line
from atoll.core.progress import progress
from atoll.verify.untrusted import MAX_JSON, Refused, strict_manifest

# An interrupted upload is repeated part by part: 32 MB take seconds on a fast line and five minutes at 1 Mbit/s.
PART_BYTES = 32 << 20
"""Size of the parts of large files, in bytes."""
# An order of magnitude: a few connections fill a line that one alone does not. Each upload holds one part in memory.
PARALLEL_TRANSFERS = 6
"""Number of objects that are sent or received in parallel."""
_Item = TypeVar("_Item")
_SCRATCH = ".transfer"


@dataclass(frozen=True)
class ObjectPart:
    """One object of the store: a file, or a part of a large one."""

    key: str
    offset: int
    size: int


def parts_of(name: str, entry: FileEntry) -> list[ObjectPart]:
    """Return the objects that hold a file."""
    if entry.size <= PART_BYTES:
        return [ObjectPart(f"{name}/sha256/{entry.sha256}", 0, entry.size)]
    starts = range(0, entry.size, PART_BYTES)
    return [
        ObjectPart(f"{name}/sha256/{entry.sha256}.{number:04d}", start, min(PART_BYTES, entry.size - start))
        for number, start in enumerate(starts)
    ]


def uploaded_manifest_key(name: str, digest: str) -> str:
    """Return the key of an uploaded manifest."""
    return f"{name}/manifests/{digest}.json"


def is_uploaded(key: str) -> bool:
    """Return whether a key is one of an uploaded artifact, which the folder of a local run does not have."""
    return key.split("/")[-2:-1] in (["sha256"], ["manifests"])


def signature_key(name: str, digest: str) -> str:
    """Return the key of the signature over an uploaded manifest."""
    return f"{name}/signatures/{digest}.json"


def upload(store: Store, artifact: Artifact, manifest: Manifest, *, name: str, quiet: bool = False) -> None:
    """Upload the files of an artifact, then its manifest, under `name`."""
    tasks = [(artifact.path(file), part) for file, entry in manifest.files.items() for part in parts_of(name, entry)]
    stored = {entry.key: entry.size for entry in store.entries(f"{name}/sha256")}
    missing = {part.key: (file, part) for file, part in tasks if stored.get(part.key) != part.size}

    def send(task: tuple[Path, ObjectPart]) -> int:
        file, part = task
        with file.open("rb") as stream:
            stream.seek(part.offset)
            store.write(part.key, stream.read(part.size))
        return part.size

    _run_parallel(
        f"upload {name}", send, missing.values(), total=sum(part.size for _, part in missing.values()), quiet=quiet
    )
    store.write(uploaded_manifest_key(name, manifest.digest), manifest.to_json())


def read_manifest(store: Store, name: str, digest: str) -> Manifest:
    """Return the uploaded manifest with this digest; raise `Refused` if it is missing or another one."""
    key = uploaded_manifest_key(name, digest)
    data = store.read(key, MAX_JSON)
    if data is None:
        raise Refused(f"{store.url} has no manifest of {name}")
    manifest = strict_manifest(data, f"{store.url}/{key}")
    if manifest.digest != digest:
        raise Refused(f"{store.url}/{key} does not match the digest in its name")
    return manifest


def fetch(store: Store, name: str, manifest: Manifest, *, target: Artifact, quiet: bool = False) -> None:
    """Download an artifact into the folder of a run, and verify every byte against the manifest."""
    if done := target.begin(ArtifactKind(manifest.kind, Content, manifest.version), manifest.made_from):
        if done.digest != manifest.digest:
            raise AtollError(f"{target.folder} differs from {store.url}/{name}; move it away and download it again")
        return
    missing = {file: entry for file, entry in manifest.files.items() if not _matches(target.path(file), entry)}
    scratch = target.path(_SCRATCH)
    scratch.mkdir(parents=True, exist_ok=True)
    # Two files may be equal. Their sizes are looked at before their parts are listed, which may be many.
    total = sum({entry.sha256: entry.size for entry in missing.values()}.values())
    # All parts, plus the largest file: its parts are deleted only while it is put together.
    free = shutil.disk_usage(target.folder).free
    needed = total + max((entry.size for entry in missing.values()), default=0)
    if needed > free:
        raise AtollError(f"{target.folder}: {needed:,} bytes are needed to download {name}, {free:,} are free")
    parts = {part.key: part for entry in missing.values() for part in parts_of(name, entry)}
    _run_parallel(
        f"fetch {name}", lambda part: _receive(store, part, scratch), parts.values(), total=total, quiet=quiet
    )
    for file, entry in missing.items():
        _assemble(target, file, entry, pieces=[scratch / Path(part.key).name for part in parts_of(name, entry)])
    made = target.commit(manifest.content)
    if made.digest != manifest.digest:
        raise AtollError(
            f"{target.folder} holds files that {store.url}/{name} does not list; delete it and download it again"
        )


def _matches(file: Path, entry: FileEntry) -> bool:
    return file.is_file() and file.stat().st_size == entry.size and sha256_of(file) == entry.sha256


def _receive(store: Store, part: ObjectPart, scratch: Path) -> int:
    """Download one object into its scratch file, resuming an interrupted attempt."""
    file = scratch / Path(part.key).name
    attempt, done = 0, file.stat().st_size if file.exists() else 0
    while done < part.size:
        reason = "the object ends early"
        try:
            with file.open("ab") as out:
                for block in store.stream(part.key, done, part.size):
                    out.write(block)
        except FileNotFoundError as error:
            raise Refused(f"{store.url}/{part.key} is missing though a manifest lists it") from error
        except (exceptions.BaseError, OSError) as error:
            reason = first_line(error)[:200]
        now = file.stat().st_size
        attempt = 0 if now > done else attempt + 1  # only attempts without progress count
        if attempt == ATTEMPTS:
            raise AtollError(f"{store.url}/{part.key}: received {now:,} of {part.size:,} bytes ({reason}); try again")
        if now < part.size:
            time.sleep(backoff(attempt))
        done = now
    file.touch()  # an empty object has no bytes to download, but the file must exist
    return part.size


def _assemble(target: Artifact, name: str, entry: FileEntry, *, pieces: list[Path]) -> None:
    """Join the parts of a file, verify its hash, and only then give it its final name."""
    whole = pieces[0]
    if len(pieces) > 1:
        whole = pieces[0].with_suffix(".whole")
        with whole.open("wb") as out:
            for piece in pieces:
                with piece.open("rb") as stream:
                    shutil.copyfileobj(stream, out, 1 << 20)
                piece.unlink()
    good = _matches(whole, entry)
    if good:
        target.path(name).parent.mkdir(parents=True, exist_ok=True)
        # Two files of an artifact may be equal and share a scratch file. So it is linked, not moved; the commit of the
        # artifact removes the scratch folder.
        with target.writing(name) as path:
            os.link(whole, path)
        return
    for piece in {*pieces, whole}:
        piece.unlink(missing_ok=True)
    raise Refused(f"{name} does not match its manifest (its SHA-256 differs)")


def _run_parallel(what: str, work: Callable[[_Item], int], tasks: Iterable[_Item], *, total: int, quiet: bool) -> None:
    """Run tasks in parallel and stop at the first failure. Each task returns the bytes that it moved."""
    with (
        ThreadPoolExecutor(PARALLEL_TRANSFERS) as pool,
        nullcontext() if quiet else progress(what, total, unit="bytes") as bar,
    ):
        futures = [pool.submit(work, task) for task in tasks]
        try:
            for future in as_completed(futures):
                size = future.result()
                if bar is not None:
                    bar.update(size)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
