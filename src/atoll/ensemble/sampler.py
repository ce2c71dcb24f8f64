"""From prompts to images: encode the prompts, integrate the ensemble's velocity from noise, decode the latents.

    sampler = atoll.load("RUN")
    sampler.sample("a red apple", num_inference_steps=50, guidance_scale=4.0)[0].save("apple.png")

The arguments have the names of diffusers pipelines. The noise of an image is a function of (seed, position), so a seed
gives the same images at any batch size, up to float32 rounding: kernels sum batches of different sizes in different
orders.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import update_wrapper
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch
from PIL import Image
from torch import Tensor

from atoll import flow
from atoll.core.device import compute_dtype, download, dtype_name, parse_devices, upload
from atoll.core.distributed import ALONE, DistContext
from atoll.core.errors import AtollError, suggest_keywords, unknown
from atoll.core.layout import CONFIG_FILE
from atoll.core.names import GuidanceName, GuidanceWeights, SolverName
from atoll.core.networks import BaseConfig
from atoll.core.options import SampleSettings
from atoll.core.progress import progress, say, warn
from atoll.core.sizes import Size
from atoll.encoders.base_pipeline import BasePipeline
from atoll.encoders.encoders import Encoders
from atoll.ensemble.ensemble import Ensemble, Guidance
from atoll.ensemble.routing import RoutingState, parse
from atoll.experts.batch_conditions import BatchConditions
from atoll.experts.expert import DeviceOptions, open_router
from atoll.experts.pipeline_folder import is_folder, open_folder
from atoll.experts.run import open_run
from atoll.flow import rng
from atoll.flow.schedules import TIMESTEP_SCALE
from atoll.nets import Condition, concatenate
from atoll.nets.arguments import ArgumentTable
from atoll.nets.conditioning import OF_PROMPTS

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

    @property
    def prompt_embeds(self) -> Tensor | None:
        """Text tokens of each image (batch, length, width)."""
        text = self.conditions.distinct.text
        return None if text is None else text[upload(self.conditions.rows, text.device)]

    @prompt_embeds.setter
    def prompt_embeds(self, text: Tensor) -> None:
        """Give each image a condition of its own, before the distinct ones."""
        before, count = self.conditions, len(self.x)
        own = replace(before.distinct[upload(before.rows, text.device)], text=text)
        self.conditions = BatchConditions(
            concatenate([own, before.distinct]), torch.arange(count), count + before.count, True,
            negative=count + before.null,
        )  # fmt: skip


OnVelocity = Callable[[Tensor, float, Tensor], object]
"""Called after each evaluation with the states, their time and the velocity."""
OnStepEnd = Callable[[Any, int, Tensor, dict[str, Any]], dict[str, Any] | None]
"""Called after each step with the sampler or pipeline, the number of the step, its timestep (0 to 1000) and tensors by
name. Tensors in the returned dictionary replace the given ones, as in diffusers."""
STEP_TENSORS = ("latents", "prompt_embeds")
"""Tensors that such a callback can ask for."""
P = ParamSpec("P")


@dataclass(frozen=True, eq=False)
class Trace:
    """All routing decisions: times (evaluations,), probabilities and weights (evaluations, images, experts)."""

    t: Tensor
    probabilities: Tensor
    weights: Tensor
    experts: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Samples:
    """Sampled images with their latents, prompts and settings."""

    latents: Tensor
    """Normalized latents (images, C, H, W)."""
    images: list[Image.Image]
    prompts: list[str | None]
    """Prompt or class of each image."""
    settings: SampleSettings
    trace: Trace | None = None
    dtype: str = "float32"
    """Precision of the networks."""
    size: Size | None = None
    """The requested size in pixels; None for the default."""

    def to_dict(self) -> dict[str, object]:
        """Return prompts and settings as plain values."""
        return {"prompts": self.prompts, "settings": asdict(self.settings), "dtype": self.dtype, **self._size()}

    def metadata(self, number: int) -> dict[str, object]:
        """Return everything that is needed to reproduce one of the images."""
        settings = {**asdict(self.settings), "dtype": self.dtype, **self._size()}
        return {"prompt": self.prompts[number], "number": number, **settings}

    def _size(self) -> dict[str, str]:
        return {} if self.size is None else {"size": str(self.size)}


def _images_only(
    generate: "Callable[Concatenate[Sampler, P], Samples]",
) -> "Callable[Concatenate[Sampler, P], list[Image.Image]]":
    def sample(self: "Sampler", /, *args: P.args, **kwargs: P.kwargs) -> list[Image.Image]:
        """Return only the images of `generate`, which has the same arguments."""
        return generate(self, *args, **kwargs).images

    return update_wrapper(sample, generate, assigned=())  # for help(), which shows the arguments of `generate`


class Sampler:
    """An ensemble with its autoencoder and text encoder."""

    def __init__(self, ensemble: Ensemble, encoders: Encoders, missing: Sequence[str] = ()) -> None:
        self.ensemble, self.encoders = ensemble, encoders
        self.dtype = ensemble.device_options.dtype
        """The precision of the networks."""
        self.missing = tuple(missing)
        """Experts of the run that are not finished."""
        self.scheduler: Any = None
        """A diffusers scheduler that replaces the solver of the settings."""
        self.interrupt = False
        """Set it to end `generate` after the current step, from a callback or another thread."""

    def __repr__(self) -> str:
        ensemble, count = self.ensemble, len(self.ensemble.references)
        networks = ensemble.declarations[0].name if count == 1 else f"{count} experts"
        router = "" if count == 1 else " with a router" if ensemble.router else " without a router"
        takes = ", ".join(sorted(ensemble.conditioning)) or "nothing"
        where = f"{ensemble.device} in {dtype_name(self.dtype)}"
        shape = "x".join(map(str, ensemble.shape))
        return f"Sampler({networks}{router}, conditioned on {takes}; latents {shape}; on {where})"

    # From prompts to images

    @suggest_keywords
    @torch.no_grad()
    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        negative_prompt: str | Sequence[str] | None = None,
        prompt_embeds: Tensor | None = None,
        prompt_attention_mask: Tensor | None = None,
        pooled_prompt_embeds: Tensor | None = None,
        label: str | int | Sequence[str | int] | None = None,
        cluster: int | Sequence[int] | None = None,
        num_images: int | None = None,
        num_images_per_prompt: int = 1,
        width: int | None = None,
        height: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        guidance_rescale: float | None = None,
        guidance_interval: tuple[float, float] | None = None,
        guidance: GuidanceName | None = None,
        guidance_weights: GuidanceWeights | None = None,
        routing: str | None = None,
        solver: SolverName | None = None,
        shift: float | None = None,
        scheduler_times: bool | None = None,
        seed: int | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        latents: Tensor | None = None,
        callback_on_step_end: OnStepEnd | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        settings: SampleSettings | None = None,
        first: int = 0,
        batch_size: int = 64,
        trace: bool = False,
        processes: DistContext = ALONE,
    ) -> Samples:
        """Return images of prompts, of classes (`label`), of both, or unconditional ones, with their latents.

        `prompt`, `negative_prompt`, `label` and `cluster` (for oracle routing) are one value or several. The images
        cycle through them; the default is `num_images_per_prompt` for each. `encode_prompt` returns the three tensors
        that replace a prompt. `width` and `height` are in pixels; omit both for the default size of the model.

        The noise of an image is given by `latents` (images, C, H, W), by the generator of each image, or by the seed
        and the image's position, which is `first` for the first one; a single generator draws the seed.
        `callback_on_step_end` is called after each step of each batch; see `OnStepEnd`. The arguments from
        num_inference_steps to seed change fields of `settings`. With `trace`, the result has every routing decision.
        Several `processes` share the batches, and all of them return all images.
        """
        # Check the arguments.
        self.interrupt = False
        generators = [generator] if isinstance(generator, torch.Generator) else generator
        seeds = [int(torch.randint(2**31, (), generator=own, device=own.device)) for own in generators or ()]
        changes: dict[str, Any] = {
            "steps": num_inference_steps, "guidance_scale": guidance_scale, "rescale": guidance_rescale,
            "guidance_interval": guidance_interval, "guidance": guidance, "guidance_weights": guidance_weights,
            "routing": routing, "solver": solver, "shift": shift, "scheduler_times": scheduler_times,
            "seed": seeds[0] if seed is None and seeds else seed,
        }  # fmt: skip
        chosen = settings or SampleSettings(routing=self.ensemble.routing.text)
        chosen = replace(chosen, **{name: value for name, value in changes.items() if value is not None})
        parse(chosen.routing)  # raises an error for an unknown rule
        if (fixed := chosen.for_steps(self.ensemble.steps)) != chosen:
            say(f"note: few-step students sample in {fixed.steps} Euler steps without guidance", file=sys.stderr)
            chosen = fixed
        embeds = None
        if prompt_embeds is not None:
            if prompt is not None or "arguments" in self.ensemble.conditioning:
                raise AtollError("prompt_embeds replaces a prompt, and only for experts that are no base networks")
            if pooled_prompt_embeds is None and "pooled" in self.ensemble.conditioning:
                raise AtollError("these experts also need pooled_prompt_embeds; encode_prompt returns both")
            mask = None if prompt_attention_mask is None else prompt_attention_mask.bool()
            embeds = Condition(prompt_embeds, mask, pooled_prompt_embeds).to(self.ensemble.device)
        # Encoded prompts are named by their rows.
        named = prompt if prompt_embeds is None else range(len(prompt_embeds))
        texts = _repeated("prompt", named, num_images_per_prompt)
        negatives = _repeated("negative_prompt", negative_prompt, num_images_per_prompt)
        labels = _repeated("label", label, num_images_per_prompt)
        clusters = _repeated("cluster", cluster, num_images_per_prompt)
        if negatives is not None and (texts is None or chosen.guidance == "autoguidance"):
            raise AtollError("negative_prompt needs a prompt, and classifier-free guidance")
        if chosen.guidance == "autoguidance" and chosen.guidance_scale != 1:
            self.ensemble.check_weak()  # an error before the work
        if (1 if num_images is None else num_images) < 1 or num_images_per_prompt < 1:
            raise AtollError(f"expected at least one image, got {num_images or num_images_per_prompt}")
        lengths = [len(values) for values in (texts, labels, clusters) if values is not None]
        count = num_images or max(lengths, default=num_images_per_prompt)
        for name, given in (("latents", latents), ("generators", generators if len(seeds) > 1 else None)):
            if given is not None and len(given) != count:
                raise AtollError(f"got {len(given)} {name} for {count} images")
        if (width is None) != (height is None):
            raise AtollError("give both width and height, or neither")
        size = None if width is None or height is None else Size(height, width)
        if latents is not None and size is None:
            size = Size(*(self.encoders.autoencoder().factor * side for side in latents.shape[2:]))
        latent_size = self.latent_size(size)
        if latents is not None and latents.shape[1:] != (self.ensemble.shape[0], *astuple(latent_size)):
            raise AtollError(
                f"got latents of shape {tuple(latents.shape)}, expected "
                f"({count}, {self.ensemble.shape[0]}, {latent_size.height}, {latent_size.width})"
            )
        inputs = list(callback_on_step_end_tensor_inputs)
        if wrong := next((name for name in inputs if name not in STEP_TENSORS), None):
            raise AtollError(unknown("tensor input of the callback", wrong, STEP_TENSORS))

        # Assign prompts, labels and clusters to the images in turn.
        def turns(values: Sequence[Any] | None) -> list[Any]:
            return [None] * count if values is None else [values[i % len(values)] for i in range(count)]

        pairs = list(zip(turns(texts), turns(labels), strict=True))
        condition, rows = self._encode_distinct(pairs, turns(negatives), embeds=embeds, size=size)
        for warning in self._warnings(texts is not None, labels is not None, settings=chosen):
            warn(warning)
        self.encoders.autoencoder()  # raises an error before the work if it is missing

        # Sample the batches of this process, each with its distinct conditions only.
        batches = [slice(start, min(start + batch_size, count)) for start in range(0, count, batch_size)]
        mine = batches[processes.rank :: processes.size]
        made, images, decisions = [], [], []
        with progress("sampling", len(mine) * len(evaluated_at(chosen)), unit="steps") as bar:
            for part in mine:
                used, (own, *null_rows) = torch.unique(rows[:, part], return_inverse=True)
                negative = null_rows[0] if null_rows else None
                own_seeds = seeds[part] if len(seeds) > 1 and seed is None else chosen.seed
                noise = self.noise(len(own), own_seeds, first + part.start, size=latent_size)
                state = SamplerState(
                    noise if latents is None else latents[part].to(noise),
                    BatchConditions.of(condition[upload(used, noise.device)], own, negative=negative, reused=True),
                    RoutingState(own_seeds, first + part.start, [] if trace else None),
                    None if clusters is None else torch.tensor(turns(clusters)[part]),
                )
                on_step = self._on_step(state, callback_on_step_end, inputs)
                made.append(self.run(state, chosen, on_velocity=lambda *_: bar.update(1), on_step=on_step))
                images.append(self._decoded(made[-1]))
                decisions.append(state.routing.trace or [])
                if self.interrupt:
                    break

        # Join the batches of all processes. An interrupt leaves out the batches that were not begun.
        done = torch.zeros(count, dtype=torch.int32)
        for part in mine[: len(made)]:
            done[part] = 1
        kept = processes.sum(done).nonzero()[:, 0]
        routes = None
        if trace:
            # It also ends a batch after fewer evaluations; the trace has those of all images.
            shortest = min(min(lengths) for lengths in processes.on_all(lambda: list(map(len, decisions))) if lengths)
            decisions = [part[:shortest] for part in decisions]
            t = processes.on_main(lambda: [float(decision.t[0]) for decision in decisions[0]])
            p = [torch.stack([one.probabilities for one in part], 1) for part in decisions]
            weights = [torch.stack([one.weights for one in part], 1) for part in decisions]
            routes = Trace(
                torch.tensor(t),
                _join(p, mine, kept, processes).transpose(0, 1),
                _join(weights, mine, kept, processes).transpose(0, 1),
                tuple(expert.name for expert in self.ensemble.declarations),
            )
        names = [
            " / ".join(str(own) for own in (None if embeds else text, name) if own is not None) or None
            for text, name in pairs
        ]
        pixels = _join(images, mine, kept, processes).numpy()
        return Samples(
            _join(made, mine, kept, processes), [Image.fromarray(image) for image in pixels],
            [names[number] for number in kept.tolist()], chosen, routes, dtype_name(self.dtype), size,
        )  # fmt: skip

    sample = _images_only(generate)

    def encode(
        self,
        prompts: Sequence[str] | None = None,
        labels: Sequence[str | int] | None = None,
        *,
        embeds: Condition | None = None,
        size: Size | None = None,
    ) -> Condition:
        """Return the condition of prompts, of classes (names or numbers), or of both, one row for each.

        `embeds` replaces the prompts by their encoded text. For a base network, the condition holds for images of one
        size in pixels, by default the default size.
        """
        if prompts is not None and labels is not None and len(prompts) != len(labels):
            raise AtollError(f"there are {len(prompts)} prompts and {len(labels)} labels; expected equal numbers")
        conditioning, device = self.ensemble.conditioning, self.ensemble.device
        text = mask = pooled = label = rows = table = None
        if "arguments" in conditioning:
            base = self.encoders.autoencoder()
            assert isinstance(base, BasePipeline)
            for declared in self.ensemble.declarations:
                if isinstance(declared.network, BaseConfig) and declared.network.trace != base.traced[0]:
                    raise AtollError(
                        f"{declared.name} was trained with another version of diffusers, which calls the network of "
                        "the base in another way; use that version"
                    )
            # Row 0 is the null condition. The prompts of a base network have arguments for one size.
            found = [base.arguments(prompt, size or self.sizes[0]) for prompt in ("", *(prompts or ()))]
            table = ArgumentTable(found, base.traced[0].batching)
            count = len(labels or [None])
            rows = upload(torch.arange(1, len(found)) if prompts else torch.zeros(count, dtype=torch.long), device)
            if prompts:
                pooled = torch.stack([base.pooled(own) for own in found[1:]]).to(device)
        elif prompts is not None and conditioning & {"text", "pooled"}:
            text, mask, pooled = (part.to(device) for part in self.encoders.text_encoder()(list(prompts)))
        if labels is not None and "label" in conditioning:
            label = upload(torch.tensor([self.class_number(name) for name in labels]), device)
        if embeds is not None:
            return replace(embeds, label=label)
        return Condition(text, mask, pooled, label, rows, table=table)

    def _encode_distinct(
        self,
        pairs: Sequence[tuple[Any, str | int | None]],
        negatives: Sequence[str | None],
        *,
        embeds: Condition | None,
        size: Size | None,
    ) -> tuple[Condition, Tensor]:
        """Encode each distinct pair of prompt and label once, and each distinct negative prompt.

        A prompt is a text or, with `embeds`, its row there. Return the conditions and their rows (1 or 2, images): of
        the images and, if they have any, of their negative prompts.
        """
        distinct = {pair: row for row, pair in enumerate(dict.fromkeys(pairs))}
        texts = [text for text, _ in distinct if text is not None] or None
        labels = [label for _, label in distinct if label is not None] or None
        given = None if embeds is None else embeds[torch.tensor(texts)]
        condition = self.encode(None if given else texts, labels, embeds=given, size=size)
        rows = [[distinct[pair] for pair in pairs]]
        if negatives[0] is not None and self.ensemble.conditioning & OF_PROMPTS:
            others = {text: len(distinct) + row for row, text in enumerate(dict.fromkeys(negatives))}
            negative = self.encode([text for text in others if text is not None], size=size)
            # Only the text is negative; the class is the null class.
            null = None if condition.label is None else condition.label.new_full((len(others),), -1)
            condition = concatenate([condition, replace(negative, label=null)])
            rows.append([others[text] for text in negatives])
        return condition, torch.tensor(rows)

    def encode_prompt(self, prompt: str | Sequence[str]) -> dict[str, Tensor | None]:
        """Return the encoded text as keywords of `generate`, which need no text encoder."""
        text, mask, pooled = self.encoders.text_encoder()([prompt] if isinstance(prompt, str) else list(prompt))
        return {"prompt_embeds": text, "prompt_attention_mask": mask, "pooled_prompt_embeds": pooled}

    def decode(self, latents: Tensor) -> list[Image.Image]:
        """Return the images of normalized latents (images, C, H, W); raise an error for latents that are not finite."""
        return [Image.fromarray(pixels) for pixels in self._decoded(latents).numpy()]

    def _decoded(self, latents: Tensor) -> Tensor:
        """Return 8-bit pixels (images, H, W, 3) on the CPU."""
        codec = self.encoders.autoencoder()
        parts = torch.split(self.ensemble.normalization.denormalize(latents.float()), DECODE_BATCH)
        finite, *decoded = download(latents.isfinite().all(), *(codec.decode(part) for part in parts))
        if not bool(finite):
            raise AtollError(
                "the networks returned values that are not finite; lower the guidance scale, or use --dtype float32"
            )
        return torch.cat(decoded)

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
            warn(f"this model was trained on {sizes}; images of {size} may be worse")
        return Size(size.height // factor, size.width // factor)

    # From noise to latents

    def noise(self, count: int, seed: int | Sequence[int], first: int = 0, *, size: Size | None = None) -> Tensor:
        """Return the noise (count, C, H, W) of the images from position `first` on, for latents of some size.

        An image with a seed of its own is at position 0.
        """
        if not isinstance(seed, int):
            return torch.cat([self.noise(1, own, size=size) for own in seed])
        size = size or self.ensemble.sizes[0]
        shape = (count, self.ensemble.shape[0], size.height, size.width)
        return upload(rng.normal(shape, seed=seed, stream=rng.Stream.SAMPLE, first=first), self.ensemble.device)

    def run(
        self,
        state: SamplerState,
        settings: SampleSettings,
        *,
        on_velocity: OnVelocity | None = None,
        on_step: flow.OnStep | None = None,
    ) -> Tensor:
        """Integrate a batch from noise to latents (batch, C, H, W)."""

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            now = float(t[0])
            v = self.velocity(state, x, t[:1], settings=settings, guidance_scale=settings.guidance_at(now))
            if on_velocity is not None:
                on_velocity(x, now, v)
            return v

        settings = settings.for_steps(self.ensemble.steps)
        steps, own = settings.steps, settings.scheduler_times
        if self.ensemble.steps is None and self.scheduler is not None:
            return flow.run_scheduler(
                self.scheduler, velocity, state.x, steps=steps, scheduler_times=own, on_step=on_step
            )
        solver, shift = settings.solver, settings.shift
        return flow.solve(
            velocity, state.x, steps=steps, solver=solver, shift=shift, scheduler_times=own, on_step=on_step
        )

    def _on_step(self, state: SamplerState, callback: OnStepEnd | None, inputs: Sequence[str]) -> flow.OnStep:
        """Return what follows each step of a batch: the callback of the user, and the end if `interrupt` is set."""

        def on_step(number: int, t: float, x: Tensor) -> tuple[Tensor, bool]:
            if callback is not None:
                given = {name: x if name == "latents" else state.prompt_embeds for name in inputs}
                text = given.get("prompt_embeds")
                changed = callback(self, number, torch.tensor(TIMESTEP_SCALE * t), given) or {}
                x = changed.get("latents", x)
                if changed.get("prompt_embeds", text) is not text:
                    state.prompt_embeds = changed["prompt_embeds"]
            return x, not self.interrupt

        return on_step

    def step(
        self,
        state: SamplerState,
        t: Sequence[float],
        *,
        to: Sequence[float],
        settings: SampleSettings,
        guidance_scale: Guidance,
    ) -> flow.SolverStep:
        """Move each image from its time in t to its time in `to` by one Euler step."""
        # If all times are equal, the networks get one: they then compute the modulation once, not once per image.
        count = 1 if len(set(t)) == 1 else len(t)

        def velocity(x: Tensor, times: Tensor) -> Tensor:
            return self.velocity(state, x, times[:count], settings=settings, guidance_scale=guidance_scale)

        return flow.step(velocity, state.x, t, to=to)

    def velocity(
        self, state: SamplerState, x: Tensor, t: Tensor, *, settings: SampleSettings, guidance_scale: Guidance
    ) -> Tensor:
        """Return the ensemble's velocity at states x (batch, C, H, W) and times t (batch or 1,) on the CPU."""
        return self.ensemble.velocity(
            x,
            t,
            state.conditions,
            routing=settings.routing,
            guidance_scale=guidance_scale,
            guidance=settings.guidance,
            guidance_weights=settings.guidance_weights,
            cluster=state.cluster,
            rescale=settings.rescale,
            draw=state.draw,
            state=state.routing,
        )

    def class_number(self, name: str | int) -> int:
        """Return the number of a class, given by name or number."""
        known = self.ensemble.declarations[0].labels
        if isinstance(name, str) and name not in known:
            raise AtollError(unknown("class", name, known))
        if isinstance(name, int) and not 0 <= name < len(known):
            raise AtollError(f"there is no class {name}: the experts have {len(known)} classes, numbered from 0")
        return known.index(name) if isinstance(name, str) else name

    def _warnings(self, prompts: bool, labels: bool, *, settings: SampleSettings) -> list[str]:
        """Return warnings about missing experts and about inputs without effect."""
        found = []
        if self.missing:
            are, them = ("is", "it") if len(self.missing) == 1 else ("are", "them")
            found.append(f"{', '.join(self.missing)} {are} missing; sampling without {them}")
        conditioning = self.ensemble.conditioning
        given = [name for name, value in (("prompts", prompts), ("labels", labels)) if value]
        takes = {"prompts": conditioning & OF_PROMPTS, "labels": conditioning & {"label"}}
        found += [
            f"these experts are not conditioned on {name}, which have no effect" for name in given if not takes[name]
        ]
        auto = settings.guidance == "autoguidance"
        if settings.guidance_scale != 1 and not auto and not any(takes[name] for name in given):
            found.append("without a prompt or label the guidance scale has no effect")
        if any(takes[name] for name in given) and draws_unconditioned(self.ensemble, settings.routing):
            found.append("the router is not conditioned on the prompt, so the expert does not depend on it")
        return found


