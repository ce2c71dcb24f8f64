"""Compare the ensemble with one dense expert, a naive sum over all experts, and diffusers' PixArt with its scheduler.

    python benchmarks/sample.py [--quick] [--json]

All sides make guided Euler steps for one batch of 64 latents, with 64 different texts of 77 tokens. Experts have the
width of DiT-S/2 and four blocks on 8 x 8 tokens. The router has the same relative size as DDM's DiT-B/2 router beside
its DiT-XL/2 experts. It runs, but its logits are replaced by random ones, so that images spread over the experts as
with a trained router. Values are ratios of medians over interleaved repeats.
"""

import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, PixArtTransformer2DModel
from torch import Tensor

from atoll import flow
from atoll.core.manifests import LatentSpec, TextSpec
from atoll.encoders.autoencoder import Statistics
from atoll.ensemble import Ensemble
from atoll.experts.batch_conditions import BatchConditions
from atoll.experts.expert import Declaration, NetworkReference, OpenRouter
from atoll.experts.expert_cache import weight_bytes
from atoll.nets import Condition, DiT, DiTConfig, Router, RouterConfig, load_network, save_network
from atoll.nets.io import WEIGHTS_FILE
from harness import Row, interleave, run

BATCH_SIZE, TEXT_TOKENS, TEXT_WIDTH, GUIDANCE_SCALE, K = 64, 77, 768, 4.0, 8
WIDTH, DEPTH, HEADS = 384, 4, 6
ROUTER = {"width": 256, "depth": 2, "heads": 4}
SPACE = Statistics((0.0,) * 4, (1.0,) * 4)
Side = Callable[[], object]


class SpreadRouter(Router):
    """A router that computes its logits and then returns given ones."""

    given_logits: Tensor

    def logits(self, x: Tensor, time: Tensor, condition: Condition | None = None) -> Tensor:
        """Return the given logits at the cost of computed ones."""
        return super().logits(x, time, condition) * 0 + self.given_logits[: len(x)]


class Case:
    """One batch, models in a folder, and the functions that sample the batch."""

    def __init__(self, folder: Path, side: int, steps: int) -> None:
        self.folder, self.side, self.steps = folder, side, steps
        torch.manual_seed(0)
        self.x = torch.randn(BATCH_SIZE, 4, side, side)
        mask = torch.rand(BATCH_SIZE, 1) * TEXT_TOKENS > torch.arange(TEXT_TOKENS) - 8
        self.condition = Condition(torch.randn(BATCH_SIZE, TEXT_TOKENS, TEXT_WIDTH), mask)
        self.conditions = BatchConditions.of(self.condition, torch.arange(BATCH_SIZE), reused=True)

    def ensemble(self, count: int, objective: str = "flow-matching", max_loaded_experts: int | None = None) -> Ensemble:
        """Return an ensemble of `count` experts in files, with a router whose outputs have a realistic spread."""
        bridge = flow.objective(objective).bridge()
        references = [self._reference(number, bridge) for number in range(count)]
        if count == 1:
            return Ensemble(references)
        router = SpreadRouter(RouterConfig(experts=count, size=self.side, **ROUTER)).eval().requires_grad_(False)
        router.given_logits = 3 * torch.randn(BATCH_SIZE, count, generator=torch.Generator().manual_seed(0))
        declared = self._declaration("router", tuple(range(count)), flow.Objective().bridge(), conditioning=frozenset())
        return Ensemble(references, OpenRouter(declared, router), max_loaded_experts=max_loaded_experts)

    def _reference(self, number: int, bridge: flow.Bridge) -> NetworkReference:
        folder = self.folder / f"{number:03d}"
        if not folder.is_dir():
            torch.manual_seed(number)
            save_network(DiT(self._config()), folder)
        declared = self._declaration(f"experts/{number:03d}", (number,), bridge, conditioning=frozenset(["text"]))
        file = folder / WEIGHTS_FILE
        return NetworkReference(declared, partial(load_network, folder), file.stat().st_size, file)

    def _config(self) -> DiTConfig:
        return DiTConfig(WIDTH, DEPTH, HEADS, 2, size=self.side, text_width=TEXT_WIDTH, text_projection="mlp")

    def _declaration(
        self, name: str, clusters: tuple[int, ...], bridge: flow.Bridge, *, conditioning: frozenset[str]
    ) -> Declaration:
        latents = LatentSpec(autoencoder="pixels", shape=(4, self.side, self.side))
        text = TextSpec(encoder="none", weights="w", max_tokens=TEXT_TOKENS, dimensions=TEXT_WIDTH)
        return Declaration(name, clusters, self._config(), conditioning, SPACE, latents, text, (), bridge)

    def routed(self, model: Ensemble, routing: str = "top-1") -> Side:
        """Return a function that makes Euler steps with the ensemble's velocity."""

        def field(x: Tensor, t: Tensor) -> Tensor:
            return model.velocity(x, t[:1], self.conditions, routing=routing, guidance_scale=GUIDANCE_SCALE)

        return self._solved(field)

    def naive(self, model: Ensemble) -> Side:
        """Return the same with every expert on every image, and two passes per expert for guidance."""

        def field(x: Tensor, t: Tensor) -> Tensor:
            weights = model.route(x, t[:1], None, routing="full")
            total = torch.zeros_like(x)
            for number in range(len(model.references)):
                expert = model.cache.get(number).expert
                conditional = expert.velocity(x, t, self.condition)
                unconditional = expert.velocity(x, t, self.condition.unconditional())
                total += weights[:, number, None, None, None] * (
                    unconditional + GUIDANCE_SCALE * (conditional - unconditional)
                )
            return total

        return self._solved(field)

    def _solved(self, field: Callable[[Tensor, Tensor], Tensor]) -> Side:
        def solve() -> Tensor:
            with torch.no_grad():
                return flow.solve(field, self.x, steps=self.steps)

        return solve

    def pixart(self) -> Side:
        """Return the same with the network and scheduler of diffusers, called as in its pipelines."""
        torch.manual_seed(0)
        network = PixArtTransformer2DModel(
            num_attention_heads=HEADS, attention_head_dim=WIDTH // HEADS, in_channels=4, out_channels=4,
            num_layers=DEPTH, cross_attention_dim=WIDTH, sample_size=self.side, patch_size=2,
            caption_channels=TEXT_WIDTH, use_additional_conditions=False,
        ).eval()  # fmt: skip
        text = torch.cat([torch.zeros_like(self.condition.text), self.condition.text])
        mask = self.condition.text_mask.repeat(2, 1)

        def solve() -> Tensor:
            scheduler = FlowMatchEulerDiscreteScheduler()
            scheduler.set_timesteps(self.steps)
            x = self.x
            with torch.no_grad():
                for time in scheduler.timesteps:
                    output = network(
                        x.repeat(2, 1, 1, 1), encoder_hidden_states=text, encoder_attention_mask=mask,
                        timestep=time.expand(2 * BATCH_SIZE), return_dict=False,
                    )[0]  # fmt: skip
                    unconditional, conditional = output.chunk(2)
                    x = scheduler.step(
                        unconditional + GUIDANCE_SCALE * (conditional - unconditional), time, x, return_dict=False
                    )[0]
            return x

        return solve


