"""Moving artifacts between a run's folder and its store: files first, the manifest last.

    NAME/sha256/HASH            a file, by the hash of its content; files above 32 MB in parts HASH.0000, HASH.0001, …
    NAME/manifests/DIGEST.json  a manifest that someone uploaded; it counts only once something names it
    NAME/signatures/DIGEST.…    signatures over it
    NAME/manifest.json          the manifest that counts: created once, never replaced

Names by content make every upload harmless: the same bytes again change nothing, other bytes get other names, so what
two writers do can neither mix nor be half visible. They also make it resumable: what is there is not sent again. A
download goes into scratch files, goes on where it was cut, and takes its place after its hash was checked.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from obstore import exceptions

from atoll.core.artifacts import Artifact, Content, FileEntry, Kind, Manifest
from atoll.core.errors import AtollError, first_line
from atoll.core.layout import MANIFEST_FILE
from atoll.core.progress import progress
from atoll.core.untrusted import MAX_JSON, Refused, strict_manifest
from atoll.islands.store import ATTEMPTS, Store, pause

PART = 32 << 20
STREAMS = 6
Job = TypeVar("Job")
_SCRATCH = ".transfer"


@dataclass(frozen=True)
class Part:
    """One object of the store: a file, or a piece of a large one."""

    key: str
    offset: int
    size: int


def parts_of(name: str, entry: FileEntry) -> list[Part]:
    """The objects that a file is kept in."""
    if entry.size <= PART:
        return [Part(f"{name}/sha256/{entry.sha256}", 0, entry.size)]
    starts = range(0, entry.size, PART)
    return [
        Part(f"{name}/sha256/{entry.sha256}.{number:04d}", start, min(PART, entry.size - start))
        for number, start in enumerate(starts)
    ]


def proposal_key(name: str, digest: str) -> str:
    """Where an uploaded manifest is."""
    return f"{name}/manifests/{digest}.json"


def signature_key(name: str, digest: str, role: str) -> str:
    """Where the signature over an uploaded manifest is."""
    return f"{name}/signatures/{digest}.{role}.json"


def upload(store: Store, artifact: Artifact, manifest: Manifest, *, name: str, quiet: bool = False) -> None:
    """Bring an artifact's files and its manifest into the store under `name`; nothing counts yet."""
    jobs = [(artifact.path(file), part) for file, entry in manifest.files.items() for part in parts_of(name, entry)]
    there = {entry.key: entry.size for entry in store.entries(f"{name}/sha256")}
    missing = {part.key: (file, part) for file, part in jobs if there.get(part.key) != part.size}

    def send(job: tuple[Path, Part]) -> int:
        file, part = job
        with file.open("rb") as stream:
            stream.seek(part.offset)
            store.write(part.key, stream.read(part.size))
        return part.size

    _all(f"upload {name}", send, missing.values(), total=sum(part.size for _, part in missing.values()), quiet=quiet)
    store.write(proposal_key(name, manifest.digest), manifest.to_json())


def publish(store: Store, artifact: Artifact, manifest: Manifest) -> None:
    """Upload an artifact under its own name and commit it: the one manifest of that name, for ever."""
    upload(store, artifact, manifest, name=artifact.name)
    commit(store, artifact.name, manifest)


def commit(store: Store, name: str, manifest: Manifest) -> None:
    """Make an uploaded manifest the one that counts."""
    if not store.create(f"{name}/{MANIFEST_FILE}", manifest.to_json()):
        raise AtollError(f"{store.url}/{name} was published before with other content; nothing was changed")


def read_manifest(store: Store, name: str, digest: str | None = None) -> Manifest | None:
    """The manifest that counts, or the uploaded one with this digest; None if there is none."""
    key = f"{name}/{MANIFEST_FILE}" if digest is None else proposal_key(name, digest)
    data = store.read(key, MAX_JSON)
    if data is None:
        return None
    manifest = strict_manifest(data, f"{store.url}/{key}")
    if digest is not None and manifest.digest != digest:
        raise Refused(f"{store.url}/{key} is not the manifest that its name says")
    return manifest


