"""Artifacts: a run is a folder, and the folder is the protocol between stages and islands.

An artifact is a folder of files inside a run. Its `manifest.json` is written last and only if there is none: that is
the commit. The manifest names the kind, what the artifact was made from, what it declares (the fields of its kind, see
`core/manifests.py`), and size and hash of every file.

    artifact = Artifact(run, layout.FEATURES)
    if not artifact.begin(FEATURES, {"model": "dinov2", "ingest": ingest.digest}):
        artifact.write_tensors("00000.safetensors", {...})      # each file appears whole or not at all
        artifact.commit(FeaturesContent(rows=1000, dimensions=768))
    rows = artifact.read(FEATURES).rows                         # what the next stage does

Whoever makes an artifact says what it is made from before the first file is written; a folder that was made, or half
made, from something else is refused with a message that says what changed. Names that start with a dot are scratch:
they are no part of the artifact and are gone after the commit. There is no clock and no host name in a manifest, so
on one machine the same inputs give the same bytes, and an artifact made after ten interruptions equals one made in a
single go. (Another processor, or number of threads, rounds in another order.)
"""

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from atoll.core.errors import AtollError, wrong_fields
from atoll.core.layout import MANIFEST_FILE

if TYPE_CHECKING:
    from torch import Tensor

_PLAN = ".plan.json"
_NOT_PORTABLE = {"\\", ":", "\0"}
"""Characters that separate folders, drives or streams on some system, or end a name in C."""
FORMAT = 2
"""Of manifests. 1 had its fields under other names."""
Inputs = Mapping[str, object]
"""What an artifact is made from: settings and digests by name, which every kind chooses for itself. They are compared
as JSON, so they must be plain values."""


class Content(BaseModel):
    """What an artifact of one kind declares: frozen plain values, closed to fields it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


T = TypeVar("T", bound=Content)


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A kind of artifact: its name, the fields it declares, and the version of these fields."""

    name: str
    content: type[T]
    version: int = 1

    def parse(self, manifest: "Manifest", source: object) -> T:
        """Check what a manifest of this kind declares; `source` names it in errors."""
        if (manifest.kind, manifest.version) != (self.name, self.version):
            found = f"{manifest.kind!r} in version {manifest.version}"
            raise AtollError(f"{source} holds {found}; expected {self.name!r} in version {self.version}")
        try:
            return self.content.model_validate(manifest.content)
        except ValidationError as error:
            raise AtollError(f"{source} does not declare what a {self.name} must: {wrong_fields(error)}") from error


@dataclass(frozen=True)
class FileEntry:
    """Size and hash of one file of an artifact."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What an artifact says of itself."""

    kind: str
    made_from: Mapping[str, Any]
    content: Mapping[str, Any]
    """As it is stored, so that the digest is that of the file. `Kind.parse` gives it its type."""
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    version: int = 1

    def to_json(self) -> bytes:
        """The bytes of `manifest.json`."""
        files = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in self.files.items()}
        head = {"format": FORMAT, "kind": self.kind, "version": self.version}
        return to_json({**head, "made_from": self.made_from, "content": self.content, "files": files})

    @classmethod
    def from_values(cls, value: Mapping[str, Any]) -> "Manifest":
        """Return the manifest with the values that `to_json` wrote."""
        files = {name: FileEntry(**entry) for name, entry in value["files"].items()}
        return cls(value["kind"], value["made_from"], value["content"], files, value["version"])

    @property
    def digest(self) -> str:
        """Hash of the whole artifact: its manifest holds the hash of everything else."""
        return hashlib.sha256(self.to_json()).hexdigest()


