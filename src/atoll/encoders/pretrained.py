"""Pretrained networks: find or download their files, hash them, load them without running foreign code, run them."""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from atoll.core.artifacts import sha256_of
from atoll.core.errors import AtollError, first_line
from atoll.core.progress import say
from atoll.encoders.hub import hint, local_folder
from atoll.verify.untrusted import Foreign

T = TypeVar("T")
Pixels = np.ndarray[Any, np.dtype[np.uint8]]
"""Images (N, height, width, 3)."""

# Configuration, weights, vocabularies and SentencePiece models. Pickled weights and Python code are never downloaded.
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model"]
# Vocabularies that some tokenizers read. They are not downloaded either.
_NOT_COVERED = frozenset({".spm", ".bpe", ".vocab", ".tiktoken"})


def model_folder(name: str, patterns: Sequence[str] = _PATTERNS) -> Path:
    """Return the folder of a network: a local one, or one downloaded by its name from the Hugging Face hub.

    `owner/name` is always a name on the hub; a local folder needs `./`, `/` or `~`.
    """
    if local := local_folder(name):
        return _checked(local)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    advice = hint(name)
    if advice:
        say(f"note: {advice}", file=sys.stderr)
    try:
        return _checked(Path(snapshot_download(name, allow_patterns=list(patterns))))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise AtollError(
            f"{name!r} is not a folder, and could not be downloaded from the hub ({first_line(error)}); "
            f"{advice or 'give a folder with config.json and *.safetensors'}"
        ) from error


def _checked(folder: Path) -> Path:
    """Return a folder unless loading it would read files that its fingerprint does not cover."""
    for file in folder.rglob("*"):
        if file.suffix in _NOT_COVERED and file.is_file():
            raise AtollError(f"{file} would be loaded, but is not part of the folder's fingerprint; remove it")
        if file.name.endswith(".index.json") and file.is_file():
            for shard in _Shards.read(file).weight_map.values():
                if "/" in shard or "\\" in shard:
                    raise AtollError(f"{file} names the file {shard[:200]!r}, which is not beside it")
    return folder


class _Shards(Foreign):
    """The index of weights that are divided into several files."""

    weight_map: dict[str, str] = Field(default_factory=dict)


def check_weights(what: str, name: str, *, recorded: str | None, found: str | None) -> None:
    """Raise AtollError if an encoder is not the one that a manifest records."""
    if recorded is not None and recorded != found:
        raise AtollError(
            f"the {what} {name} has the fingerprint {found}, but these networks were trained with {recorded}; "
            "use the files of that time, or prepare and train again"
        )


def load_pretrained(kind: Any, folder: Path, **options: Any) -> Any:
    """Load a transformers model, configuration or tokenizer from a folder, without running code of that folder."""
    try:
        # Without the argument, transformers prompts on the terminal for permission to run the folder's code.
        return kind.from_pretrained(folder, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise AtollError(
                f"{folder} needs custom Python code, which Atoll never runs; give a model whose class is part of "
                "transformers"
            ) from error
        raise


@cache
def fingerprint(path: Path, parts: tuple[str, ...] = ("",)) -> str:
    """Return the SHA-256 of a network: of its file, or of all files in these parts of its folder that can be loaded."""
    if path.is_file():
        return sha256_of(path)
    files = covered_files(path, parts)
    if not any(file.suffix == ".safetensors" for file in files):
        raise AtollError(f"{path} has no *.safetensors file; convert the weights, since Atoll reads no other format")
    return fingerprint_of({file.relative_to(path).as_posix(): sha256_of(file) for file in files})


def covered_files(path: Path, parts: tuple[str, ...] = ("",)) -> list[Path]:
    """Return the files in these parts of a folder that can be loaded: those that its fingerprint covers."""
    return sorted({file for part in parts for pattern in _PATTERNS for file in (path / part).rglob(pattern)})


def fingerprint_of(hashes: Mapping[str, str]) -> str:
    """Return the fingerprint of a folder whose files have these SHA-256 hashes."""
    state = hashlib.sha256()
    for name in sorted(hashes, key=PurePosixPath):
        state.update(f"{name} {hashes[name]}\n".encode())
    return state.hexdigest()


@contextmanager
def deterministic_inference() -> Iterator[None]:
    """Disable gradients and the choice of cuDNN kernels by timing, so that equal batches give equal bytes."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


# Four images of 224 pixels a side. With more, the maps of EfficientNet-Lite0 leave the caches of the processor: on one
# core of an AMD EPYC an image took 15 ms in parts of 2 or 4 images, 21 ms in parts of 8 and 27 ms in a batch of 32.
_PART_PIXELS = 4 * 224 * 224


def encode_images(encode: Callable[[Tensor], T], x: Tensor) -> list[T]:
    """Apply a frozen network to images (N, C, H, W); return its outputs for consecutive parts of the batch.

    An accelerator takes the batch as a whole. On a CPU, a part has few images and each core works on its own parts:
    this is faster than all cores in every operation of the whole batch, and needs less memory. The parts do not depend
    on the number of cores, so neither do the results of a batch of several parts.
    """
    size = max(1, _PART_PIXELS // (x.shape[-2] * x.shape[-1]))
    with deterministic_inference():
        if x.device.type != "cpu" or len(x) <= size:
            return [encode(x)]
    threads = torch.get_num_threads()

    def encode_part(part: Tensor) -> T:
        with torch.inference_mode():  # a property of the thread
            return encode(part)

    try:
        return list(_core_pool(threads).map(encode_part, torch.split(x, size)))
    finally:
        # The threads of the pool have set the default of threads that start later.
        torch.set_num_threads(threads)


@cache
def _core_pool(threads: int) -> ThreadPoolExecutor:
    """Return threads whose torch operations use one core each."""
    return ThreadPoolExecutor(threads, "encode", initializer=torch.set_num_threads, initargs=(1,))
