"""The network of a diffusers pipeline as an expert: the base, with a LoRA adapter or trained as a whole.

A trace of the pipeline (`encoders/trace.py`) says how the network is called. Experts of one base share its weights in
memory. An expert with an adapter has only the adapter as its parameters: the optimizer, the EMA, checkpoints, DDP and
the files of the expert see nothing else. The adapters of all experts are injected into the layers of the one base, and
an expert activates its own before it calls it.

    x (batch, C, H, W) ─ pack ─> state ─ network(state, time, **arguments) ─> ± prediction ─ unpack ─> (batch, C, H, W)
"""

import itertools
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from atoll.core.device import compute_dtype, device, upload
from atoll.core.errors import AtollError
from atoll.core.networks import BaseConfig, TraceSpec
from atoll.nets.arguments import Arguments, join
from atoll.nets.conditioning import Condition
from atoll.nets.quantization import quantize

FOLDERS: dict[str, Path] = {}
"""Folders of base networks on this machine, by the fingerprint of their files. Whoever opens a run adds its base."""
_open: "weakref.WeakValueDictionary[tuple[str, torch.dtype, str | None], nn.Module]" = weakref.WeakValueDictionary()
_adapted: "weakref.WeakKeyDictionary[nn.Module, dict[str, Any]]" = weakref.WeakKeyDictionary()
"""The layers of a base that have an adapter of any expert, by path."""
_names = itertools.count()
_lock = threading.RLock()
"""Held while a base computes, and while its adapters change: peft activates each new one in all layers."""


def open_base(config: BaseConfig) -> nn.Module:
    """Return the base network, with its weights shared by all experts of this process; on the meta device, without."""
    import diffusers

    found = getattr(diffusers, config.network_class, None)
    if not isinstance(found, type) or not issubclass(found, diffusers.ModelMixin):
        raise AtollError(f"diffusers {diffusers.__version__} has no network {config.network_class!r}")
    kind: Any = found
    if torch.get_default_device().type == "meta":
        network: nn.Module = kind.from_config(dict(config.network))
        return network.requires_grad_(False)
    key = _, dtype, quantization = _key(config)
    if config.lora is None or key not in _open:
        folder = base_folder(config)
        network = kind.from_pretrained(folder, dtype=dtype, use_safetensors=True, trust_remote_code=False)
        network.eval().requires_grad_(False)
        if config.lora is None:  # trained as a whole, so not shared
            return network.float()
        _open[key] = network if quantization is None else quantize(network, quantization)
    return _open[key]


def base_folder(config: BaseConfig) -> Path:
    """Return the folder of a base network on this machine."""
    if config.weights not in FOLDERS:
        raise AtollError(
            f"the base {config.base} of this network is not here; get it, and set networks.default.base in atoll.yaml "
            f"to its folder (fingerprint {config.weights[:16]})"
        )
    return FOLDERS[config.weights]


def _key(config: BaseConfig) -> tuple[str, torch.dtype, str | None]:
    return config.weights, compute_dtype(device()), config.lora.quantize if config.lora else None


@contextmanager
def opened_base(config: BaseConfig, network: nn.Module) -> Iterator[None]:
    """Let experts that are opened meanwhile use a network that is in memory already, instead of their own base."""
    key = _key(config)
    before = _open.get(key)
    _open[key] = network
    try:
        yield
    finally:
        del _open[key]
        if before is not None:
            _open[key] = before


