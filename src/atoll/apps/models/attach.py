"""`atoll.attach`: the experts of a run in a diffusers pipeline that is open already.

    pipe = DiffusionPipeline.from_pretrained("OWNER/BASE").to("cuda")
    atoll.attach(pipe, "RUN")          # its network is now the ensemble
    pipe("a red apple")                # the same call, scheduler, callbacks and guidance
    atoll.detach(pipe)

The adapters of all experts are injected into the network of the pipeline, so its weights are in memory once. `Attached`
takes its place. It gets the arguments of the network, for any batch:

    arguments ─ the trace of the run ─> state, time, pooled text ─ route ─> weights (batch, experts)
    for each expert: the arguments of its images ─ network with its adapter ─> outputs
    weighted sum of the outputs, image by image ─> the network's own output

Under guidance, a pipeline doubles the batch or calls the network twice. Each row is then routed by its own text; the
empty prompt is the null condition.
"""

import inspect
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from atoll.core.errors import AtollError
from atoll.core.layout import CONFIG_FILE
from atoll.core.networks import BaseConfig, TraceSpec
from atoll.core.sizes import Size
from atoll.encoders.base_pipeline import SLOTS
from atoll.encoders.pretrained import fingerprint
from atoll.encoders.trace import Recorder
from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.routing import parse
from atoll.experts.batch_conditions import BatchConditions
from atoll.experts.expert import DeviceOptions, open_router
from atoll.experts.pipeline_folder import is_folder, open_folder
from atoll.experts.run import open_run
from atoll.nets import Condition
from atoll.nets.arguments import Arguments, bound, take
from atoll.nets.base import BaseExpert, opened_base, pooled

SAME_TEXT = 5e-4
"""Largest distance between the unit vectors of one prompt in different batches. In tiny pipelines on a CPU it was at
most 1e-8, and prompts of one letter were 1e-3 to 1.4 from the empty one."""


def attach(
    pipe: Any,
    run: str | Path,
    model: str = "experts",
    *,
    routing: str = "top-1",
    cluster: int | Sequence[int] | None = None,
    strict: bool = False,
    verify: bool = False,
) -> Any:
    """Put the experts of a run, or of an export of adapters, into the network of a pipeline; return the pipeline.

    `model` is `experts` or one of them (`expert:3`). `routing` is as in `atoll sample`. With `oracle`, all images are
    of `cluster`, or of these clusters in turn. Experts that are not finished are left out; with `strict` they are an
    error. `verify` checks the hash of every file of the run, and of the folder that the network was loaded from.
    """
    slot = _slot(pipe)
    network = getattr(pipe, slot)
    if isinstance(network, Attached):
        raise AtollError("this pipeline has experts already; call atoll.detach(pipe) first")
    rule = parse(routing)
    if rule.draws:
        raise AtollError(f"routing {routing!r} draws an expert for an image, but calls of a network name no images")
    if (Path(run) / CONFIG_FILE).is_file():
        opened = open_run(Path(run), model, verify=verify, strict=strict, find_base=False)
    elif is_folder(run):
        opened = open_folder(run, model, find_base=False)
    else:
        raise AtollError(f"{run} is neither a run nor an export")
    if opened.missing:
        print(f"warning: {', '.join(opened.missing)} not finished; attached without", file=sys.stderr)
    configs = []
    for reference in opened.experts:
        config = reference.declaration.network
        if not isinstance(config, BaseConfig) or config.lora is None:
            raise AtollError(f"{reference.declaration.name} is a whole network, not an adapter; use atoll.load")
        bridge, own = reference.declaration.bridge, config.trace
        if (bridge.schedule.spec.model_dump(mode="json"), bridge.prediction) != (own.schedule, own.prediction):
            raise AtollError(f"{reference.declaration.name} was trained for another objective than its base")
        configs.append(config)
    config = configs[0]
    if any(replace(other, lora=config.lora) != config for other in configs):
        raise AtollError("the experts of this run have adapters of different bases")
    plain = _check_base(network, config, slot, verify=verify)
    # The weights of a router are small, and its decision is not: it computes in float32.
    router = None if opened.router is None else open_router(opened.router, DeviceOptions())
    ensemble = Ensemble(opened.experts, router, routing=rule)
    null = None
    if "pooled" in (router.declaration.conditioning if router else ()) or any(
        reference.density and reference.density.caption for reference in opened.experts
    ):
        null = _null(pipe, slot, plain, config.trace)

    # Inject the adapters. peft activates each new one in all layers; those of the user stay active instead.
    experts: list[BaseExpert] = []
    try:
        with _same_adapters(network), opened_base(config, network):
            for reference in opened.experts:
                expert = reference.open()
                assert isinstance(expert, BaseExpert)
                experts.append(expert.to(network.dtype).eval().requires_grad_(False))
    except BaseException:
        for expert in experts:
            expert.remove()
        raise
    attached = Attached(network, ensemble, experts, config.trace, cluster, null)
    # Past the pipeline's own __setattr__, which would write another class into its configuration.
    object.__setattr__(pipe, slot, attached)
    return pipe