def load(
    source: str | Path,
    model: str = "experts",
    *,
    max_loaded_experts: int | None = None,
    device: str | torch.device | None = None,
    devices: str | Sequence[str] | None = None,
    dtype: str | torch.dtype | None = None,
    strict: bool = False,
    routing: str = "top-1",
    quantize: str | None = None,
    compile: bool = False,
    base: str | Path | None = None,
    verify: bool = False,
) -> Sampler:
    """Open a run, a folder written by `atoll export`, or the Paris release; the latter two also by their hub names.

    `model` is `experts` (all experts with the router), one of them (`expert:3`), `monolith`, `student` or `merged`.
    Experts are spread over `devices` (such as "cuda:0,cuda:1"), by default all visible accelerators; everything else is
    on the first of them. `device` names a single one. The default `dtype` is bfloat16 on accelerators and float32 on
    CPUs. At most `max_loaded_experts` experts are on each device at once; None means all. Experts that are not finished
    are listed in `.missing`, and the model works without them; with `strict` they are an error. `base` is the folder of
    the base model of exported adapters, if it is not on the hub. `verify` checks the hash of every file; a copy of a
    shared run is always checked against its signed snapshot.
    """
    used = parse_devices(devices if device is None else [str(device)])
    options = DeviceOptions(used[0], compute_dtype(used[0], dtype), quantize, compile, used)
    run = Path(source)
    if (run / CONFIG_FILE).is_file():
        if base is not None:
            raise AtollError(f"{run} is a run: set networks.default.base in {run / CONFIG_FILE} instead")
        opened = open_run(run, model, verify=verify, strict=strict)
    elif is_folder(source):
        opened = open_folder(source, model, base=None if base is None else str(base))
    else:
        raise AtollError(f"{run} is not a run: it has no {CONFIG_FILE}; nor is it a pipeline folder or a hub name")
    opened.encoders.device, opened.encoders.dtype = options.device, options.dtype
    router = None if opened.router is None else open_router(opened.router, options)
    ensemble = Ensemble(
        opened.experts, router, device_options=options, max_loaded_experts=max_loaded_experts, routing=routing
    )
    return Sampler(ensemble, opened.encoders, opened.missing)