def fetch(
    store: Store,
    name: str,
    manifest: Manifest,
    *,
    target: Artifact,
    only: Callable[[str], bool] = lambda _: True,
    quiet: bool = False,
) -> None:
    """Bring an artifact (or some of its files) into a run's folder; every byte is checked against the manifest."""
    wanted = {file: entry for file, entry in manifest.files.items() if only(file)}
    expected = replace(manifest, files=wanted)
    if done := target.begin(Kind(manifest.kind, Content, manifest.version), manifest.made_from):
        if done.digest != expected.digest:
            raise AtollError(f"{target.folder} is not what {store.url}/{name} has; move it away and fetch again")
        return
    missing = {file: entry for file, entry in wanted.items() if not _is_there(target.path(file), entry)}
    scratch = target.path(_SCRATCH)
    scratch.mkdir(parents=True, exist_ok=True)
    parts = {part.key: part for entry in missing.values() for part in parts_of(name, entry)}
    total = sum(part.size for part in parts.values())
    room, need = (
        shutil.disk_usage(target.folder).free,
        total + max((entry.size for entry in missing.values()), default=0),
    )
    if need > room:
        raise AtollError(f"{target.folder}: {need:,} bytes are needed to fetch {name}, {room:,} are free")
    _all(f"fetch {name}", lambda part: _receive(store, part, scratch), parts.values(), total=total, quiet=quiet)
    for file, entry in missing.items():
        _assemble(target, file, entry, pieces=[scratch / Path(part.key).name for part in parts_of(name, entry)])
    made = target.commit(manifest.content)
    if made.digest != expected.digest:
        raise AtollError(
            f"{target.folder} holds files that {store.url}/{name} does not list; delete it and fetch again"
        )


def _is_there(file: Path, entry: FileEntry) -> bool:
    if not file.is_file() or file.stat().st_size != entry.size:
        return False
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == entry.sha256


def _receive(store: Store, part: Part, scratch: Path) -> int:
    """Download one object into its scratch file, from where an earlier attempt was cut."""
    file = scratch / Path(part.key).name
    attempt, done = 0, file.stat().st_size if file.exists() else 0
    while done < part.size:
        reason = "it ends early"
        try:
            with file.open("ab") as out:
                for block in store.stream(part.key, done, part.size):
                    out.write(block)
        except FileNotFoundError as error:
            raise Refused(f"{store.url}/{part.key} is missing though a manifest lists it") from error
        except (exceptions.BaseError, OSError) as error:
            reason = first_line(error)[:200]
        now = file.stat().st_size
        attempt = 0 if now > done else attempt + 1
        if attempt == ATTEMPTS:
            raise AtollError(f"{store.url}/{part.key}: {now:,} of {part.size:,} bytes came ({reason}); try again")
        if now < part.size:
            time.sleep(pause(attempt))
        done = now
    file.touch()  # an empty file has no bytes to fetch
    return part.size


def _assemble(target: Artifact, name: str, entry: FileEntry, *, pieces: list[Path]) -> None:
    """Put the pieces together, check the hash, and only then give the file its name."""
    whole = pieces[0]
    if len(pieces) > 1:
        whole = pieces[0].with_suffix(".whole")
        with whole.open("wb") as out:
            for piece in pieces:
                with piece.open("rb") as stream:
                    shutil.copyfileobj(stream, out, 1 << 20)
                piece.unlink()
    good = _is_there(whole, entry)
    if good:
        target.path(name).parent.mkdir(parents=True, exist_ok=True)
        # Two files of an artifact may be equal: the scratch file stays until the commit sweeps it away.
        with target.writing(name) as path:
            os.link(whole, path)
        return
    for piece in {*pieces, whole}:
        piece.unlink(missing_ok=True)
    raise Refused(f"{name} is not what its manifest says (its SHA-256 differs)")


def _all(what: str, work: Callable[[Job], int], jobs: Iterable[Job], *, total: int, quiet: bool) -> None:
    """Do the jobs a few at a time; the first failure ends it. Each says how many bytes it moved."""
    with ThreadPoolExecutor(STREAMS) as pool, nullcontext() if quiet else progress(what, total, unit="bytes") as bar:
        answers = [pool.submit(work, job) for job in jobs]
        try:
            for answer in as_completed(answers):
                size = answer.result()
                if bar is not None:
                    bar.update(size)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
