"""The ensemble against one dense expert, the naive sum over all experts, and diffusers' PixArt with its scheduler.

    python benchmarks/sample.py [--quick] [--json]

All sides make Euler steps for one batch of 64 latents under guidance, with 64 different texts of 77 tokens. Experts
have the width of DiT-S/2 and four blocks on 8 x 8 tokens; the router is to them what the DiT-B/2 of DDM is to its
DiT-XL/2, and takes its full time, but its answers are replaced by drawn ones, so that samples spread over experts as in
use: each has a few likely ones. Ratios are of medians of interleaved repeats.
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
from atoll.data.stages.latents import Statistics
from atoll.ensemble import Ensemble
from atoll.experts.batch_conditions import BatchConditions
from atoll.experts.expert import Declaration, ExpertReference, OpenRouter
from atoll.experts.expert_cache import weight_bytes
from atoll.nets import Condition, DiT, DiTConfig, Router, RouterConfig, load_network, save_network
from atoll.nets.io import WEIGHTS_FILE
from harness import Row, interleave, run

BATCH, TEXT, TEXT_WIDTH, GUIDANCE, K = 64, 77, 768, 4.0, 8
WIDTH, DEPTH, HEADS = 384, 4, 6
ROUTER = {"width": 256, "depth": 2, "heads": 4}
SPACE = Statistics((0.0,) * 4, (1.0,) * 4)
Side = Callable[[], object]


class SpreadRouter(Router):
    """A router that does its work and then answers with given logits."""

    answers: Tensor

    def logits(self, x: Tensor, time: Tensor, condition: Condition | None = None) -> Tensor:
        """The given logits, at the price of computed ones."""
        return super().logits(x, time, condition) * 0 + self.answers[: len(x)]


class Work:
    """One batch, models in a folder, and the ways to take the batch some steps further."""

    def __init__(self, folder: Path, side: int, steps: int) -> None:
        self.folder, self.side, self.steps = folder, side, steps
        torch.manual_seed(0)
        self.x = torch.randn(BATCH, 4, side, side)
        mask = torch.rand(BATCH, 1) * TEXT > torch.arange(TEXT) - 8
        self.condition = Condition(torch.randn(BATCH, TEXT, TEXT_WIDTH), mask)
        self.conditions = BatchConditions.of(self.condition, torch.arange(BATCH), reused=True)

    def ensemble(self, count: int, objective: str = "flow-matching", max_loaded_experts: int | None = None) -> Ensemble:
        """`count` experts in files, behind a router with a realistic spread of answers."""
        bridge = flow.objective(objective).bridge()
        references = [self._reference(number, bridge) for number in range(count)]
        if count == 1:
            return Ensemble(references)
        router = SpreadRouter(RouterConfig(experts=count, size=self.side, **ROUTER)).eval().requires_grad_(False)
        router.answers = 3 * torch.randn(BATCH, count, generator=torch.Generator().manual_seed(0))
        declared = self._declaration("router", tuple(range(count)), flow.Objective().bridge(), conditioning=frozenset())
        return Ensemble(references, OpenRouter(declared, router), max_loaded_experts=max_loaded_experts)

    def _reference(self, number: int, bridge: flow.Bridge) -> ExpertReference:
        place = self.folder / f"{number:03d}"
        if not place.is_dir():
            torch.manual_seed(number)
            save_network(DiT(self._config()), place)
        declared = self._declaration(f"experts/{number:03d}", (number,), bridge, conditioning=frozenset(["text"]))
        file = place / WEIGHTS_FILE
        return ExpertReference(declared, partial(load_network, place), file.stat().st_size, file)

    def _config(self) -> DiTConfig:
        return DiTConfig(WIDTH, DEPTH, HEADS, 2, size=self.side, text_width=TEXT_WIDTH, text_projection="mlp")

    def _declaration(
        self, name: str, clusters: tuple[int, ...], bridge: flow.Bridge, *, conditioning: frozenset[str]
    ) -> Declaration:
        latents = LatentSpec(autoencoder="pixels", shape=(4, self.side, self.side))
        text = TextSpec(encoder="none", weights="w", max_tokens=TEXT, dimensions=TEXT_WIDTH)
        return Declaration(name, clusters, self._config(), conditioning, SPACE, latents, text, (), bridge)

    def routed(self, model: Ensemble, routing: str = "top-1") -> Side:
        """Steps along the ensemble's velocity."""

        def field(x: Tensor, t: Tensor) -> Tensor:
            return model.velocity(x, t[:1], self.conditions, routing=routing, guidance_scale=GUIDANCE)

        return self._solved(field)

    def naive(self, model: Ensemble) -> Side:
        """Every expert on every sample, both halves of guidance apart, then the weighted sum."""

        def field(x: Tensor, t: Tensor) -> Tensor:
            weights = model.route(x, t[:1], None, routing="full")
            total = torch.zeros_like(x)
            for number in range(len(model.references)):
                expert = model.cache.get(number).expert
                conditioned = expert.velocity(x, t, self.condition)
                null = expert.velocity(x, t, self.condition.unconditional())
                total += weights[:, number, None, None, None] * (null + GUIDANCE * (conditioned - null))
            return total

        return self._solved(field)

    def _solved(self, field: Callable[[Tensor, Tensor], Tensor]) -> Side:
        def solve() -> Tensor:
            with torch.no_grad():
                return flow.solve(field, self.x, steps=self.steps)

        return solve

    def pixart(self) -> Side:
        """diffusers' network and scheduler, as its pipelines call them."""
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
                    answer = network(
                        x.repeat(2, 1, 1, 1), encoder_hidden_states=text, encoder_attention_mask=mask,
                        timestep=time.expand(2 * BATCH), return_dict=False,
                    )[0]  # fmt: skip
                    null, conditioned = answer.chunk(2)
                    x = scheduler.step(null + GUIDANCE * (conditioned - null), time, x, return_dict=False)[0]
            return x

        return solve


