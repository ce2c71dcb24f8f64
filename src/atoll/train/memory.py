"""The memory of training, estimated by a simulated step before anything is trained.

The step runs on the meta device, whose tensors have shapes but no values, so it needs neither memory nor an
accelerator. `_Meter` follows every storage from its allocation to its release. Its peak therefore contains activations
and gradients in the order in which a step allocates and releases them, with recomputed blocks under checkpointing.
`_AsOnAccelerator` replaces what the meta device does differently: fused attention, which does not store its weights
(tokens x tokens), fused RMSNorm, and autocast.

After it, Muon updates its matrices. The rest is added: weights, moments and the EMAs in float32, and the buffers of
FSDP2. A preview runs beside the optimizer's state, so a job needs the larger of a step and a preview. On a CPU there
are also the holes in the heap, and the copy of the state from which checkpoints are written.

Not counted: the context of the device, the fragmentation of its memory, and the autoencoder that decodes previews.
Compiled networks need less memory.
"""

import json
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from atoll import flow
from atoll.core.config_sections import Train
from atoll.core.device import compute_dtype
from atoll.core.manifests import ObjectiveSpec
from atoll.core.networks import NetworkConfig, RouterConfig, read_network
from atoll.ensemble.plan import HEAP
from atoll.experts.validation import BATCH
from atoll.nets import build
from atoll.nets.blocks import set_checkpointing, transformer_blocks
from atoll.train.align import AlignmentSpec, Projector
from atoll.train.cost import condition_like
from atoll.train.data_shapes import DataShapes
from atoll.train.muon import hidden_matrices, muon_dtype, shares_of, update_matrices
from atoll.train.tasks import PREVIEW_CALIBRATION_IMAGES

FLOAT = torch.float32.itemsize
WORKSPACE = 32 << 20
"""Bytes of cuBLAS's workspace in torch: 32 MiB on an H100, 8 MiB on older GPUs."""
ALLOCATION = 512
"""torch allocates device memory in multiples of this number of bytes."""
GATHERED = 3
"""Blocks of full weights that FSDP2 holds: the current one, the next one, and the buffer that it is gathered in."""


Gradients = Literal["none", "new", "kept", "sharded"]
"""Those of the weights: no backward pass; released after every step; kept between steps; sharded by FSDP2."""


@dataclass(frozen=True)
class _Pass:
    """One pass of a network over a batch."""

    network: str
    """Its configuration as JSON."""
    latents: tuple[int, ...]
    text: tuple[int, int] | None
    rows: int
    dtype: torch.dtype
    gradients: Gradients
    checkpointing: bool
    parts: int
    """Number of processes between which FSDP2 divides the weights."""
    muon: torch.dtype | None
    """The precision of Muon; None without an update by Muon."""
    muon_shares: int
    """Number of processes between which Muon divides the matrices."""
    fused_norms: bool
    """Whether RMSNorm is one kernel: on GPUs, but not on CPUs."""
    align: AlignmentSpec | None = None