def detach(pipe: Any) -> Any:
    """Remove the experts from a pipeline; return the pipeline, whose network is as before."""
    slot = _slot(pipe)
    attached = getattr(pipe, slot)
    if not isinstance(attached, Attached):
        raise AtollError("this pipeline has no experts")
    for expert in attached.experts:
        expert.remove()
    object.__setattr__(pipe, slot, attached.network)
    return pipe


class Attached(nn.Module):
    """The network of a pipeline with the adapters of an ensemble. It has all attributes of the network."""

    network: nn.Module

    def __init__(
        self,
        network: nn.Module,
        ensemble: Ensemble,
        experts: Sequence[BaseExpert],
        trace: TraceSpec,
        cluster: int | Sequence[int] | None,
        null: Tensor | None,
    ) -> None:
        super().__init__()
        self.network = network
        self.ensemble, self.trace, self.null = ensemble, trace, null
        self.experts = tuple(experts)  # no submodules: their weights are in the layers of the network
        self.clusters = None if cluster is None else [cluster] if isinstance(cluster, int) else list(cluster)
        self._signature = inspect.signature(type(network).forward)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("network"), name)

    def to(self, *args: Any, **kwargs: Any) -> "Attached":
        """Move the network by its own method, which knows of its quantization."""
        self.network.to(*args, **kwargs)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the network: for each image, the weighted sum over the experts."""
        arguments = bound(self._signature, args, kwargs)
        batch, trace = len(arguments[self.trace.state]), self.trace
        how: dict[str, Any] = {**trace.batching, trace.state: "list" if trace.state_list else 0, trace.time: 0}
        weights = self.route(arguments)
        outputs, parts = [], []
        with _same_adapters(self.network) as active:
            for number, expert in enumerate(self.experts):
                places = weights[:, number].nonzero().flatten().tolist()
                if not places:
                    continue
                own = arguments
                if len(places) < batch:
                    own = {name: take(value, how.get(name), places, batch) for name, value in arguments.items()}
                expert.activate(active)
                outputs.append(self.network(**own))
                parts.append((places, weights[places, number]))
        single = len(outputs) == 1 and bool((parts[0][1] == 1).all())
        return outputs[0] if single else _mix(outputs, parts, batch)

    @torch.no_grad()
    def route(self, arguments: Arguments) -> Tensor:
        """Return the weights (batch, experts) of the images of a call, on the CPU."""
        trace, ensemble = self.trace, self.ensemble
        value = arguments[trace.state]
        state = value if isinstance(value, Tensor) else torch.stack(list(value))
        batch = len(state)
        if trace.packed:
            size = _grid(arguments, trace, state, ensemble.sizes)
            x = state.reshape(batch, size.height * size.width, -1).transpose(1, 2)
            x = x.reshape(batch, -1, size.height, size.width)
        else:
            pairs = zip(state.shape[1:], trace.state_shape, strict=True)
            x = state.reshape(batch, *(side for side, traced in pairs if traced != 1))
        # Times in bfloat16 are rounded, possibly beyond 1.
        time = torch.as_tensor(arguments[trace.time]).float().reshape(-1)
        timestep = (1000 * (time - trace.offset) / trace.scale).expand(batch).cpu()
        # The router is trained on the linear path, whatever the path of the network is.
        x, t = ensemble.declarations[0].bridge.linear_state(x.float(), timestep)
        cluster = None
        if self.clusters is not None:
            if batch % len(self.clusters):
                raise AtollError(f"there are {len(self.clusters)} clusters for a batch of {batch} images")
            cluster = torch.tensor(self.clusters * (batch // len(self.clusters)))
        condition = None
        if self.null is not None:
            text = {name: arguments[name] for name in trace.batching if name in arguments}
            rows = [
                pooled(trace, {name: take(own, trace.batching[name], [place], batch) for name, own in text.items()})
                for place in range(batch)
            ]
            vectors = torch.stack(rows)
            # Some pipelines pass zeros instead of the empty prompt.
            dropped = ((vectors - self.null.to(vectors)).norm(dim=1) < SAME_TEXT) | (vectors.norm(dim=1) < 0.5)
            condition = Condition(pooled=vectors, dropped=dropped)
        if ensemble.router is not None:
            ensemble.router.network.to(x.device)
        return ensemble.route(x, t, BatchConditions.of(condition, torch.arange(batch)), cluster=cluster)


def _slot(pipe: Any) -> str:
    """Return the name of the component that is the network."""
    found: list[str] = [name for name, part in pipe.components.items() if name.startswith(SLOTS) and part is not None]
    if len(found) != 1:
        raise AtollError(f"this pipeline has {len(found)} denoising networks ({', '.join(found)}); expected one")
    return found[0]


def _check_base(network: Any, config: BaseConfig, slot: str, *, verify: bool) -> Any:
    """Raise AtollError if a network is not the base of the experts. Return the declared one on the meta device."""
    import diffusers
    from peft.tuners.lora import LoraLayer

    wanted = f"the experts are adapters of {config.base} (fingerprint {config.weights[:16]})"
    if type(network).__name__ != config.network_class:
        raise AtollError(
            f"the {slot} of this pipeline is a {type(network).__name__}, but {wanted}, a {config.network_class}"
        )
    kind = getattr(diffusers, config.network_class)
    with torch.device("meta"):
        plain = kind.from_config(dict(config.network))

    def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
        known: dict[str, Any] = json.loads(json.dumps(dict(values), default=str))
        return {key: value for key, value in known.items() if not key.startswith("_")}

    ours, theirs = plain_values(plain.config), plain_values(network.config)
    for name, value in ours.items():
        if theirs.get(name) != value:
            raise AtollError(f"the {slot} of this pipeline has {name} {theirs.get(name)}, but {wanted}, with {value}")
    if any(layer.merged for layer in network.modules() if isinstance(layer, LoraLayer)):
        raise AtollError("a LoRA adapter is fused into the network of this pipeline; call pipe.unfuse_lora() first")
    if verify:
        folder = Path(str(network.config.get("_name_or_path", "")))
        folder = folder if folder.name == slot else folder / slot
        if not folder.is_dir():
            raise AtollError(f"{folder}, where the {slot} was loaded from, is not a folder; use verify=False")
        # As in the declaration: the files of one component of a pipeline's folder.
        if (found := fingerprint(folder.parent, (slot,))) != config.weights:
            raise AtollError(f"the {slot} of this pipeline has the fingerprint {found[:16]}, but {wanted}")
    return plain


def _null(pipe: Any, slot: str, plain: nn.Module, trace: TraceSpec) -> Tensor:
    """Return the pooled text of the empty prompt."""
    # The text does not depend on the size; this one is a multiple of all common factors.
    side = 64 * max(1, int(getattr(pipe, "vae_scale_factor", 8)) // 8)
    try:
        return pooled(trace, Recorder(pipe, slot, plain, trace.options).arguments([""], Size.square(side)))
    except (TypeError, AttributeError) as error:
        raise AtollError(
            "the routing needs the pipeline's text encoders, to recognize the empty prompt; open it with them, or use "
            "routing='oracle'"
        ) from error


def _grid(arguments: Arguments, trace: TraceSpec, state: Tensor, sizes: Sequence[Size]) -> Size:
    """Return height and width of the latents whose tokens are the state (batch, tokens, channels).

    Networks of tokens get their positions: a row of numbers for each token, two of which count rows and columns; or
    height and width themselves. Without either, it is one of the sizes of the run.
    """
    tokens = state.shape[-2] if state.ndim > 2 else state.shape[0]
    for name in trace.batching:
        if name in trace.by_prompt or name not in arguments:
            continue
        for leaf in tree_leaves(arguments[name], is_leaf=_is_shape):
            if _is_shape(leaf):
                for height, width in pairwise(leaf):
                    if height * width == tokens:
                        return Size(height, width)
            elif isinstance(leaf, Tensor) and leaf.ndim >= 2 and leaf.shape[-2] == tokens:
                positions = leaf.reshape(-1, *leaf.shape[-2:])[0]
                counts = [len(set(column.tolist())) for column in positions.unbind(1)]
                for row, height in enumerate(counts):
                    if tokens % height == 0 and height * max(counts[row + 1 :], default=0) == tokens:
                        return Size(height, tokens // height)
    known = [size for size in sizes if size.height * size.width == tokens]
    if not known and math.isqrt(tokens) ** 2 == tokens:
        known = [Size.square(math.isqrt(tokens))]
    if len(known) != 1:
        raise AtollError(f"the arguments of the network do not show the shape of {tokens} tokens; use another size")
    return known[0]


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) > 1 and all(isinstance(part, int) for part in value)


def _mix(outputs: Sequence[Any], parts: Sequence[tuple[list[int], Tensor]], batch: int) -> Any:
    """Return an output for a batch from outputs for parts of it, which are given by images and their weights."""
    first = outputs[0]
    if isinstance(first, Tensor):
        total = first.new_zeros(batch, *first.shape[1:])
        for output, (places, weights) in zip(outputs, parts, strict=True):
            index, factor = torch.tensor(places, device=first.device), weights.to(first.device, first.dtype)
            if first.is_floating_point():
                total.index_add_(0, index, output * factor.view(-1, *[1] * (output.ndim - 1)))
            else:  # a mask
                total.index_copy_(0, index, output)
        return total
    if isinstance(first, list) and all(isinstance(part, Tensor) for part in first):  # a tensor for each image
        return list(_mix([torch.stack(own) for own in outputs], parts, batch))
    if isinstance(first, Mapping):  # an output class of diffusers
        return type(first)(**{key: _mix([own[key] for own in outputs], parts, batch) for key in first})
    if isinstance(first, tuple):
        return tuple(_mix(own, parts, batch) for own in zip(*outputs, strict=True))
    return first


@contextmanager
def _same_adapters(network: nn.Module) -> Iterator[dict[str, list[str]]]:
    """Yield the active adapters of each layer that has adapters; at the end they are active again, and no others."""
    from peft.tuners.lora import LoraLayer

    def layers() -> dict[str, LoraLayer]:
        return {path: layer for path, layer in network.named_modules() if isinstance(layer, LoraLayer)}

    active = {path: list(layer.active_adapters) for path, layer in layers().items()}
    try:
        yield active
    finally:
        for path, layer in layers().items():
            layer._active_adapter = list(active.get(path, ()))