def _repeated(name: str, values: Any, times: int) -> list[Any] | None:
    """Return one value or several as a list, each `times` times in a row; None stays None."""
    if values is None:
        return None
    values = [values] if isinstance(values, str | int) else list(values)
    if not values:
        raise AtollError(f"{name} must not be empty; omit it instead")
    return [value for value in values for _ in range(times)]


def draws_unconditioned(ensemble: Ensemble, routing: str) -> bool:
    """Return whether an expert is chosen for good at t = 1 by a router that is not conditioned on the prompt."""
    first = parse(routing).rules[0]
    unconditioned = ensemble.router is not None and not ensemble.router.declaration.conditioning
    return len(ensemble.references) > 1 and first.keeps and first.source == "router" and unconditioned


def evaluated_at(settings: SampleSettings) -> list[float]:
    """Return the times at which the velocity is evaluated."""
    times = flow.solver_times(settings.steps, settings.shift)[:-1]
    # Heun's method evaluates twice per step, except in the last one, which is an Euler step.
    return times + times[1:] if "heun" in settings.solver else times


def _join(parts: Sequence[Tensor], mine: Sequence[slice], kept: Tensor, processes: DistContext) -> Tensor:
    """Return the rows `kept` (images, …) of all processes, from the first of the batches `mine` of this process.

    Every image is computed by one process and zero in the others, so the sum over the processes is exact.
    """
    if processes.size == 1:
        return torch.cat(list(parts))
    # A process without a batch has no tensor to take shape and dtype from; the main process has the first batch.
    shape, dtype = processes.on_main(lambda: (parts[0].shape[1:], dtype_name(parts[0].dtype)))
    rows = torch.zeros(int(kept[-1]) + 1, *shape, dtype=getattr(torch, dtype))
    for images, part in zip(mine, parts, strict=False):  # after an interrupt there are fewer parts
        rows[images] = part.cpu()
    return processes.sum(rows)[kept]