def to_json(value: object) -> bytes:
    """JSON with one spelling for one value: sorted keys, UTF-8, a newline at the end."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def sha256_of(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@dataclass(frozen=True)
class _Plan:
    """What an artifact is, or will be, made from. It is written before the first file."""

    kind: str
    version: int
    made_from: Inputs

    @classmethod
    def of(cls, kind: Kind[Any], made_from: Inputs) -> "_Plan":
        """Return the plan as it is read back from its file."""
        return cls(kind.name, kind.version, json.loads(to_json(made_from)))


@dataclass(frozen=True)
class Artifact:
    """One folder of a run, named by its path below the run."""

    run: Path
    name: str

    @property
    def folder(self) -> Path:
        """Where the artifact is."""
        return self.run / self.name

    def path(self, file: str) -> Path:
        """Return the path of one of its files; a name that leads out of the folder is refused."""
        parts = PurePosixPath(file).parts
        if not parts or parts[0] == "/" or ".." in parts or not _NOT_PORTABLE.isdisjoint(file):
            raise AtollError(f"{file!r} is not the name of a file in {self.folder}")
        return self.folder / file

    # Reading

    def manifest(self) -> Manifest | None:
        """The manifest, or None as long as the artifact is not committed."""
        file = self.path(MANIFEST_FILE)
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
            if value["format"] != FORMAT:
                raise AtollError(f"{file} has format {value['format']}; this version of Atoll reads format {FORMAT}")
            return Manifest.from_values(value)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise AtollError(f"{file} is not a manifest ({error!r}); delete {self.folder} to make it anew") from error

    def open(self, kind: Kind[Any], *, verify: bool = False) -> Manifest:
        """The manifest of a committed artifact; with `verify`, after checking the hash of every file."""
        manifest = self.manifest()
        if manifest is None:
            state = "is not finished" if self.folder.is_dir() else "is not there"
            raise AtollError(f"{self.folder} {state}; make it with: atoll prepare {self.run}")
        if manifest.kind != kind.name:
            raise AtollError(f"{self.folder} holds {manifest.kind!r}; expected {kind.name!r}")
        for name, entry in manifest.files.items():
            self._check_file(name, entry, verify)
        return manifest

    def read(self, kind: Kind[T], *, verify: bool = False) -> T:
        """Return what a committed artifact declares; with `verify`, after checking the hash of every file."""
        return kind.parse(self.open(kind, verify=verify), self.folder)

    def _check_file(self, name: str, entry: FileEntry, hashes: bool) -> None:
        file, advice = self.path(name), f"copy it again, or delete {self.folder} to make it anew"
        if not file.is_file():
            raise AtollError(f"{file} is missing though the manifest lists it; {advice}")
        if file.stat().st_size != entry.size:
            raise AtollError(f"{file} has {file.stat().st_size} bytes, the manifest says {entry.size}; {advice}")
        if hashes and sha256_of(file) != entry.sha256:
            raise AtollError(f"{file} is not what the manifest says (its SHA-256 differs); {advice}")

    def read_json(self, file: str) -> Any:
        """One of its files, as JSON."""
        return json.loads(self.path(file).read_text(encoding="utf-8"))

    # Writing

    def begin(self, kind: Kind[Any], made_from: Inputs) -> Manifest | None:
        """Say what the artifact will be made from; the manifest if it is already there, None if work remains.

        Raises `AtollError` if the folder was made, or half made, from something else.
        """
        if self.check(kind, made_from):
            self.sweep()
            return self.manifest()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._create(_PLAN, to_json(vars(_Plan.of(kind, made_from)))):
            return None
        return self.manifest() if self.check(kind, made_from) else None

    def check(self, kind: Kind[Any], made_from: Inputs) -> bool:
        """Whether the artifact is there and made from this. Raises `AtollError` if it is made from something else."""
        now = _Plan.of(kind, made_from)
        if changes := differences(vars(self._plan() or now), vars(now)):
            raise AtollError(
                f"{self.folder} is stale: {'; '.join(changes)}. Delete {self.folder}, or change the setting back"
            )
        return self.manifest() is not None

    def begun(self) -> bool:
        """Return whether somebody has said what it is, or will be, made from."""
        return self._plan() is not None

    def orphaned(self) -> bool:
        """Return whether there are files in it though nobody has said what they are made from."""
        found = not self.begun() and any(map(self._belongs, self.folder.rglob("*")))
        return found and not self.begun()  # another job may have begun it in between

    def _plan(self) -> _Plan | None:
        """What the artifact is, or will be, made from; None if nobody has begun it."""
        try:
            return _Plan(**self.read_json(_PLAN))
        except FileNotFoundError:
            done = self.manifest()
            return None if done is None else _Plan(done.kind, done.version, done.made_from)
        except (ValueError, TypeError) as error:
            raise AtollError(f"{self.path(_PLAN)} is not a plan ({error}); delete {self.folder}") from error

    @contextmanager
    def writing(self, file: str) -> Iterator[Path]:
        """A scratch path to write to; at the end it takes its place under its name, whole and on the disk."""
        target = self.path(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid4().hex}")
        try:
            yield temporary
            _flush(temporary)
            temporary.replace(target)
            _flush(target.parent)
        except FileNotFoundError:
            self._excuse()

    def _excuse(self) -> None:
        """Scratch may vanish only because another job, doing the same, committed and swept it away."""
        if self.manifest() is None:
            raise

    def write(self, file: str, data: bytes) -> None:
        """Write one file."""
        with self.writing(file) as path:
            path.write_bytes(data)

    def write_tensors(self, file: str, tensors: Mapping[str, "Tensor"]) -> None:
        """Write one safetensors file."""
        from safetensors.torch import save_file

        with self.writing(file) as path:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

    def commit(self, content: Content | Mapping[str, Any], leave: Collection[str] = ()) -> Manifest:
        """Hash every file and write the manifest. Two jobs may race for it: they must have made the same thing.

        Files to `leave` out may lie in the folder, but are no part of the artifact.
        """
        plan = self._plan()
        if plan is None:
            raise ValueError(f"{self.folder}: commit without begin")
        names = sorted(
            path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if self._belongs(path)
        )
        names = [name for name in names if name not in leave]
        files = {name: FileEntry(self.path(name).stat().st_size, sha256_of(self.path(name))) for name in names}
        plain = content.model_dump(mode="json") if isinstance(content, Content) else content
        made = Manifest(plan.kind, plan.made_from, json.loads(to_json(plain)), files, plan.version)
        for name in names:  # the manifest must not reach the disk before what it vouches for
            _flush(self.path(name))
        if not self._create(MANIFEST_FILE, made.to_json()) and (self.manifest() or made).digest != made.digest:
            raise AtollError(
                f"{self.folder} was committed by another job with other content; delete it and start again"
            )
        self.sweep()
        return made

    def _belongs(self, path: Path) -> bool:
        hidden = any(part.startswith(".") for part in path.relative_to(self.folder).parts)
        return path.is_file() and not hidden and path != self.path(MANIFEST_FILE)

    def _create(self, file: str, data: bytes) -> bool:
        """Write a file unless it exists; whether it was written. A link is made whole or not at all, unlike a write."""
        temporary = self.path(f"{'' if file.startswith('.') else '.'}{file}.{uuid4().hex}")
        try:
            temporary.write_bytes(data)
            _flush(temporary)
            os.link(temporary, self.path(file))
        except FileExistsError:
            return False
        except FileNotFoundError:
            self._excuse()
            return False
        finally:
            temporary.unlink(missing_ok=True)
        _flush(self.folder)
        return True

    def sweep(self) -> None:
        """Remove the scratch of a finished artifact, also that of jobs that were killed; a half-made one keeps it."""
        if self.manifest() is None:
            return
        for path in self.folder.glob(".*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def differences(was: Any, now: Any, key: str = "") -> list[str]:
    """What changed between two trees of settings, one phrase for each leaf."""
    if was == now:
        return []
    if isinstance(was, dict) and isinstance(now, dict):
        names = list(dict.fromkeys([*was, *now]))
        return [
            phrase
            for name in names
            for phrase in differences(
                was.get(name), now.get(name), f"{key}.{name}" if key and key != "made_from" else name
            )
        ]
    return [f"{key} was {_short(was)}, now {_short(now)}"]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    is_hash = len(text) >= 32 and all(letter in "0123456789abcdef" for letter in text)
    return f"{text[:12]}…" if is_hash else text


def _flush(path: Path) -> None:
    """Ask the disk to keep what was written, so that a name never stands for half a file after a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
