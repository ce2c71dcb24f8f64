"""Artifacts: folders of files with a manifest, through which stages, jobs and islands exchange their results.

An artifact is a folder inside a run. Its `manifest.json` is written last, and only if there is none yet: that is the
commit. The manifest holds the kind, the inputs that the artifact was made from, its declared content (the fields of
its kind, see `core/manifests.py`), and the size and SHA-256 of every file.

    artifact = Artifact(run, layout.FEATURES)
    if not artifact.begin(FEATURES, {"model": "dinov2", "ingest": ingest.digest}):
        artifact.write_tensors("00000.safetensors", {...})      # each file appears complete or not at all
        artifact.commit(FeaturesContent(rows=1000, dimensions=768))
    rows = artifact.read(FEATURES).rows                         # the next stage reads it

The inputs are written as a plan before the first file. If the folder was made, or half made, from other inputs, the
error message lists what changed. Names that start with a dot are scratch files: they do not belong to the artifact, and
the commit removes them.

A manifest contains no time and no host name. So on one machine equal inputs give equal bytes, and an artifact made
with ten interruptions equals one made without. (Another processor or number of threads rounds in another order.)
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from atoll.core import disk
from atoll.core.errors import AtollError, wrong_fields
from atoll.core.layout import MANIFEST_FILE

if TYPE_CHECKING:
    from torch import Tensor

_PLAN = ".plan.json"
_NOT_PORTABLE = {"\\", ":", "\0"}
"""Characters that separate folders, drives or streams on some operating system, or end a string in C."""
FORMAT = 1
"""Format of manifest.json."""
Inputs = Mapping[str, object]
"""What an artifact is made from: settings and digests by name; each kind has other names. They are compared as JSON,
so they must be plain values."""


class Content(BaseModel):
    """The declared content of one kind of artifact: frozen plain values; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


T = TypeVar("T", bound=Content)


@dataclass(frozen=True)
class ArtifactKind(Generic[T]):
    """A kind of artifact: its name, the type of its declared content, and the version of that type."""

    name: str
    content: type[T]
    version: int = 1

    def parse(self, manifest: "Manifest", source: object) -> T:
        """Return the checked content of a manifest of this kind; `source` names the manifest in errors."""
        if (manifest.kind, manifest.version) != (self.name, self.version):
            found = f"{manifest.kind!r} version {manifest.version}"
            raise AtollError(f"{source} is an artifact of kind {found}; expected {self.name!r} version {self.version}")
        try:
            return self.content.model_validate(manifest.content)
        except ValidationError as error:
            raise AtollError(f"{source}: wrong content for the kind {self.name!r}: {wrong_fields(error)}") from error


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 of one file of an artifact."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of an artifact's manifest.json."""

    kind: str
    made_from: Mapping[str, Any]
    content: Mapping[str, Any]
    """Untyped, as stored, so that the digest is the digest of the file. `ArtifactKind.parse` returns it typed."""
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    version: int = 1

    def to_json(self) -> bytes:
        """Return the bytes of `manifest.json`."""
        files = {name: asdict(entry) for name, entry in self.files.items()}
        return to_json({"format": FORMAT, **vars(self), "files": files})

    @classmethod
    def from_values(cls, value: Mapping[str, Any]) -> "Manifest":
        """Return the manifest with the values that `to_json` wrote."""
        files = {name: FileEntry(**entry) for name, entry in value["files"].items()}
        return cls(value["kind"], value["made_from"], value["content"], files, value["version"])

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest. It identifies the whole artifact, since the manifest holds every file's hash."""
        return hashlib.sha256(self.to_json()).hexdigest()