class BaseExpert(nn.Module):
    """A base network as an expert for latents (batch, channels, height, width). It predicts what its base does."""

    def __init__(self, config: BaseConfig) -> None:
        super().__init__()
        self.config = config
        base = open_base(config)
        # In a tuple, the base is no submodule: its weights are not those of this expert.
        self._base = (base,)
        if config.lora is None:
            self.network = base.requires_grad_(True)
            return
        self._adapter = f"expert{next(_names)}"
        layers = _inject(base, config, self._adapter)
        for path, layer in layers.items():
            for part in ("lora_A", "lora_B", "lora_dropout"):  # a dropout has no weights, but is off in sampling
                _attach(self, f"{path}.{part}", getattr(layer, part)[self._adapter].float())
        self.remove = weakref.finalize(self, _remove, base, layers, self._adapter)
        """Remove the adapter from the base; the base is as before when its last adapter is gone."""

    @property
    def base(self) -> nn.Module:
        """The network that its experts share."""
        return self._base[0]

    def frozen_bytes(self, itemsize: int) -> int:
        """Return the bytes of the base's weights in memory, if `self` was built on the meta device, without weights."""
        if self.config.lora is None:
            return 0
        linear = nn.Linear if self.config.lora.quantize else ()
        layers = [layer for path, layer in self.base.named_modules() if ".lora_" not in path]
        return sum(
            weight.numel() * (1 if name == "weight" and isinstance(layer, linear) else itemsize)
            for layer in layers
            for name, weight in layer.named_parameters(recurse=False)
        )

    def forward(self, x: Tensor, timestep: Tensor, condition: Condition | None = None) -> Tensor:
        """Return predictions for noisy latents x (batch, C, H, W) at timesteps from 0 to 1000."""
        if condition is None or condition.arguments is None or condition.table is None:
            raise ValueError("a base network needs the arguments of its prompts; those of no prompt are row 0")
        trace, base = self.config.trace, self._base[0]
        rows = (
            condition.arguments if condition.dropped is None else condition.arguments.masked_fill(condition.dropped, 0)
        )
        precision = next(base.parameters()).dtype
        table, numbers = condition.table, rows.tolist()
        time = (timestep / 1000).reshape(-1).expand(len(x))
        # Images with arguments of one signature share a call.
        groups: dict[Any, list[int]] = {}
        for place, row in enumerate(numbers):
            groups.setdefault(table.signature(row), []).append(place)
        state = pack(x.to(precision), trace)
        outputs = []
        with _lock:
            if next(base.parameters()).device != x.device:
                base.to(x.device)
            self.activate()
            for places in groups.values():
                chosen, times = state, time
                if len(groups) > 1:
                    index = upload(torch.tensor(places), x.device)
                    chosen, times = state[index], time[index]
                found = [table.row(numbers[place], x.device, precision) for place in places]
                output = base(**network_arguments(trace, chosen, times, found))
                outputs.append(trace.sign * prediction(output, chosen))
        predicted = outputs[0]
        if len(groups) > 1:
            order = torch.tensor(list(itertools.chain(*groups.values()))).argsort()
            predicted = torch.cat(outputs)[upload(order, x.device)]
        return unpack(predicted, trace, x)

    def activate(self, others: Mapping[str, Sequence[str]] | None = None) -> None:
        """Let the base compute with this adapter, and with `others`, which are names of adapters by layer."""
        for path, layer in _adapted.get(self._base[0], {}).items():
            own = [self._adapter] if self._adapter in layer.lora_A else []
            layer._active_adapter = [*(others or {}).get(path, ()), *own]

    def merge(self) -> nn.Module:
        """Add the adapter to the weights of the base, remove it, and return the base."""
        if self.config.lora is not None:
            for layer in _adapted[self.base].values():
                if self._adapter in layer.lora_A:
                    layer.merge(adapter_names=[self._adapter])
            self.remove()
        return self.base


