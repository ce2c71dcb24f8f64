"""Datasets of the Hugging Face datasets library, by name on the hub or as a folder of `save_to_disk`."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError, first_line
from atoll.data.sources.fields import Ids, fingerprint_of
from atoll.data.sources.parquet import Columns, image_bytes, table_image, table_rows
from atoll.data.sources.source import NONE_IGNORED, SourceImage, SourceOptions, digest
from atoll.encoders.hub import local_folder

# Rows that are listed at a time; a choice. Their images are in memory as encoded bytes, so the number is small.
_ROWS = 256


class DatasetsSource:
    """A Hugging Face dataset."""

    ignored = NONE_IGNORED

    def __init__(self, spec: str, options: SourceOptions) -> None:
        self.spec = spec
        self.options = options
        import datasets
        from huggingface_hub.constants import HF_HUB_CACHE

        folder = local_folder(spec)
        data = _load(spec, options.split, folder)
        # The folders in which its images may be files. The library extracts archives into folders named by a hash.
        cached = Path(HF_HUB_CACHE) / f"datasets--{spec.replace('/', '--')}"
        self.roots = [folder] if folder else [cached, Path(datasets.config.EXTRACTED_DATASETS_PATH)]
        self.columns = Columns.find(data.features.arrow_schema, options, spec)
        self.data = data.with_format("arrow")
        self.kind = f"datasets {Path(spec).name} ({options.split})"
        files = [Path(file["filename"]) for file in self.data.cache_files]
        parts = [fingerprint_of("datasets", file.parent, [file], options=options) for file in files]
        self.fingerprint = digest("datasets", options.split, str(len(self.data)), *parts)

    def images(self) -> Iterator[SourceImage]:
        """Yield the image of every row, in the order of the dataset."""
        ids = Ids()
        number = 0
        for batch in self.data.iter(batch_size=_ROWS):
            for values in table_rows(batch, self.columns):
                read = partial(_read_row, self.data, self.columns.image, number, roots=self.roots)
                yield table_image(values, self.columns, ids, read=read, options=self.options)
                number += 1


def _read_row(data: Any, column: str, row: int, *, roots: Sequence[Path]) -> bytes:
    return image_bytes(data[row].column(column)[0].as_py(), roots)


def _load(spec: str, split: str, folder: Path | None) -> Any:
    """Load one split of a dataset, from its folder or by name."""
    import datasets

    try:
        data = datasets.load_from_disk(str(folder)) if folder else datasets.load_dataset(spec, split=split)
    except Exception as error:  # the library checks nothing in the files of a folder, so anything may fail
        raise AtollError(
            f"{spec}: not a file or folder here, nor a dataset that could be loaded ({first_line(error)}); "
            "give a path, the name of a Hugging Face dataset, or emoji"
        ) from error
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise AtollError(f"{spec}: no split {split!r}; splits: {', '.join(data)}")
        data = data[split]
    for file in data.cache_files:
        # The folder's state.json names the files.
        if folder is not None and not Path(file["filename"]).resolve().is_relative_to(folder.resolve()):
            raise AtollError(f"{spec}: its state.json names the file {file['filename']}, which is outside the folder")
    return data