def to_json(value: object) -> bytes:
    """Return canonical JSON, so that equal values give equal bytes: sorted keys, UTF-8, a newline at the end."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def differences(was: Any, now: Any, key: str = "") -> list[str]:
    """Return what changed between two nested settings, one phrase for each leaf."""
    if was == now:
        return []
    if isinstance(was, dict) and isinstance(now, dict):
        below = f"{key}." if key and key != "made_from" else ""
        names = dict.fromkeys([*was, *now])
        return [text for name in names for text in differences(was.get(name), now.get(name), f"{below}{name}")]
    short = []
    for value in (was, now):
        text = value if isinstance(value, str) else json.dumps(value)
        # Twelve digits distinguish the hashes of one run, as in git's abbreviated commits.
        short.append(re.sub("^([0-9a-f]{12})[0-9a-f]{20,}$", r"\1…", text))
    return [f"{key} was {short[0]}, now {short[1]}"]


@dataclass(frozen=True)
class _Plan:
    """Kind and inputs of an artifact. The plan is written before the first file."""

    kind: str
    version: int
    made_from: Inputs

    @classmethod
    def of(cls, kind: ArtifactKind[Any], made_from: Inputs) -> "_Plan":
        """Return the plan as it would be read back from its file: tuples are lists, for example."""
        return cls(kind.name, kind.version, json.loads(to_json(made_from)))


@dataclass(frozen=True)
class Artifact:
    """One artifact of a run, named by the path of its folder below the run."""

    run: Path
    name: str

    @property
    def folder(self) -> Path:
        """Path of the artifact's folder."""
        return self.run / self.name

    def path(self, file: str) -> Path:
        """Return the path of one of its files. Raise `AtollError` for a name that leads out of the folder."""
        parts = PurePosixPath(file).parts
        if not parts or parts[0] == "/" or ".." in parts or not _NOT_PORTABLE.isdisjoint(file):
            raise AtollError(f"{file!r} is not the name of a file in {self.folder}")
        return self.folder / file

    # Reading

    def manifest(self) -> Manifest | None:
        """Return the manifest, or None as long as the artifact is not committed."""
        file = self.path(MANIFEST_FILE)
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
            if value["format"] != FORMAT:
                raise AtollError(f"{file} has format {value['format']}; this version of Atoll reads format {FORMAT}")
            return Manifest.from_values(value)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise AtollError(f"{file} is not a manifest ({error!r}); delete {self.folder} to make it again") from error

    def open(self, kind: ArtifactKind[Any], *, verify: bool = False) -> Manifest:
        """Return the manifest of a committed artifact, after checking the size of every file.

        With `verify`, check the SHA-256 of every file too.
        """
        manifest = self.manifest()
        if manifest is None:
            state = "is not finished" if self.folder.is_dir() else "does not exist"
            raise AtollError(f"{self.folder} {state}; make it with: atoll prepare {self.run}")
        if manifest.kind != kind.name:
            raise AtollError(f"{self.folder} is an artifact of kind {manifest.kind!r}; expected {kind.name!r}")
        for name, entry in manifest.files.items():
            self._check_file(name, entry, verify)
        return manifest

    def read(self, kind: ArtifactKind[T], *, verify: bool = False) -> T:
        """Return the declared content of a committed artifact; `verify` as in `open`."""
        return kind.parse(self.open(kind, verify=verify), self.folder)

    def _check_file(self, name: str, entry: FileEntry, hashes: bool) -> None:
        file, advice = self.path(name), f"copy it again, or delete {self.folder} to make it again"
        if not file.is_file():
            raise AtollError(f"{file} is missing although the manifest lists it; {advice}")
        if file.stat().st_size != entry.size:
            raise AtollError(f"{file} has {file.stat().st_size} bytes, but the manifest lists {entry.size}; {advice}")
        if hashes and sha256_of(file) != entry.sha256:
            raise AtollError(f"{file} does not match the manifest: its SHA-256 differs; {advice}")

    def read_json(self, file: str) -> Any:
        """Return the content of one of its JSON files."""
        return json.loads(self.path(file).read_text(encoding="utf-8"))

    # Writing

    def begin(self, kind: ArtifactKind[Any], made_from: Inputs) -> Manifest | None:
        """Write the plan. Return the manifest if the artifact is committed already, or None if work remains.

        Raise `AtollError` if the folder was made, or half made, from other inputs.
        """
        if self.check(kind, made_from):
            self.sweep()
            return self.manifest()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.create(_PLAN, to_json(vars(_Plan.of(kind, made_from)))):
            return None
        # Another job wrote a plan since the check above: compare with that one.
        return self.manifest() if self.check(kind, made_from) else None

    def check(self, kind: ArtifactKind[Any], made_from: Inputs) -> bool:
        """Return whether the artifact is committed. Raise `AtollError` if it is made from other inputs."""
        now = _Plan.of(kind, made_from)
        if changes := differences(vars(self._plan() or now), vars(now)):
            raise AtollError(
                f"{self.folder} is stale: {'; '.join(changes)}. A run keeps the settings that its results were made "
                "with: change this one back, or use another run folder"
            )
        return self.manifest() is not None

    def outdated(self, kind: ArtifactKind[Any], made_from: Inputs, follows: Collection[str]) -> bool:
        """Return whether inputs changed, only those that its stage may follow: it is remade instead of refused."""
        was, now = self._plan(), _Plan.of(kind, made_from)
        if was is None or (was.kind, was.version) != (now.kind, now.version):
            return False
        names = was.made_from.keys() | now.made_from.keys()
        changed = {name for name in names if was.made_from.get(name) != now.made_from.get(name)}
        return bool(changed) and changed <= set(follows)

    def restart(self, kind: ArtifactKind[Any], made_from: Inputs, keep: Callable[[Path], bool]) -> None:
        """Begin again with other inputs. Only the files that `keep` accepts stay."""
        # The folder has a plan at every moment: the old one until all other files are removed.
        if was := self._plan():
            self.write(_PLAN, to_json(vars(was)))
        self.path(MANIFEST_FILE).unlink(missing_ok=True)
        for path in self.folder.rglob("*"):
            if path.is_file() and path.name != _PLAN and not keep(path):
                path.unlink(missing_ok=True)
        self.write(_PLAN, to_json(vars(_Plan.of(kind, made_from))))

    def begun(self) -> bool:
        """Return whether the artifact has a plan or a manifest."""
        return self._plan() is not None

    def orphaned(self) -> bool:
        """Return whether the folder has files but neither a plan nor a manifest."""
        found = not self.begun() and any(map(self._belongs, self.folder.rglob("*")))
        # Another job may have written the plan and its first file between the two conditions above.
        return found and not self.begun()

    def _plan(self) -> _Plan | None:
        """Return the plan, from its file or from the manifest; None if there is neither."""
        try:
            return _Plan(**self.read_json(_PLAN))
        except FileNotFoundError:
            done = self.manifest()
            return None if done is None else _Plan(done.kind, done.version, done.made_from)
        except (ValueError, TypeError) as error:
            raise AtollError(f"{self.path(_PLAN)} is not a plan ({error}); delete {self.folder}") from error

    @contextmanager
    def writing(self, file: str, size: int | None = None) -> Iterator[Path]:
        """Yield a temporary path to write to; at the end, flush the file to disk and rename it to `file`.

        `size` is the number of bytes, for the error of a full disk.
        """
        target = self.path(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid4().hex}")
        try:
            with disk.explained(target, size, temporary=temporary):
                yield temporary
                _flush(temporary)
                temporary.replace(target)
                _flush(target.parent)
        except FileNotFoundError:
            # Scratch files may disappear for one reason: another job committed the same artifact and removed them.
            if self.manifest() is None:
                raise

    def write(self, file: str, data: bytes) -> None:
        """Write one file of bytes."""
        with self.writing(file, len(data)) as path:
            path.write_bytes(data)

    def write_tensors(self, file: str, tensors: Mapping[str, "Tensor"]) -> None:
        """Write one safetensors file."""
        from safetensors.torch import save_file

        with self.writing(file, sum(tensor.nbytes for tensor in tensors.values())) as path:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

    def write_parts(self, file: str, parts: Sequence[bytes | memoryview]) -> FileEntry:
        """Write one file part by part, and hash it meanwhile; return its entry for `commit`."""
        digest, size = hashlib.sha256(), 0
        with self.writing(file, sum(map(len, parts))) as path, path.open("wb") as stream:
            for part in parts:
                # Both release the GIL while they work on a large part, so other threads run.
                digest.update(part)
                size += stream.write(part)
        return FileEntry(size, digest.hexdigest())

    def commit(
        self,
        content: Content | Mapping[str, Any],
        exclude: Collection[str] = (),
        *,
        hashed: Mapping[str, FileEntry] | None = None,
    ) -> Manifest:
        """Hash every file and write the manifest.

        Two jobs may make the same artifact at the same time. The first one to write the manifest commits it; the
        other one checks that its manifest would be the same. Files in `exclude` may be in the folder, but do not
        belong to the artifact. Files in `hashed` were hashed while they were written, and are not read again.
        """
        plan = self._plan()
        if plan is None:
            raise ValueError(f"{self.folder}: commit without begin")
        known = hashed or {}
        found = {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if self._belongs(path)}
        names = sorted((found | known.keys()) - set(exclude))
        files = {
            name: known.get(name) or FileEntry(self.path(name).stat().st_size, sha256_of(self.path(name)))
            for name in names
        }
        plain = content.model_dump(mode="json") if isinstance(content, Content) else content
        made = Manifest(plan.kind, plan.made_from, json.loads(to_json(plain)), files, plan.version)
        # The manifest must not reach the disk before the files whose hashes it lists.
        for name in names:
            _flush(self.path(name))
        if not self.create(MANIFEST_FILE, made.to_json()) and (first := self.manifest() or made).digest != made.digest:
            for name, entry in first.files.items():
                self._check_file(name, entry, hashes=True)  # this job may have replaced some of them
            raise AtollError(f"{self.folder} was committed by another job with other content, which is complete")
        self.sweep()
        return made

    def _belongs(self, path: Path) -> bool:
        hidden = any(part.startswith(".") for part in path.relative_to(self.folder).parts)
        return path.is_file() and not hidden and path != self.path(MANIFEST_FILE)

    def create(self, file: str, data: bytes) -> bool:
        """Write a file unless it exists. Return whether it was written."""
        # A hard link is created atomically, with the full content, and fails if the name exists. A rename would
        # replace the file of another job, and open(…, "x") would show a half-written file to readers.
        temporary = self.path(f"{'' if file.startswith('.') else '.'}{file}.{uuid4().hex}")
        try:
            with disk.explained(self.path(file), len(data), temporary=temporary):
                temporary.write_bytes(data)
                _flush(temporary)
                os.link(temporary, self.path(file))
        except FileExistsError:
            return False
        except FileNotFoundError:
            if self.manifest() is None:  # as in `writing`
                raise
            return False
        finally:
            temporary.unlink(missing_ok=True)
        _flush(self.folder)
        return True

    def sweep(self) -> None:
        """Remove the scratch files of a committed artifact, including those of killed jobs."""
        # Before the commit, scratch files hold the plan and finished parts, from which an interrupted job resumes.
        if self.manifest() is None:
            return
        for path in self.folder.glob(".*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Flush a file or folder to disk, so that no name refers to a half-written file after a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