def _inject(base: nn.Module, config: BaseConfig, name: str) -> dict[str, Any]:
    """Inject an adapter into the layers of a base; return these layers by path."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer
    except ImportError as error:
        raise AtollError("adapters of a base model need the package peft; pip install 'atoll[base]'") from error

    assert config.lora is not None
    lora = config.lora
    targets: Any = "all-linear" if lora.targets == "auto" else list(lora.targets)
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=targets,
    )
    trained = [parameter for parameter in base.parameters() if parameter.requires_grad]
    try:
        with _lock, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # one adapter for each expert
            inject_adapter_in_model(settings, base, name)
    except ValueError as error:
        raise AtollError(f"lora.targets {lora.targets}: {error}") from error
    # peft trains the new adapter alone.
    for parameter in trained:
        parameter.requires_grad_(True)
    layers: dict[str, Any] = {path: layer for path, layer in base.named_modules() if isinstance(layer, LoraLayer)}
    layers = {path: layer for path, layer in layers.items() if name in layer.lora_A}
    _adapted.setdefault(base, {}).update(layers)
    return layers


def _attach(root: nn.Module, path: str, module: nn.Module) -> None:
    """Register a module below `root` at a dotted path, so that its parameters have the names of peft."""
    *parents, last = path.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, nn.Module())
        root = getattr(root, parent)
    root.add_module(last, module)


def _remove(base: nn.Module, layers: Mapping[str, Any], name: str) -> None:
    with _lock, warnings.catch_warnings():
        configurations: Any = getattr(base, "peft_config", {})
        configurations.pop(name, None)
        if not configurations and hasattr(base, "peft_config"):
            del base.peft_config
        warnings.simplefilter("ignore")  # about the active adapter, which every call sets
        for path, layer in layers.items():
            layer.delete_adapter(name)
            if not layer.lora_A:
                del _adapted[base][path]
                parent, _, last = path.rpartition(".")
                setattr(base.get_submodule(parent), last, layer.get_base_layer())


def pack(x: Tensor, trace: TraceSpec) -> Tensor:
    """Return states from latents (batch, C, H, W): tokens (batch, H · W, C) for a packed state, else as they are."""
    return x.flatten(2).transpose(1, 2) if trace.packed else x


def unpack(state: Tensor, trace: TraceSpec, like: Tensor) -> Tensor:
    """Return latents in the shape of `like` from states."""
    return state.transpose(1, 2).reshape(like.shape) if trace.packed else state.reshape(like.shape)


def network_arguments(trace: TraceSpec, state: Tensor, time: Tensor, conditions: Sequence[Arguments]) -> Arguments:
    """Return a network's arguments for states (batch, …), times (batch,) and conditions of one signature."""
    made = {name: join([own[name] for own in conditions], how) for name, how in trace.batching.items()}
    sizes = iter(size for size in state.shape[1:] if size != 1)
    shaped = state.reshape(len(state), *(1 if size == 1 else next(sizes) for size in trace.state_shape))
    made[trace.state] = list(shaped) if trace.state_list else shaped
    made[trace.time] = trace.scale * time + trace.offset
    return made


def pooled(trace: TraceSpec, arguments: Arguments) -> Tensor:
    """Return one vector for the prompt of an image, for routers and densities: the mean of its widest argument.

    A mask of its tokens among the arguments leaves out the padding, which depends on the other prompts of a batch.
    """
    leaves = tree_leaves([arguments.get(name) for name in trace.by_prompt])
    floats = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    widest = max(floats, key=lambda leaf: leaf.numel())
    tokens = widest.float().reshape(-1, widest.shape[-1])
    for mask in tree_leaves([arguments.get(name) for name in trace.batching]):
        if (
            isinstance(mask, Tensor)
            and not mask.is_floating_point()
            and mask.shape in ((len(tokens),), (1, len(tokens)))
        ):
            kept = mask.reshape(-1)
            if kept.any() and kept.max() <= 1:
                tokens = tokens[kept.bool()]
                break
    return nn.functional.normalize(tokens.mean(0), dim=0)


def prediction(output: Any, like: Tensor) -> Tensor:
    """Return the prediction among a network's outputs, without a learned variance, in the shape of the states."""
    while not isinstance(output, Tensor | list):
        output = output[0]
    found = output if isinstance(output, Tensor) else torch.stack(output)
    if found.numel() == 2 * like.numel() and found.ndim == like.ndim:
        place = next(place for place, (a, b) in enumerate(zip(found.shape, like.shape, strict=True)) if a != b)
        found = found.narrow(place, 0, like.shape[place])
    if found.squeeze().shape != like.squeeze().shape:
        raise AtollError(f"the network returns a tensor of shape {tuple(found.shape)} for states {tuple(like.shape)}")
    return found.reshape(like.shape)
