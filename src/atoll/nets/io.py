"""Weight files: safetensors in and out, and `.pt` files in, read without running any of their code."""

import hashlib
import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll.core.errors import AtollError, first_line

WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"
CONFIG_FILE = "config.json"
WRAPPERS = ("ema", "state_dict_ema", "model", "state_dict")
"""Names under which a checkpoint may keep its weights, the averaged ones first."""


def read_weights(file: str | Path) -> dict[str, Tensor]:
    """The tensors of a `.safetensors`, `.pt`, `.pth` or `.bin` file, by name, on the CPU."""
    file = Path(file)
    if not file.is_file():
        raise AtollError(f"{file}: no such file; give a .safetensors or .pt file, or a folder that holds one")
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except SafetensorError as error:
            raise AtollError(f"{file}: not a safetensors file: {error}") from error
    if file.suffix not in (".pt", ".pth", ".bin"):
        raise AtollError(f"{file}: expected a .safetensors or .pt file, got {file.suffix or 'no suffix'!r}")
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = first_line(error)
        raise AtollError(
            f"{file}: holds more than tensors, or is damaged; refused, for reading it could run code: {reason}\n"
            "save its plain state dict as .safetensors where you trust it, and convert that"
        ) from error
    return _unwrap(content, file)


def _unwrap(content: object, file: Path) -> dict[str, Tensor]:
    if isinstance(content, dict):
        for name in WRAPPERS:
            if isinstance(content.get(name), dict):
                return _unwrap(content[name], file)
        if content and all(isinstance(value, Tensor) for value in content.values()):
            return {str(name): value for name, value in content.items()}
    raise AtollError(f"{file}: expected a dictionary of tensors, also under one of {', '.join(WRAPPERS)}")


def write_weights(state: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file; tensors that share memory are written apart."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in state.items()}, file)


def sha256(file: str | Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
