"""Open a source, and detect its kind if the options do not name it."""

import os
from glob import glob
from pathlib import Path

from atoll.core.errors import AtollError, unknown
from atoll.data.foreign_files import link_outside
from atoll.data.images import SUFFIXES
from atoll.data.sources.image_folder import FolderSource, entries_of, folders
from atoll.data.sources.source import KINDS, Source, SourceKind, SourceOptions
from atoll.encoders.hub import check_here, hint, is_hub_name

_EXPECTED = (
    "expected a folder of images, WebDataset tars (*.tar), parquet files (*.parquet), "
    "a Hugging Face dataset (owner/name, or its folder), or emoji"
)


def open_source(spec: str | Path, options: SourceOptions | None = None) -> Source:
    """Open a folder, tars, parquet files, a Hugging Face dataset by name or path, or the built-in `emoji`.

    Raise `AtollError` if the source does not exist or has no known kind.
    """
    spec, options = str(spec), options or SourceOptions()
    if not 0 <= options.val_fraction < 1:
        raise AtollError(f"val_fraction is {options.val_fraction}; expected a fraction from 0 to below 1")
    if options.kind is not None and options.kind not in KINDS:
        raise AtollError(unknown("kind of source", options.kind, KINDS))
    # The datasets library would prefer a local folder to a name on the hub, so the name is refused instead.
    if text := hint(spec):
        raise AtollError(text)
    kind = options.kind or find_kind(spec)
    if kind == "emoji":
        from atoll.data.sources.emoji import EmojiSource

        return EmojiSource(spec.removeprefix("emoji").removeprefix(":"), options)
    if kind == "datasets":
        from atoll.data.sources.hf import DatasetsSource

        return DatasetsSource(spec, options)
    if kind == "folder":
        if not (folder := Path(spec).expanduser()).is_dir():
            raise AtollError(f"{spec}: no such folder; {_EXPECTED}")
        return FolderSource(folder, options)
    if kind == "webdataset":
        from atoll.data.sources.webdataset import TarSource

        return TarSource(*files_of(spec, ".tar"), options)
    from atoll.data.sources.parquet import ParquetSource

    return ParquetSource(*files_of(spec, ".parquet"), options)


def find_kind(spec: str) -> SourceKind:
    """Detect the kind of a source from its name and its files."""
    if spec == "emoji" or spec.startswith("emoji:"):
        return "emoji"
    path = Path(spec).expanduser()
    if path.is_dir():
        return _kind_of_folder(path)
    if path.is_file() or any(letter in spec for letter in "*?["):
        by_suffix: dict[str, SourceKind] = {".tar": "webdataset", ".parquet": "parquet"}
        if path.suffix in by_suffix:
            return by_suffix[path.suffix]
        hint = "; unpack it first" if path.suffix in (".gz", ".tgz", ".zip") else ""
        raise AtollError(f"{spec}: not a source of a known kind{hint}; {_EXPECTED}")
    if not is_hub_name(spec):
        raise AtollError(f"{spec}: no such file or folder; {_EXPECTED}")
    check_here(spec, "For the dataset of this name on the hub, set data.kind: datasets")
    return "datasets"


def _kind_of_folder(folder: Path) -> SourceKind:
    # `save_to_disk` of the datasets library writes one of these files.
    names = {entry.name for entry in entries_of(folder)}
    if names & {"dataset_dict.json", "state.json"}:
        return "datasets"
    if any(name.endswith(".tar") for name in names):
        return "webdataset"
    found: SourceKind | None = None
    links = []
    for _, files in folders(folder):
        links += [file.name for file in files if file.is_symlink() and file.is_dir()]
        suffixes = {file.suffix.lower() for file in files}
        if suffixes & SUFFIXES:
            return "folder"
        found = found or ("webdataset" if ".tar" in suffixes else "parquet" if ".parquet" in suffixes else None)
    if found:
        return found
    skipped = f"; links out of the folder are not followed: {', '.join(links[:3])}" if links else ""
    raise AtollError(f"{folder} has no images, tars or parquet files{skipped}; {_EXPECTED}")


def files_of(spec: str, suffix: str) -> tuple[Path, list[Path]]:
    """Return the common folder and the files, by name, of a file name, a folder or a pattern."""
    path = Path(spec).expanduser()
    if path.is_file():
        return path.parent, [path]
    found = path.rglob(f"*{suffix}") if path.is_dir() else map(Path, glob(str(path), recursive=True))
    files = sorted(file for file in found if file.is_file() and not file.name.startswith("."))
    if not files:
        raise AtollError(f"{spec}: no {suffix} file found; {_EXPECTED}")
    root = path if path.is_dir() else Path(os.path.commonpath([file.parent for file in files]))
    for file in files:
        if reason := link_outside(root, file):
            raise AtollError(f"{file} is {reason}; name the file itself, or copy it")
    return root, files
