"""Pretrained networks: find or download their files, hash them, load them without running foreign code."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from atoll.core.artifacts import sha256_of
from atoll.core.errors import AtollError, first_line

# Configuration, weights, vocabularies and SentencePiece models. Pickled weights and Python code are never downloaded.
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model"]


def model_folder(name: str, patterns: Sequence[str] = _PATTERNS) -> Path:
    """Return the folder of a network: a local one, or one downloaded by its name from the Hugging Face hub."""
    local = Path(name).expanduser()
    if local.is_dir():
        return local
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise AtollError(
            f"{name!r} is not a folder, and could not be downloaded from the hub ({first_line(error)}); give a folder "
            "with config.json and *.safetensors"
        ) from error


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
def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a network: of its file, or of all files in its folder that `_PATTERNS` match."""
    if path.is_file():
        return sha256_of(path)
    files = sorted({file for pattern in _PATTERNS for file in path.rglob(pattern)})
    if not any(file.suffix == ".safetensors" for file in files):
        raise AtollError(f"{path} has no *.safetensors file; convert the weights, since Atoll reads no other format")
    state = hashlib.sha256()
    for file in files:
        state.update(f"{file.relative_to(path).as_posix()} {sha256_of(file)}\n".encode())
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
