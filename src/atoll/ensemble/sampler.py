"""From prompts to images: encode the prompts, integrate the ensemble's velocity from noise, decode the latents.

    sampler = atoll.load("RUN")
    sampler.sample(["a red apple"], steps=50, guidance_scale=4.0)[0].save("apple.png")

The noise of an image is a function of (seed, position), so a seed gives the same images at any batch size, up to
float32 rounding: kernels sum batches of different sizes in different orders.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from atoll import flow
from atoll.core.device import download, dtype_name, upload
from atoll.core.errors import AtollError, unknown
from atoll.core.options import Settings
from atoll.core.progress import progress
from atoll.core.sizes import Size
from atoll.encoders.encoders import Encoders
from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.guidance import Guidance
from atoll.ensemble.plan import Plan, plan
from atoll.ensemble.routing import RoutingState, parse
from atoll.ensemble.samples import Gather, Samples, Trace, evaluated_at
from atoll.experts.batch_conditions import BatchConditions
from atoll.experts.validation import ALONE, Processes
from atoll.flow import rng
from atoll.nets import Condition

NOISE_STREAM = 21
"""Random stream of the initial noise. Stream numbers are arbitrary; changing one changes every image."""
DECODE_BATCH = 16
"""Latents that are decoded at once. For one image the autoencoder needs more memory than the networks, because it works
at full resolution; so its batches are smaller."""


@dataclass(eq=False)
class SamplerState:
    """The state of a batch of images between noise and data."""

    x: Tensor
    """Noisy latents (batch, C, H, W)."""
    conditions: BatchConditions
    routing: RoutingState
    cluster: Tensor | None = None
    """The cluster of each image (batch,), for oracle routing."""
    draw: Tensor | None = None
    """A number in [0, 1) for each image (batch,), for rules that draw experts; by default it comes from `routing`."""


OnVelocity = Callable[[Tensor, float, Tensor], object]
"""Called after each evaluation with the states, their time and the velocity."""


@dataclass(frozen=True, eq=False)
class Request:
    """The prompt, class and cluster of each requested image."""

    prompts: list[str | None]
    """Prompt or class of each image as text, for its metadata."""
    condition: Condition | None
    """One row for each distinct pair of prompt and class."""
    rows: Tensor
    """Row of `condition` for each image (images,)."""
    clusters: Tensor | None
    """Cluster of each image (images,), for oracle routing."""


class Sampler:
    """An ensemble with its autoencoder and text encoder."""

    def __init__(self, ensemble: Ensemble, encoders: Encoders, missing: Sequence[str] = ()) -> None:
        self.ensemble, self.encoders = ensemble, encoders
        self.missing = tuple(missing)
        """Experts of the run that are not finished."""
        self.scheduler: Any = None
        """A diffusers scheduler that replaces the solver of the settings."""

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the networks."""
        return self.ensemble.device_options.dtype

    # From prompts to images

    def sample(self, prompts: Sequence[str] | None = None, **options: Any) -> list[Image.Image]:
        """Return images of prompts or of `labels`, or unconditional ones; see `generate` for all options."""
        return self.generate(prompts, **options).images

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[str] | None = None,
        labels: Sequence[str | int] | None = None,
        num_images: int | None = None,
        *,
        clusters: Sequence[int] | None = None,
        size: Size | str | None = None,
        first: int = 0,
        batch_size: int = 64,
        trace: bool = False,
        processes: Processes = ALONE,
        **settings: Any,
    ) -> Samples:
        """Return images with their latents and, with `trace`, every routing decision.

        The images cycle through prompts, labels and clusters (for oracle routing); the default is one image for each.
        They have the default size of the model, or `size` in pixels, such as "96x64" (width and height). `first` is
        the position of the first image, which with the seed determines its noise. Several `processes` share the
        batches, and all of them return all images. Further keyword arguments are the fields of `Settings`.
        """
        chosen = Settings(**{"routing": self.ensemble.routing.text, **settings})
        parse(chosen.routing)  # raises an error before the work
        request = self._request(prompts, labels, num_images=num_images, clusters=clusters)
        size = Size.parse(size) if isinstance(size, str) else size
        latent_size = self.latent_size(size)
        for warning in self._warnings(prompts is not None, labels is not None, settings=chosen):
            print(f"warning: {warning}", file=sys.stderr)
        self.encoders.autoencoder()  # raises an error before the work if it is missing
        count = len(request.prompts)
        batches = [slice(first, min(first + batch_size, count)) for first in range(0, count, batch_size)]
        mine = batches[processes.rank :: processes.size]
        latents, images, decisions = [], [], []
        with progress("sampling", len(mine) * len(evaluated_at(chosen)), unit="steps") as bar:
            for part in mine:
                state = self._begin(request, chosen, part=part, first=first, size=latent_size, trace=trace)
                latents.append(self.run(state, chosen, on_velocity=lambda *_: bar.update(1)))
                images.append(self._decoded(latents[-1]))
                decisions.append(state.routing.trace or [])
        names = tuple(expert.name for expert in self.ensemble.experts)
        made = Trace.of(decisions, names) if trace and mine else None
        gather = Gather(batches, mine, processes)
        return Samples(
            gather.rows(latents), [Image.fromarray(pixels) for pixels in gather.rows(images).numpy()],
            request.prompts, chosen, gather.trace(made, names) if trace else None, dtype_name(self.dtype), size,
        )  # fmt: skip

    def encode(self, prompts: Sequence[str] | None = None, labels: Sequence[str | int] | None = None) -> Condition:
        """Return the condition of prompts, of classes (names or numbers), or of both, one row for each."""
        if prompts is not None and labels is not None and len(prompts) != len(labels):
            raise AtollError(f"there are {len(prompts)} prompts and {len(labels)} labels; expected equal numbers")
        conditioning, device = self.ensemble.conditioning, self.ensemble.device
        text = mask = pooled = label = None
        if prompts is not None and conditioning & {"text", "pooled"}:
            text, mask, pooled = (part.to(device) for part in self.encoders.text_encoder()(list(prompts)))
        if labels is not None and "label" in conditioning:
            label = upload(torch.tensor([self.class_number(name) for name in labels]), device)
        return Condition(text, mask, pooled, label)

    def decode(self, latents: Tensor) -> list[Image.Image]:
        """Return the images of normalized latents (images, C, H, W); raise an error for latents that are not finite."""
        return [Image.fromarray(pixels) for pixels in self._decoded(latents).numpy()]

    def _decoded(self, latents: Tensor) -> Tensor:
        """Return 8-bit pixels (images, H, W, 3) on the CPU."""
        codec = self.encoders.autoencoder()
        parts = torch.split(self.ensemble.space.denormalize(latents.float()), DECODE_BATCH)
        finite, *decoded = download(latents.isfinite().all(), *(codec.decode_tensor(part) for part in parts))
        if not bool(finite):
            raise AtollError(
                "the networks returned values that are not finite; lower the guidance scale, or use --dtype float32"
            )
        return torch.cat(decoded)

    def plan(
        self,
        batch_size: int = 64,
        distinct: int | None = None,
        guided: bool = True,
        *,
        size: Size | None = None,
    ) -> Plan:
        """Estimate the memory of sampling; a batch has `distinct` prompts, by default one for each image.

        `size` is that of the images in pixels; by default it is the largest size of the model.
        """
        distinct, own = distinct or batch_size, None if size is None else self.latent_size(size)
        return plan(self.ensemble, self.encoders, batch_size=batch_size, distinct=distinct, guided=guided, size=own)

    # Sizes

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The sizes in pixels of the images that the experts were trained on, the default first."""
        factor = self.encoders.autoencoder().factor
        return tuple(Size(factor * size.height, factor * size.width) for size in self.ensemble.sizes)

    def latent_size(self, size: Size | None) -> Size:
        """Return the size of the latents of images of some size in pixels; None is the default size.

        Sizes that the experts were not trained on are possible, with a warning, if the networks can compute them.
        """
        if size is None:
            return self.ensemble.sizes[0]
        factor, known = self.encoders.autoencoder().factor, self.sizes
        multiple, sizes = factor * self.ensemble.patch, ", ".join(map(str, known))
        if min(size.height, size.width) < 1 or size.height % multiple or size.width % multiple:
            raise AtollError(
                f"this model has no size {size}; it was trained on {sizes}. The sides of other sizes must be multiples "
                f"of {multiple}"
            )
        # The networks take any grid, so an unknown size may only be worse: a warning, not an error.
        if size not in known:
            print(f"warning: this model was trained on {sizes}; images of {size} may be worse", file=sys.stderr)
        return Size(size.height // factor, size.width // factor)

    # From noise to latents

    def noise(self, count: int, seed: int, first: int = 0, *, size: Size | None = None) -> Tensor:
        """Return the noise (count, C, H, W) of the images from position `first` on, for latents of some size."""
        size = size or self.ensemble.sizes[0]
        shape = (count, self.ensemble.shape[0], size.height, size.width)
        return upload(rng.normal(shape, seed=seed, stream=NOISE_STREAM, first=first), self.ensemble.device)

    def run(self, state: SamplerState, settings: Settings, *, on_velocity: OnVelocity | None = None) -> Tensor:
        """Integrate a batch from noise to latents (batch, C, H, W)."""

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            now = float(t[0])
            v = self.velocity(state, x, t[:1], settings=settings, guidance_scale=settings.guidance_at(now))
            if on_velocity is not None:
                on_velocity(x, now, v)
            return v

        steps, own = settings.steps, settings.scheduler_times
        if self.scheduler is not None:
            return flow.run_scheduler(self.scheduler, velocity, state.x, steps=steps, scheduler_times=own)
        solver, shift = settings.solver, settings.shift
        return flow.solve(velocity, state.x, steps=steps, solver=solver, shift=shift, scheduler_times=own)

    def step(
        self,
        state: SamplerState,
        t: Sequence[float],
        *,
        to: Sequence[float],
        settings: Settings,
        guidance_scale: Guidance,
    ) -> flow.Step:
        """Move each image from its time in t to its time in `to` by one Euler step."""
        # If all times are equal, the networks get one: they then compute the modulation once, not once per image.
        same_time = len(set(t)) == 1

        def velocity(x: Tensor, times: Tensor) -> Tensor:
            times = times[:1] if same_time else times
            return self.velocity(state, x, times, settings=settings, guidance_scale=guidance_scale)

        return flow.step(velocity, state.x, t, to=to)

    def velocity(
        self, state: SamplerState, x: Tensor, t: Tensor, *, settings: Settings, guidance_scale: Guidance
    ) -> Tensor:
        """Return the ensemble's velocity at states x (batch, C, H, W) and times t (batch or 1,) on the CPU."""
        return self.ensemble.velocity(
            x,
            t,
            state.conditions,
            routing=settings.routing,
            guidance_scale=guidance_scale,
            guidance_weights=settings.guidance_weights,
            cluster=state.cluster,
            rescale=settings.rescale,
            draw=state.draw,
            state=state.routing,
        )

    # Requests

    def _request(
        self,
        prompts: Sequence[str] | None,
        labels: Sequence[str | int] | None,
        *,
        num_images: int | None,
        clusters: Sequence[int] | None,
    ) -> Request:
        """Assign prompts, labels and clusters to the images in turn, and encode each distinct pair once."""
        for name, values in (("prompts", prompts), ("labels", labels), ("clusters", clusters)):
            if isinstance(values, str) or (values is not None and not len(values)):
                raise AtollError(f"{name} must be a list that is not empty, got {values!r}")
        if num_images is not None and num_images < 1:
            raise AtollError(f"expected at least one image, got {num_images}")
        count = num_images or max(len(values) if values is not None else 1 for values in (prompts, labels, clusters))

        def turns(values: Sequence[Any] | None) -> list[Any]:
            return [None] * count if values is None else [values[i % len(values)] for i in range(count)]

        pairs = list(zip(turns(prompts), turns(labels), strict=True))
        distinct = list(dict.fromkeys(pairs))
        condition = None
        if prompts is not None or labels is not None:
            texts = None if prompts is None else [prompt for prompt, _ in distinct]
            condition = self.encode(texts, None if labels is None else [label for _, label in distinct])
        row_of = {pair: row for row, pair in enumerate(distinct)}
        rows = torch.tensor([row_of[pair] for pair in pairs])
        texts = [" / ".join(str(part) for part in pair if part is not None) or None for pair in pairs]
        return Request(texts, condition, rows, None if clusters is None else torch.tensor(turns(clusters)))

    def _begin(
        self, request: Request, settings: Settings, *, part: slice, first: int, size: Size, trace: bool
    ) -> SamplerState:
        """Return the initial state of one batch: noise, and the distinct conditions of this batch only."""
        used, rows = torch.unique(request.rows[part], return_inverse=True)
        condition = None if request.condition is None else request.condition[upload(used, self.ensemble.device)]
        return SamplerState(
            self.noise(len(rows), settings.seed, first + part.start, size=size),
            BatchConditions.of(condition, rows, reused=True),
            RoutingState(settings.seed, first + part.start, [] if trace else None),
            None if request.clusters is None else request.clusters[part],
        )

    def class_number(self, name: str | int) -> int:
        """Return the number of a class, given by name or number."""
        known = self.ensemble.experts[0].labels
        if isinstance(name, str) and name not in known:
            raise AtollError(unknown("class", name, known))
        if isinstance(name, int) and not 0 <= name < len(known):
            raise AtollError(f"there is no class {name}: the experts have {len(known)} classes, numbered from 0")
        return known.index(name) if isinstance(name, str) else name

    def _warnings(self, prompts: bool, labels: bool, *, settings: Settings) -> list[str]:
        """Return warnings about missing experts and about inputs without effect."""
        found = []
        if self.missing:
            are, them = ("is", "it") if len(self.missing) == 1 else ("are", "them")
            found.append(f"{', '.join(self.missing)} {are} missing; sampling without {them}")
        conditioning = self.ensemble.conditioning
        given = [name for name, value in (("prompts", prompts), ("labels", labels)) if value]
        takes = {"prompts": conditioning & {"text", "pooled"}, "labels": conditioning & {"label"}}
        found += [
            f"these experts are not conditioned on {name}, which have no effect" for name in given if not takes[name]
        ]
        if settings.guidance_scale != 1 and not any(takes[name] for name in given):
            found.append("without a prompt or label the guidance scale has no effect")
        if any(takes[name] for name in given) and draws_unconditioned(self.ensemble, settings.routing):
            found.append("the router is not conditioned on the prompt, so the drawn expert does not depend on it")
        return found


def draws_unconditioned(ensemble: Ensemble, routing: str) -> bool:
    """Return whether an expert is drawn at t = 1 by a router that is not conditioned on the prompt."""
    first = parse(routing).rules[0]
    unconditioned = ensemble.router is not None and not ensemble.router.declaration.conditioning
    return len(ensemble.references) > 1 and first.name == "drawn" and first.source == "router" and unconditioned
