"""Compare LoRA experts of one base with the base alone: memory, published bytes, and the time of an evaluation.

    python benchmarks/base.py [--quick] [--json]

The base is a transformer of diffusers with 143 M random weights in bfloat16, in a pipeline with tiny text encoders and
a tiny autoencoder. Adapters have rank 16 on the projections of attention. One evaluation is the velocity of a batch of
32 images of 64 or 256 tokens, with prompts of 16 tokens. The router runs, but its logits are replaced by given ones, so
that the batch uses a known number of different experts. The base alone gets the whole batch in one call, with its
arguments ready. Times are processor times of one thread, which other work on the machine hardly changes; values are
ratios of medians over interleaved repeats.
"""

import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

from atoll import flow
from atoll.core.manifests import LatentSpec
from atoll.core.networks import LoraSpec, RouterConfig
from atoll.core.sizes import Size
from atoll.encoders.autoencoder import Statistics
from atoll.encoders.base_pipeline import BasePipeline
from atoll.ensemble import Ensemble
from atoll.experts.batch_conditions import BatchConditions
from atoll.experts.expert import Declaration, DeviceOptions, NetworkReference, OpenRouter
from atoll.experts.expert_cache import weight_bytes
from atoll.nets import Condition, build, load_network, save_network
from atoll.nets.arguments import ArgumentTable
from atoll.nets.base import network_arguments, opened_base, pack
from atoll.nets.io import WEIGHTS_FILE
from harness import Row, interleave, run
from sample import ROUTER, Side, SpreadRouter

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from tiny_base import WIDTH, tiny_base

BATCH_SIZE, TEXT_TOKENS, K, RANK = 32, 16, 8, 16
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
DTYPE = torch.bfloat16
TIME = 0.5


def write_base(folder: Path) -> None:
    """Write the pipeline: two blocks with separate weights for text and image, four with common ones, width 1024."""
    torch.manual_seed(0)
    pipeline = tiny_base()
    pipeline.transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=4, attention_head_dim=64, num_attention_heads=16,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=(8, 28, 28),
    ).to(DTYPE)  # fmt: skip
    pipeline.save_pretrained(folder)