def measure(quick: bool) -> Iterable[Row]:
    with tempfile.TemporaryDirectory() as folder:
        case = Case(Path(folder), side=16, steps=1 if quick else 3)
        repeats = 3 if quick else 7
        eight, dense = case.ensemble(K), case.ensemble(1)
        yield from _speed(case, eight, dense, repeats)
        if quick:
            return
        yield from _growth(case, repeats, "")
        yield from _bridge(case, dense, 4 * repeats)
        yield from _offloading(case, eight, repeats)
    with tempfile.TemporaryDirectory() as folder:
        yield from _growth(Case(Path(folder), side=32, steps=1), 5, ", 256 tokens per image as in the papers")


def _speed(case: Case, eight: Ensemble, dense: Ensemble, repeats: int) -> Iterable[Row]:
    sides = {"dense": case.routed(dense), "top-1": case.routed(eight), "top-2": case.routed(eight, "top-2")}
    times = interleave({**sides, "pixart": case.pixart()}, repeats)
    yield Row("top-1 of 8 over one dense expert", times["top-1"] / times["dense"], 1.15, "lower")
    yield Row("top-2 of 8 over one dense expert", times["top-2"] / times["dense"], 2.2, "lower")
    yield Row("diffusers' PixArt over one dense expert", times["pixart"] / times["dense"], 1.1)
    yield Row("diffusers' PixArt over top-1 of 8", times["pixart"] / times["top-1"], 1.0)
    naive = interleave({"naive": case.naive(eight), "top-1": sides["top-1"]}, repeats=3, warmup=0)
    yield Row("naive evaluation of all 8 over top-1", naive["naive"] / naive["top-1"], 6.0)
    yield Row("seconds per step of one dense expert", times["dense"] / case.steps, None, "lower")


def _growth(case: Case, repeats: int, where: str) -> Iterable[Row]:
    """Measure more experts on the same batch: the same FLOPs in smaller matrix products, and more weights to read."""
    times = interleave({str(count): case.routed(case.ensemble(count)) for count in (2, 32)}, repeats)
    yield Row(f"top-1 of 32 over top-1 of 2{where}", times["32"] / times["2"], 1.15, "lower")


def _bridge(case: Case, dense: Ensemble, repeats: int) -> Iterable[Row]:
    """Measure the cost of the bridge: the same network as a DDPM expert."""
    sides = {"plain": case.routed(dense), "bridged": case.routed(case.ensemble(1, "ddpm"))}
    times = interleave(sides, repeats)
    yield Row("one expert with the bridge over without", times["bridged"] / times["plain"], 1.02, "lower")


def _offloading(case: Case, eight: Ensemble, repeats: int) -> Iterable[Row]:
    """Measure sampling with two of eight experts in memory."""
    two = case.ensemble(K, max_loaded_experts=2)
    times = interleave({"two": case.routed(two), "eight": case.routed(eight)}, repeats)
    yield Row("top-1 with 2 of 8 experts in memory over all 8", times["two"] / times["eight"], None, "lower")
    kept = [sum(weight_bytes(each.expert.network) for each in model.cache._loaded.values()) for model in (two, eight)]
    yield Row("bytes of experts in memory, 2 of 8 over all 8", kept[0] / kept[1], None, "lower")


if __name__ == "__main__":
    run("Sampling", measure)
