"""Other people's networks: where their files are, what identifies them, where they run."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from atoll.errors import AtollError, first_line
from atoll.run import sha256_of

_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model"]


def folder_of(name: str, patterns: Sequence[str] = _PATTERNS) -> Path:
    """The folder of a network: a local one, or one fetched by its name from the Hugging Face hub."""
    local = Path(name).expanduser()
    if local.is_dir():
        return local
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise AtollError(
            f"{name!r} is neither a folder nor a model that could be fetched ({first_line(error)}); give a folder that "
            "holds config.json and *.safetensors"
        ) from error


def load_pretrained(kind: Any, folder: Path, **options: Any) -> Any:
    """Load a model, configuration or tokenizer of transformers from its folder, without running code from there."""
    try:
        # Without the argument, transformers asks on the terminal whether it may run the folder's code.
        return kind.from_pretrained(folder, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise AtollError(
                f"{folder} needs Python code of its own, which Atoll never runs; give a model whose class is part of "
                "transformers"
            ) from error
        raise


@cache
def fingerprint(path: Path) -> str:
    """Hash of a network: of its one file, or of every file in its folder that says what it computes."""
    if path.is_file():
        return sha256_of(path)
    files = sorted({file for pattern in _PATTERNS for file in path.rglob(pattern)})
    if not any(file.suffix == ".safetensors" for file in files):
        raise AtollError(f"{path} has no *.safetensors file; Atoll reads no other weights")
    state = hashlib.sha256()
    for file in files:
        state.update(f"{file.relative_to(path).as_posix()} {sha256_of(file)}\n".encode())
    return state.hexdigest()


def device() -> torch.device:
    """Return the accelerator if this machine has a usable one, else the processor."""
    # Without the check, a CUDA build of torch names CUDA even on machines without a GPU or its driver.
    kind = torch.accelerator.current_accelerator(check_available=True)
    # With its number: another thread may have another one as its current device.
    return torch.device("cpu") if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


@contextmanager
def repeatable() -> Iterator[None]:
    """No gradients, and no kernel picked by timing: on one machine the same batch gives the same bytes."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before