def resident_bytes() -> int:
    """Return the memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Case:
    """A base, adapters in files, and functions that evaluate one batch of images with a side in pixels."""

    def __init__(self, folder: Path, batch_size: int, side: int) -> None:
        self.folder, self.batch_size = folder, batch_size
        options = f'{{"max_sequence_length": {TEXT_TOKENS}}}'
        pipeline = BasePipeline(f"base:{folder / 'base'}#{options}")
        size = Size.square(side)
        self.config = replace(pipeline.config(), lora=LoraSpec(RANK, RANK, TARGETS))
        self.shape = pipeline.latent_shape(size)
        torch.manual_seed(0)
        self.x = torch.randn(batch_size, *self.shape)
        prompts = ["", *(f"prompt {number}" for number in range(batch_size))]
        self.table = ArgumentTable([pipeline.arguments(own, size) for own in prompts], self.config.trace.batching)
        condition = Condition(arguments=torch.arange(1, batch_size + 1), table=self.table)
        self.conditions = BatchConditions.of(condition, torch.arange(batch_size), reused=True)

    def open_base(self) -> nn.Module:
        """Open the base and read all its weights, which may be memory-mapped."""
        network = FluxTransformer2DModel.from_pretrained(self.folder / "base/transformer", dtype=DTYPE)
        for weights in network.parameters():
            weights.sum()
        return network.eval().requires_grad_(False)

    def write_adapters(self, count: int) -> None:
        """Write adapters with random weights."""
        for number in range(count):
            torch.manual_seed(number)
            expert = build(self.config)
            for weights in expert.parameters():
                nn.init.normal_(weights, std=0.01)
            save_network(expert, self.folder / f"{number:03d}")

    def declaration(self, name: str, clusters: tuple[int, ...], *conditioning: str) -> Declaration:
        """Return the declaration of an expert or the router."""
        channels = self.shape[0]
        space = Statistics((0.0,) * channels, (1.0,) * channels)
        latents, bridge = LatentSpec(autoencoder="base:local", shape=self.shape), flow.Objective().bridge()
        return Declaration(name, clusters, self.config, frozenset(conditioning), space, latents, None, (), bridge)

    def ensemble(self, count: int) -> Ensemble:
        """Return an ensemble of the first adapters, all of them in memory."""
        references = []
        for number in range(count):
            folder, declared = (
                self.folder / f"{number:03d}",
                self.declaration(f"experts/{number}", (number,), "arguments"),
            )
            size = (folder / WEIGHTS_FILE).stat().st_size
            references.append(NetworkReference(declared, partial(load_network, folder), size))
        channels, side, _ = self.shape
        config = RouterConfig(experts=count, channels=channels, size=side, patch=1, **ROUTER)
        router = SpreadRouter(config).eval().requires_grad_(False)
        declared = self.declaration("router", tuple(range(count)))
        ensemble = Ensemble(references, OpenRouter(declared, router), device_options=DeviceOptions(dtype=DTYPE))
        for number in range(count):
            ensemble.cache.get(number)
        return ensemble

    def routed(self, model: Ensemble, used: int) -> Side:
        """Return one evaluation by top-1, in which the images use this many different experts in turn."""
        chosen = torch.arange(self.batch_size) % used
        logits = 10 * nn.functional.one_hot(chosen, len(model.references)).float()

        def evaluate() -> Tensor:
            assert model.router is not None
            model.router.network.given_logits = logits  # type: ignore[assignment]
            with torch.no_grad():
                return model.velocity(self.x, TIME, self.conditions)

        return evaluate

    def alone(self, network: nn.Module) -> Side:
        """Return one evaluation of the base."""
        trace, numbers = self.config.trace, range(1, self.batch_size + 1)
        rows = [self.table.row(number, self.x.device, DTYPE) for number in numbers]
        times = torch.full((self.batch_size,), TIME)
        arguments = network_arguments(trace, pack(self.x.to(DTYPE), trace), times, rows)

        def evaluate() -> Tensor:
            with torch.no_grad():
                return network(**arguments)[0]

        return evaluate


def measure(quick: bool) -> Iterable[Row]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_base(folder / "base")
        case, count = Case(folder, 8 if quick else BATCH_SIZE, 32), 2 if quick else K
        before = resident_bytes()
        shared = case.open_base()
        alone = weight_bytes(shared), resident_bytes() - before
        stack.enter_context(opened_base(case.config, shared))
        case.write_adapters(count)
        ensemble = case.ensemble(count)
        together = weight_bytes(shared), resident_bytes() - before
        yield Row("parameters of the base in millions", alone[0] / 2e6)
        yield Row(f"weights of base and {count} adapters over the base", together[0] / alone[0], 1.2, "lower")
        yield Row(f"resident memory of base and {count} adapters over the base", together[1] / alone[1], 1.2, "lower")
        files = sum(file.stat().st_size for file in (folder / "base/transformer").glob("*.safetensors"))
        adapter = sum(file.stat().st_size for file in (folder / "000").iterdir())
        yield Row("published bytes of an adapter over those of the base", adapter / files, 0.03, "lower")

        used = [1, 2, 4, 8][: count.bit_length()]
        sides: dict[str, Side] = {str(number): case.routed(ensemble, number) for number in used}
        times = interleave({"base": case.alone(case.open_base()), **sides}, 3, clock=time.process_time)
        yield Row("seconds of the base alone", times["base"], None, "lower")
        for number in used:
            name = f"top-1 of {count}, {number} in use, over the base: {case.batch_size} images of 64 tokens"
            yield Row(name, times[str(number)] / times["base"], 1.2 if number == count else None, "lower")
        if quick:
            return
        case.write_adapters(32)
        for tokens, own in ((64, case), (256, Case(folder, BATCH_SIZE, 64))):
            few, many = own.ensemble(2), own.ensemble(32)
            sides = {"2": own.routed(few, 2), "32": own.routed(many, 32)}
            times = interleave(sides, 3, clock=time.process_time)
            name = f"top-1 of 32 over top-1 of 2, all in use: {BATCH_SIZE} images of {tokens} tokens"
            yield Row(name, times["32"] / times["2"], 1.15, "lower")


if __name__ == "__main__":
    run("Experts of a base", measure)