def measure(quick: bool) -> Iterable[Row]:
    with tempfile.TemporaryDirectory() as folder:
        work = Work(Path(folder), side=16, steps=1 if quick else 3)
        repeats = 3 if quick else 7
        eight, dense = work.ensemble(K), work.ensemble(1)
        yield from _speed(work, eight, dense, repeats)
        if quick:
            return
        yield from _growth(work, repeats, "")
        yield from _bridge(work, dense, 4 * repeats)
        yield from _residency(work, eight, repeats)
    with tempfile.TemporaryDirectory() as folder:
        yield from _growth(Work(Path(folder), side=32, steps=1), 5, ", 256 tokens a picture as in the papers")


def _speed(work: Work, eight: Ensemble, dense: Ensemble, repeats: int) -> Iterable[Row]:
    sides = {"dense": work.routed(dense), "top-1": work.routed(eight), "top-2": work.routed(eight, "top-2")}
    times = interleave({**sides, "pixart": work.pixart()}, repeats)
    yield Row("top-1 of 8 over one dense expert", times["top-1"] / times["dense"], 1.15, "lower")
    yield Row("top-2 of 8 over one dense expert", times["top-2"] / times["dense"], 2.2, "lower")
    yield Row("diffusers' PixArt over one dense expert", times["pixart"] / times["dense"], 1.1)
    yield Row("diffusers' PixArt over top-1 of 8", times["pixart"] / times["top-1"], 1.0)
    naive = interleave({"naive": work.naive(eight), "top-1": sides["top-1"]}, repeats=3, warmup=0)
    yield Row("naive evaluation of all 8 over top-1", naive["naive"] / naive["top-1"], 6.0)
    yield Row("seconds of one step of one dense expert", times["dense"] / work.steps, None, "lower")


def _growth(work: Work, repeats: int, where: str) -> Iterable[Row]:
    """More experts, the same batch: the same products in smaller parts, and more weights to read."""
    times = interleave({str(count): work.routed(work.ensemble(count)) for count in (2, 32)}, repeats)
    yield Row(f"top-1 of 32 over top-1 of 2{where}", times["32"] / times["2"], 1.15, "lower")


def _bridge(work: Work, dense: Ensemble, repeats: int) -> Iterable[Row]:
    """The same network read as a DDPM expert: what carrying its answers over the bridge costs."""
    sides = {"plain": work.routed(dense), "bridged": work.routed(work.ensemble(1, "ddpm"))}
    times = interleave(sides, repeats)
    yield Row("one expert with the bridge over without", times["bridged"] / times["plain"], 1.02, "lower")


def _residency(work: Work, eight: Ensemble, repeats: int) -> Iterable[Row]:
    """Two of eight experts in memory."""
    two = work.ensemble(K, max_loaded_experts=2)
    times = interleave({"two": work.routed(two), "eight": work.routed(eight)}, repeats)
    yield Row("top-1 with 2 of 8 experts in memory over all 8", times["two"] / times["eight"], None, "lower")
    kept = [sum(weight_bytes(here.expert.network) for here in model.cache._loaded.values()) for model in (two, eight)]
    yield Row("bytes of experts in memory, 2 of 8 over all 8", kept[0] / kept[1], None, "lower")


if __name__ == "__main__":
    run("Sampling", measure)