def job_bytes(
    network: NetworkConfig,
    shapes: DataShapes,
    settings: Train,
    *,
    device: torch.device,
    objective: ObjectiveSpec | None = None,
    processes: int = 1,
    align: AlignmentSpec | None = None,
) -> int:
    """Estimate the peak memory of one process of a training job; `objective` is None for routers and students.

    The device need not be in this machine, if the settings name a precision.
    """
    sharded, replicated = (processes > 1 and settings.parallel == parallel for parallel in ("fsdp2", "ddp"))
    kept = settings.grad_accum_steps > 1 or replicated  # DDP keeps the gradients in its buckets
    step = _Pass(
        network=json.dumps(network.to_dict(), sort_keys=True),
        latents=shapes.largest,
        text=shapes.text and shapes.text[:2],
        rows=max(1, settings.batch_size // settings.grad_accum_steps // processes),
        dtype=compute_dtype(device, settings.precision),
        gradients="kept" if kept else "sharded" if sharded else "new",
        checkpointing=settings.activation_checkpointing,
        parts=processes if sharded else 1,
        muon=muon_dtype(device, settings.precision) if settings.optimizer == "muon" else None,
        muon_shares=processes,
        fused_norms=device.type != "cpu",
        align=align,
    )
    weights = FLOAT * sum(_sizes(step.network)) // step.parts
    most = _peak(step)
    if rows := preview_rows(network, settings, objective):
        # The network has the EMA weights, and a copy the trained ones.
        preview = weights + _peak(replace(step, rows=rows, gradients="none", muon=None, align=None))
        most = max(most, preview + (weights if replicated else 0))
    # Weights, two moments and the EMAs. Muon has one moment of each of its matrices.
    state = weights * (3 + len(settings.ema)) - (FLOAT * _hidden_size(step.network) if step.muon else 0)
    state += 3 * FLOAT * align.parameters if align else 0
    return 2 * state + int(HEAP * most) if device.type == "cpu" else WORKSPACE + state + most


def preview_rows(network: NetworkConfig, settings: Train, objective: ObjectiveSpec | None) -> int:
    """Return the number of images of the largest forward pass of a preview; 0 without previews."""
    if isinstance(network, RouterConfig) or not (settings.sample_every and settings.sample_count):
        return 0
    # Half of the images at a time; guidance needs two rows for each.
    rows = -(-settings.sample_count // 2) * (1 if settings.sample_guidance_scale == 1 else 2)
    calibrates = objective is not None and not flow.Objective.of(objective).bridge().identity
    return max(rows, min(BATCH, PREVIEW_CALIBRATION_IMAGES)) if calibrates else rows


@cache
def _sizes(described: str) -> tuple[int, ...]:
    """Return the numbers of parameters outside of the transformer blocks, and of each block."""
    with torch.device("meta"):
        network = build(read_network(json.loads(described)))
    blocks = [sum(weight.numel() for weight in block.parameters()) for block in transformer_blocks(network)]
    return (sum(weight.numel() for weight in network.parameters()) - sum(blocks), *blocks)


@cache
def _hidden_size(described: str) -> int:
    """Return the number of weights that Muon trains."""
    with torch.device("meta"):
        return sum(matrix.weight.numel() for matrix in hidden_matrices(build(read_network(json.loads(described)))))


@cache
def _peak(one: _Pass) -> int:
    """Return the peak memory of a pass beyond the float32 weights and the optimizer's state."""
    config, training = read_network(json.loads(one.network)), one.gradients != "none"
    with torch.device("meta"):
        network = build(config).train(training)
        projector = None if one.align is None else Projector(one.align)
    set_checkpointing(network, one.checkpointing)
    weights = list(network.parameters())
    meter = _Meter([*weights, *(projector.parameters() if projector else ())])
    accelerator = _AsOnAccelerator(one.dtype, one.fused_norms)
    if one.parts > 1:
        # FSDP2 gathers weights in the training precision; `_gathered_bytes` counts them.
        accelerator.casts = {weight: weight.to(one.dtype) for weight in weights}
        meter.ignore(accelerator.casts.values())
    shards: list[Tensor] = []
    for weight in weights if one.gradients == "sharded" else ():
        weight.register_post_accumulate_grad_hook(partial(_shard_gradient, parts=one.parts, shards=shards))  # type: ignore[no-untyped-call]
    with meter, accelerator, torch.set_grad_enabled(training), torch.device("meta"):
        if one.gradients == "kept":
            for weight in weights:
                weight.grad = torch.empty_like(weight)
        # In training, input and target of this batch and of the next one, which is copied ahead.
        x, *_others = [torch.zeros(one.rows, *one.latents) for _ in range(4 if training else 1)]
        condition, *_next = [condition_like(config, one.text, one.rows) for _ in range(2 if training else 1)]
        alignment: Tensor | None = None
        if projector is not None and one.align is not None:
            output, tokens = network(x, torch.zeros(one.rows), condition, tap=one.align.block)
            patches = torch.zeros(one.rows, one.align.grid, one.align.grid, len(one.align.steps), dtype=torch.int8)
            alignment = projector(tokens, patches, one.align.token_grid(*one.latents[1:])).mean()
        else:
            output = network(x, torch.zeros(one.rows), condition)
        if training:
            loss = output.float().square().mean()
            loss = loss if alignment is None else loss + alignment
            if one.parts == 1:
                accelerator.end_forward()
            # `torch.autograd.backward` would suspend the modes, also for blocks that are computed again.
            torch.autograd.Variable._execution_engine.run_backward(
                (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
            del output, loss
    if one.muon:
        shares = shares_of(network, one.muon_shares)
        meter.ignore(stack.momentum for share in shares for stack in share)
        with meter, torch.device("meta"):
            update_matrices(shares, 1.0, 1.0, dtype=one.muon, found_inf=torch.zeros(()))
    return meter.peak + (_gathered_bytes(one) if one.parts > 1 else 0)


def _shard_gradient(weight: Tensor, parts: int, shards: list[Tensor]) -> None:
    """Replace a full gradient by the part of this process, as FSDP2 does."""
    shards.append(torch.empty(-(-weight.numel() // parts), device="meta"))
    weight.grad = None


def _gathered_bytes(one: _Pass) -> int:
    """Return the bytes of full weights that FSDP2 holds at a time, and of the gradients that it reduces."""
    outside, *blocks = _sizes(one.network)
    largest, itemsize = max(blocks, default=outside), one.dtype.itemsize
    # The gradients of a block in the training precision, and as input and result of the reduction in float32.
    reduced = 0 if one.gradients == "none" else largest * (itemsize + FLOAT + FLOAT // one.parts)
    return (outside + GATHERED * largest) * itemsize + reduced


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that operations allocate and release."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = self.peak = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.ignore(known)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the storages of these tensors."""
        self._seen.update(tensor.untyped_storage() for tensor in tensors)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count its results."""
        return tree_map_only(Tensor, self._add, func(*args, **(kwargs or {})))

    def _add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage not in self._seen:  # views share the storage of another tensor
            self._seen.add(storage)
            size = -(-storage.nbytes() // ALLOCATION) * ALLOCATION
            self._now += size
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._release, size)
        return tensor

    def _release(self, size: int) -> None:
        self._now -= size


# The lists of `torch.autocast` for CUDA, as far as networks of Atoll and diffusers use them. One operand of every
# addcmul is in float32, and the others are cast to it.
_HALF_PRECISION = {"linear", "conv2d", "matmul", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention"}
_FULL_PRECISION = {"layer_norm", "group_norm", "rms_norm", "softmax", "interpolate", "addcmul"}


class _AsOnAccelerator(TorchFunctionMode):
    """Fused kernels, and the casts of autocast, which keeps the casts of weights until the forward pass ends."""

    def __init__(self, dtype: torch.dtype, fused_norms: bool) -> None:
        super().__init__()
        self._dtype = dtype
        self._fused: dict[str, Callable[..., Any]] = {"scaled_dot_product_attention": _fused_attention}
        if fused_norms:
            self._fused["rms_norm"] = _fused_rms_norm
        self._keeps_casts = True
        self.casts: dict[Tensor, Tensor] = {}

    def end_forward(self) -> None:
        """Release the casts of weights that the backward pass does not need."""
        self.casts, self._keeps_casts = {}, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function as on an accelerator."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if self._dtype != torch.float32 and name in _HALF_PRECISION | _FULL_PRECISION:
            dtype = self._dtype if name in _HALF_PRECISION else torch.float32
            args, kwargs = tree_map_only(Tensor, lambda part: self._cast(part, dtype), (args, kwargs))
        return self._fused.get(name, func)(*args, **kwargs)

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        if tensor in self.casts:
            return self.casts[tensor]
        cast = tensor.to(dtype)
        if self._keeps_casts and tensor.is_leaf and tensor.requires_grad:
            self.casts[tensor] = cast
        return cast


def _fused_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    # The kernel of torch that takes any precision. All of them save query, key, value and output.
    found: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, True)[0]
    return found


def _fused_rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    del shape
    return _FusedRmsNorm.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]


class _FusedRmsNorm(torch.autograd.Function):
    """The tensors of torch's kernel: it saves the input and one number per row, but no normalized input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        """Return a tensor like the result."""
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return tensors like the gradients of input and weight."""
        x, weight, _rows = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)
