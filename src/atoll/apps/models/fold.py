"""Convert a class-conditional DDPM DiT to a flow-matching expert, as in HDDM.

The source (AdaLN-Zero) modulates block b of B at timestep t of T with 6 vectors of the width D:

    M_b(t) = W_b s(t) + c_b,   s(t) = SiLU(embedding of t)                       (1)

with W_b (6 D, D), s(t) (D,) and c_b (6 D,). The expert (AdaLN-Single) shares one projection among all blocks and has
one learned table E_b (6, D) per block:

    M'_b(t) = W s(t) + E_b                                                       (2)

The fold is the least-squares fit over blocks and timesteps,

    min over W, E of  Σ_b Σ_t |M_b(t) - W s(t) - E_b|²                            (3)

Its solution is the mean of the projections, and offsets that correct each block at the mean of s:

    W = mean_b W_b,    E_b = c_b + (W_b - W) mean_t s(t)                          (4)

with the residual (W_b - W)(s(t) - mean_t s(t)). All other weights of the source are kept.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from atoll.core.errors import AtollError
from atoll.core.networks import DiTConfig
from atoll.nets.dit import TIME_KNOTS, DiT
from atoll.nets.layers import time_features
from atoll.nets.layouts import StateDict

STEPS = 1000
"""Number of timesteps of the source, 0 to 999."""


@dataclass(frozen=True)
class FlowMatchingOptions:
    """Options of a conversion to flow matching."""

    fold: bool = True
    """Fold AdaLN-Zero into AdaLN-Single."""
    text_width: int = 768
    """Width of the text tokens that the expert will be conditioned on; 0 for none."""
    keep_labels: bool = False
    """Keep the class embedding; otherwise the null class becomes part of the timestep embedding."""
    final: Literal["new", "keep"] = "new"
    """A new final layer, as in HDDM, or that of the source without its variance channels."""
    time: Literal["steps", "snr", "same"] = "steps"
    """How a timestep 1000 t becomes a timestep of the source: 999 t as in HDDM, the step of equal signal-to-noise ratio
    on the linear beta schedule of DiT, or unchanged."""
    seed: int = 0


@dataclass(frozen=True)
class ConversionRow:
    """One row of the report of a conversion."""

    item: str
    action: Literal["kept", "folded", "new", "renamed", "changed", "omitted"]
    parameters: int
    note: str = ""


def to_flow_matching(
    state: StateDict, config: DiTConfig, options: FlowMatchingOptions
) -> tuple[StateDict, DiTConfig, list[ConversionRow], dict[str, float]]:
    """Return tensors and configuration of the expert, the report of all changes, and the metrics of the fold."""
    target = _target_config(config, options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        result = DiT(target).state_dict()
    if target.time_table:
        result["time_table"] = time_table(options.time)

    # Tensors of the source that stay as they are.
    kept = {
        name: tensor
        for name, tensor in state.items()
        if name.startswith(("patch.", "positions")) or ".attention." in name or ".mlp." in name
    }
    changes = [ConversionRow("patch, positions, attention and MLP of the blocks", "kept", _count(kept))]

    # The embedders. Without labels, the null class is a constant and is added to a bias.
    embedder, note = {name: tensor for name, tensor in state.items() if name.startswith("embedders.")}, ""
    if config.num_classes and not target.num_classes:
        for index in range(config.depth if config.embedder_per_block else 1):
            labels, bias = embedder.pop(f"embedders.{index}.labels.weight"), f"embedders.{index}.time.outer.bias"
            embedder[bias] = embedder[bias] + labels[-1]
        note = "the null class is added to the timestep embedding, the other classes are omitted"
    changes.append(ConversionRow("timestep and label embedding", "kept", _count(embedder), note))

    # The modulation of the blocks.
    if config.modulation == target.modulation:
        modulated = {
            name: tensor
            for name, tensor in state.items()
            if (".modulation." in name and name.startswith("blocks.")) or name.startswith("shared_modulation.")
        }
        metrics = {"residual": 0.0, "residual_in_time": 0.0}
        changes.append(ConversionRow("modulation of the blocks", "kept", _count(modulated)))
    else:
        modulated, metrics = _folded(state | embedder, config, target)
        whole, in_time = metrics["residual"], metrics["residual_in_time"]
        note = f"residual {whole:.1%} of the modulation, {in_time:.1%} of its change in time"
        changes.append(ConversionRow("modulation of the blocks", "folded", _count(modulated), note))

    # The final layer of the source without its variance channels, or a new one.
    keep_final = options.final == "keep"
    final = {name: tensor for name, tensor in state.items() if keep_final and name.startswith("final.")}
    for name in ("final.linear.weight", "final.linear.bias") if keep_final else ():
        rows = final[name].reshape(config.patch**2, config.out_channels, -1)[:, : target.out_channels]
        final[name] = rows.flatten(0, 1).reshape(-1, *final[name].shape[1:])
    taken = kept | embedder | modulated | final
    result |= taken

    # Report the parts that may be new.
    for item, belongs, note in (
        ("cross-attention", lambda name: ".cross." in name, "its output is zero until trained, so it changes nothing"),
        ("text projection", lambda name: name.startswith("text."), ""),
        ("null condition", lambda name: "null_" in name, ""),
        ("time table", lambda name: name == "time_table", f"timesteps of the source: {options.time}"),
        (
            "final layer",
            lambda name: name.startswith("final."),
            "without the variance channels" if keep_final else "predicts zero until trained",
        ),
    ):
        part = {name: tensor for name, tensor in result.items() if belongs(name)}
        if part:
            changes.append(ConversionRow(item, "kept" if part.keys() <= taken.keys() else "new", _count(part), note))
    return result, target, changes, metrics


def _target_config(config: DiTConfig, options: FlowMatchingOptions) -> DiTConfig:
    if config.text_width:
        raise AtollError(
            "the source is already conditioned on text; conversion to flow matching needs a network without text"
        )
    if config.time_table:
        raise AtollError(
            "the source is already a flow-matching network (a SiT, or converted before); omit --to flow-matching"
        )
    if options.fold and config.embedder_per_block:
        raise AtollError(
            "the blocks of the source have different timestep embeddings and cannot be folded; use --no-fold"
        )
    if options.keep_labels and not config.num_classes:
        raise AtollError("the source has no class labels to keep")
    modulation = "single" if options.fold else config.modulation
    return replace(
        config,
        modulation=modulation,
        final_modulation=config.final if options.final == "keep" and config.final != modulation else None,
        out_channels=config.channels,
        text_width=options.text_width,
        text_projection="linear",
        num_classes=config.num_classes if options.keep_labels else 0,
        time_table=options.time != "same",
    )


def _count(state: StateDict) -> int:
    return sum(tensor.numel() for tensor in state.values())


def _folded(state: StateDict, config: DiTConfig, target: DiTConfig) -> tuple[StateDict, dict[str, float]]:
    """Return the modulation (4), and the RMS residual of the fit relative to the modulation and its change in time."""
    weights = [state[f"blocks.{n}.modulation.linear.weight"].float() for n in range(config.depth)]
    biases = [state[f"blocks.{n}.modulation.linear.bias"].float() for n in range(config.depth)]
    activated = activated_embeddings(state, target)
    mean_activated = activated.mean(0)
    shared = torch.stack(weights).mean(0)
    offsets = [bias + (weight - shared) @ mean_activated for weight, bias in zip(weights, biases, strict=True)]
    # The tables E_b of (4) and the bias of the shared projection are redundant by one vector: the bias takes the mean
    # over the blocks, and the tables take the rest.
    mean_offset = torch.stack(offsets).mean(0)
    result = {"shared_modulation.weight": shared, "shared_modulation.bias": mean_offset}
    for n, offset in enumerate(offsets):
        result[f"blocks.{n}.modulation.table"] = (offset - mean_offset).view(6, config.width)
    # s(t) is smooth in t, so s(t) - mean spans a space of few dimensions. Its SVD basis (directions with a singular
    # value above 1e-7 of the largest, the resolution of float32) replaces the sum over all timesteps.
    _, scales, basis = torch.linalg.svd(activated - mean_activated, full_matrices=False)
    spread = (scales[:, None] * basis)[scales > 1e-7 * scales[0]].T / len(activated) ** 0.5
    lost = sum(float(((weight - shared) @ spread).square().sum()) for weight in weights)
    changing = sum(float((weight @ spread).square().sum()) for weight in weights)
    constant = sum(float((w @ mean_activated + bias).square().sum()) for w, bias in zip(weights, biases, strict=True))
    return result, {
        "residual": (lost / max(changing + constant, 1e-30)) ** 0.5,
        "residual_in_time": (lost / max(changing, 1e-30)) ** 0.5,
    }


def activated_embeddings(state: StateDict, config: DiTConfig) -> Tensor:
    """Return s(t) of (1) for all timesteps of the source, (timesteps, width); with labels, each with some class."""
    features = time_features(torch.arange(STEPS), config.frequency_shift)
    inner = functional.linear(
        features, state["embedders.0.time.inner.weight"].float(), state["embedders.0.time.inner.bias"].float()
    )
    outer = state["embedders.0.time.outer.weight"].float(), state["embedders.0.time.outer.bias"].float()
    embedding = functional.linear(functional.silu(inner), *outer)
    if config.num_classes:  # one class per timestep; the stride gives neighboring timesteps different classes
        labels = state["embedders.0.labels.weight"].float()
        embedding = embedding + labels[torch.arange(STEPS) * 7 % len(labels)]
    return functional.silu(embedding)


def time_table(kind: Literal["steps", "snr", "same"]) -> Tensor:
    """Return the timestep of the source for the timesteps 1000 t = 0, 1, …, 1000 of the expert, shape (1001,).

    "steps" is 999 t. "snr" is the step of the linear beta schedule (1e-4 to 0.02) with σ/α = t / (1 - t).
    """
    times = np.linspace(0.0, 1.0, TIME_KNOTS)
    if kind == "same":
        return torch.arange(TIME_KNOTS, dtype=torch.float32)
    if kind == "steps":
        return torch.from_numpy((STEPS - 1) * times).float()
    signal = np.cumprod(1.0 - np.linspace(1e-4, 0.02, STEPS))
    log_ratio = 0.5 * np.log((1.0 - signal) / signal)
    # The ends t = 0 and 1 have an infinite log ratio; `interp` then gives the first and the last step.
    inside = np.clip(times, 1e-9, 1.0 - 1e-9)
    return torch.from_numpy(np.interp(np.log(inside / (1.0 - inside)), log_ratio, np.arange(STEPS))).float()
