"""Files of networks: read and write safetensors, and read `.pt` files without executing code in them."""

import hashlib
import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll.core import disk
from atoll.core.errors import AtollError, first_line
from atoll.core.networks import (
    CLASS_NAME,
    BaseConfig,
    DiTConfig,
    NetworkConfig,
    OwnConfig,
    RouterConfig,
    adapted,
    read_network,
)
from atoll.nets.adapters import KINDS, DiffusersExpert
from atoll.nets.base import BaseExpert
from atoll.nets.dit import DiT
from atoll.nets.own import open_own
from atoll.nets.router import Router

WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"
CONFIG_FILE = "config.json"
WEAK_FILE = "ema-weak.safetensors"
"""The parameters of the weak network of autoguidance, beside the weights of a trained network."""
WRAPPERS = ("ema", "state_dict_ema", "model", "state_dict")
"""Keys under which a checkpoint may store its weights; EMA weights are preferred."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes of networks by their names in safetensors."""


def read_weights(file: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a `.safetensors`, `.pt`, `.pth` or `.bin` file, by name, on the CPU."""
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
            f"{file}: holds more than tensors, or is damaged; not read, because it could execute code: {reason}\n"
            "save its state dict as .safetensors on a machine where you trust the file, and use that"
        ) from error
    return _unwrap(content, file)


def tensors_of(data: memoryview) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file in memory. They share its memory and are not copied."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:start]))
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            dtype, shape, (first, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            flat = torch.empty(0, dtype=dtype)
            if end > first:
                flat = torch.frombuffer(data, dtype=dtype, count=(end - first) // dtype.itemsize, offset=start + first)
            tensors[name] = flat.view(shape)
    return tensors


def _unwrap(content: object, file: Path) -> dict[str, Tensor]:
    if isinstance(content, dict):
        for name in WRAPPERS:
            if isinstance(content.get(name), dict):
                return _unwrap(content[name], file)
        if content and all(isinstance(value, Tensor) for value in content.values()):
            return {str(name): value for name, value in content.items()}
    raise AtollError(f"{file}: expected a dictionary of tensors, or one under the key {', '.join(WRAPPERS)}")


def write_weights(state: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file; tensors that share memory are copied, because the format forbids sharing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with disk.explained(file, sum(tensor.nbytes for tensor in state.values())):
        save_file({name: tensor.detach().contiguous().clone() for name, tensor in state.items()}, file)


def weights_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values of tensors, sorted by name.

    It does not depend on the layout of a file. So it identifies weights that were stored in another layout and read
    back.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_fit(given: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Raise an error that lists all missing, unexpected and wrongly shaped tensors."""
    problems = [f"missing {name} {tuple(expected[name].shape)}" for name in expected if name not in given]
    problems += [f"unexpected {name} {tuple(given[name].shape)}" for name in given if name not in expected]
    problems += [
        f"{name} has shape {tuple(given[name].shape)}, expected {tuple(expected[name].shape)}"
        for name in expected
        if name in given and given[name].shape != expected[name].shape
    ]
    if problems:
        raise AtollError(f"the weights do not fit {what}; nothing was loaded:\n  " + "\n  ".join(problems))


def build(config: NetworkConfig) -> DiT | Router | DiffusersExpert | BaseExpert:
    """Build a network with newly initialized weights."""
    if isinstance(config, DiTConfig):
        return DiT(config)
    if isinstance(config, RouterConfig):
        return Router(config)
    if isinstance(config, BaseConfig):
        return BaseExpert(config)
    if isinstance(config, OwnConfig):
        own: Any = open_own(config)  # it implements `Expert`
        return own  # type: ignore[no-any-return]
    try:
        return KINDS[config.class_name](**config.fields)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise AtollError(f"{config.class_name} cannot be built from its fields: {first_line(error)}") from error


def save_network(network: DiT | Router | DiffusersExpert | BaseExpert, folder: str | Path) -> None:
    """Write config.json and the weights as safetensors, in the folder layout of a diffusers model."""
    folder = Path(folder)
    write_weights(network.state_dict(), folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(network.config.to_dict(), indent=2) + "\n", encoding="utf-8")


def read_files(
    folder: str | Path, read: Callable[[str], memoryview] | None = None
) -> tuple[NetworkConfig, dict[str, Tensor]]:
    """Read the configuration and the weights of a network that `save_network` wrote.

    `read` returns the content of a file by name, such as `VerifiedFiles.read`; by default the files are memory-mapped.
    """
    file = Path(folder) / CONFIG_FILE
    if not file.is_file():
        raise AtollError(f"{file}: no such file; expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    config = read_network(json.loads(bytes(read(CONFIG_FILE)) if read else file.read_bytes()))
    return config, tensors_of(read(WEIGHTS_FILE)) if read else read_weights(Path(folder) / WEIGHTS_FILE)


def load_initial(folder: str | Path) -> DiT | Router | DiffusersExpert | BaseExpert:
    """Load a network to start training from: one that `save_network` wrote, or a diffusers model of an adapter's class.

    A diffusers model has no learned null condition, so that of the adapter is initialized at random.
    """
    values = json.loads((Path(folder) / CONFIG_FILE).read_bytes())
    if adapted(values) is values:
        return load_network(folder)
    import diffusers

    network = build(read_network(adapted(values)))
    assert isinstance(network, DiffusersExpert)
    kind = getattr(diffusers, values[CLASS_NAME])
    model = kind.from_pretrained(folder, use_safetensors=True, local_files_only=True, trust_remote_code=False)
    network.model.load_state_dict(model.state_dict())
    return network


def load_network(
    folder: str | Path, read: Callable[[str], memoryview] | None = None, *, ema: str | None = None
) -> DiT | Router | DiffusersExpert | BaseExpert:
    """Load a network that `save_network` wrote, as `read_files`; raise an error if a tensor does not fit.

    `ema` is a file in the folder whose parameters replace those of the network.
    """
    (config, state), what = read_files(folder, read), f"the network of {Path(folder) / CONFIG_FILE}"
    state |= read_weights(Path(folder) / ema) if ema else {}
    native = isinstance(config, DiTConfig | RouterConfig)
    if isinstance(config, BaseConfig):
        # An adapter of a large rank is refused before memory is spent on it, or on its base.
        with torch.device("meta"):
            check_fit(state, build(config).state_dict(), what)
    # DiT and router store all their buffers, so initialization can be skipped on the meta device. Diffusers models have
    # buffers that are not saved, and a base is shared.
    with torch.device("meta" if native else "cpu"):
        network = build(config)
    check_fit(state, network.state_dict(), what)
    network.load_state_dict(state, assign=native)
    return network
