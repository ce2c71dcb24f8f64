"""From prompts to pictures: noise, the solver along the ensemble's velocity, and the autoencoder.

Every sample's noise is a function of (seed, its position), so the same seed gives the same picture whatever the batch,
up to the rounding of float32: a batch of another size is summed in another order.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from atoll import flow
from atoll.core.errors import AtollError, unknown
from atoll.core.progress import progress
from atoll.data.stages.latents import Codec, Pixel, Statistics, open_codec
from atoll.ensemble.routing import RoutingState, parse
from atoll.experts.batch_conditions import BatchConditions
from atoll.experts.expert_cache import ExpertReference
from atoll.experts.router import OpenRouter
from atoll.flow import rng
from atoll.nets import Condition

if TYPE_CHECKING:
    from atoll.data.stages.text import TextEncoder
    from atoll.experts.expert import Declaration


class Sampled(Protocol):
    """What sampling needs of an ensemble."""

    models: "Models"
    missing: tuple[str, ...]
    members: tuple[ExpertReference, ...]
    router: OpenRouter | None
    space: Statistics
    scheduler: Any

    @property
    def device(self) -> torch.device:
        """Return where it computes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return channels, height and width of a latent."""

    @property
    def told(self) -> frozenset[str]:
        """Return what it is conditioned on."""

    @property
    def experts(self) -> tuple["Declaration", ...]:
        """Return what each expert declares."""

    def velocity(self, x: Tensor, t: Tensor | float, condition: BatchConditions | None = None, *args: Any, **how: Any) -> Tensor:
        """Return the velocity of states x at times t."""


NOISE_STREAM = 21
DECODE_BATCH = 16


@dataclass(frozen=True)
class Settings:
    """How pictures are made. They are written into every picture."""

    routing: str = "top-1"
    steps: int = 50
    guidance: float = 4.0
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    rescale: float = 0.0
    solver: str = "euler"
    shift: float = 1.0
    scheduler_times: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        parse(self.routing)
        low, high = self.guidance_interval
        if self.solver not in flow.SOLVERS:
            raise AtollError(unknown("solver", self.solver, flow.SOLVERS))
        if self.steps < 1 or self.shift <= 0 or not 0 <= self.rescale <= 1 or not 0 <= low <= high <= 1:
            raise AtollError(
                "expected steps >= 1, shift > 0, rescale in [0, 1] and an interval of times in [0, 1], got "
                f"{self.steps}, {self.shift}, {self.rescale} and {self.guidance_interval}"
            )
        if self.scheduler_times and self.solver in flow.solvers.OWN_SOLVERS:
            raise AtollError(
                f"scheduler_times needs a solver of diffusers, such as flow-euler, got {self.solver}: euler and heun "
                "have no scheduler whose times could be kept"
            )

    @property
    def evaluated_at(self) -> list[float]:
        """The times at which the velocity is asked for."""
        times = flow.solver_times(self.steps, self.shift)[:-1]
        return times + times[1:] if "heun" in self.solver else times

    def guidance_at(self, t: float) -> float:
        """The guidance at a time: none outside the interval."""
        low, high = self.guidance_interval
        return self.guidance if low <= t <= high else 1.0


@dataclass(frozen=True, eq=False)
class Trace:
    """Every routing decision: times (evaluations,), probabilities and weights (evaluations, samples, experts)."""

    t: Tensor
    probabilities: Tensor
    weights: Tensor
    experts: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Samples:
    """Pictures with what they were made from."""

    latents: Tensor
    """In the ensemble's normalised space."""
    images: list[Image.Image]
    told: list[str | None]
    """Prompt or class of each picture."""
    settings: Settings
    trace: Trace | None = None

    def to_dict(self) -> dict[str, list[str | None] | dict[str, object]]:
        """What was asked for, as plain values."""
        return {"prompts": self.told, "settings": asdict(self.settings)}

    def metadata(self, number: int) -> dict[str, object]:
        """Everything needed to make one of the pictures again."""
        return {"prompt": self.told[number], "number": number, **asdict(self.settings)}


@dataclass(eq=False)
class Models:
    """Text encoder and autoencoder of an ensemble, opened when first needed."""

    declaration: "Declaration"

    @cached_property
    def codec(self) -> Codec | Pixel:
        """The autoencoder."""
        return open_codec(self.declaration.latents.autoencoder)

    @cached_property
    def text_encoder(self) -> "TextEncoder":
        """The text encoder that the experts were trained with."""
        from atoll.data.stages.text import open_text_encoder

        text = self.declaration.text
        if text is None:
            raise AtollError("these experts were trained without text: they take no prompts")
        return open_text_encoder(text.encoder, text.max_tokens)

    def labels(self, names: Sequence[str | int]) -> Tensor:
        """Numbers of classes, given by name or number."""
        known = self.declaration.labels
        for name in names:
            if isinstance(name, str) and name not in known:
                raise AtollError(unknown("class", name, known))
            if isinstance(name, int) and not 0 <= name < len(known):
                raise AtollError(f"there is no class {name}: the experts know {len(known)} classes, numbered from 0")
        return torch.tensor([known.index(name) if isinstance(name, str) else name for name in names])


def encode(
    ensemble: Sampled, prompts: Sequence[str] | None = None, labels: Sequence[str | int] | None = None
) -> Condition:
    """The condition of prompts, classes or both, one row for each."""
    if prompts is not None and labels is not None and len(prompts) != len(labels):
        raise AtollError(f"there are {len(prompts)} prompts and {len(labels)} labels; expected as many of both")
    text = mask = pooled = label = None
    if prompts is not None and ensemble.told & {"text", "pooled"}:
        text, mask, pooled = (part.to(ensemble.device) for part in ensemble.models.text_encoder(list(prompts)))
    if labels is not None and "label" in ensemble.told:
        label = ensemble.models.labels(labels).to(ensemble.device)
    return Condition(text, mask, pooled, label)


def decode(ensemble: Sampled, latents: Tensor) -> list[Image.Image]:
    """Pictures of latents of the ensemble's space."""
    pictures: list[Image.Image] = []
    for part in torch.split(ensemble.space.restore(latents.float()), DECODE_BATCH):
        pictures += [Image.fromarray(pixels) for pixels in ensemble.models.codec.decode(part.cpu())]
    return pictures


@dataclass(frozen=True, eq=False)
class Request:
    """What is wanted: for each sample its prompt or class (or neither), and its cluster if the oracle routes."""

    told: list[str | None]
    condition: Condition | None
    """One row for each different prompt or class."""
    rows: Tensor
    clusters: Tensor | None
    prompts: bool = False
    labels: bool = False


def request(
    ensemble: Sampled,
    prompts: Sequence[str] | None,
    labels: Sequence[str | int] | None,
    *,
    n: int | None,
    clusters: Sequence[int] | None,
) -> Request:
    """Line up what is wanted; `n` pictures take prompts, labels and clusters in turn."""
    for name, values in (("prompts", prompts), ("labels", labels), ("clusters", clusters)):
        if isinstance(values, str) or (values is not None and not len(values)):
            raise AtollError(f"{name} must be a list that is not empty, got {values!r}")
    if n is not None and n < 1:
        raise AtollError(f"expected at least one picture, got n = {n}")
    count = n or max(len(values) if values is not None else 1 for values in (prompts, labels, clusters))

    def turns(values: Sequence[Any] | None) -> list[Any]:
        return [None] * count if values is None else [values[i % len(values)] for i in range(count)]

    pairs = list(zip(turns(prompts), turns(labels), strict=True))
    distinct = list(dict.fromkeys(pairs))
    condition = None
    if prompts is not None or labels is not None:
        words = None if prompts is None else [prompt for prompt, _ in distinct]
        condition = encode(ensemble, words, None if labels is None else [label for _, label in distinct])
    number = {pair: place for place, pair in enumerate(distinct)}
    rows = torch.tensor([number[pair] for pair in pairs])
    told = [" / ".join(str(part) for part in pair if part is not None) or None for pair in pairs]
    given = None if clusters is None else torch.tensor(turns(clusters))
    return Request(told, condition, rows, given, prompts is not None, labels is not None)


def notices(ensemble: Sampled, wanted: Request, settings: Settings) -> list[str]:
    """What a person should know before the pictures come."""
    found = []
    if ensemble.missing:
        are = "is" if len(ensemble.missing) == 1 else "are"
        found.append(f"{', '.join(ensemble.missing)} {are} not there; the others act without")
    given = [name for name, value in (("prompts", wanted.prompts), ("labels", wanted.labels)) if value]
    takes = {"prompts": ensemble.told & {"text", "pooled"}, "labels": ensemble.told & {"label"}}
    found += [f"these experts are not told {name}; they have no effect" for name in given if not takes[name]]
    if settings.guidance != 1 and not any(takes[name] for name in given):
        found.append("without a prompt or label guidance has no effect")
    if any(takes[name] for name in given) and draws_unheard(ensemble, settings.routing):
        found.append("the router is not told the prompt, so the expert that is drawn has nothing to do with it")
    return found


def draws_unheard(ensemble: Sampled, routing: str) -> bool:
    """Whether an expert is drawn from the start by a router that hears nothing of what is wanted."""
    first = parse(routing).rules[0]
    deaf = ensemble.router is not None and not ensemble.router.declaration.told
    return len(ensemble.members) > 1 and first.name == "drawn" and first.source == "router" and deaf


@torch.no_grad()
def generate(ensemble: Sampled, wanted: Request, settings: Settings, *, batch: int, trace: bool) -> Samples:
    """Sample, in batches, and decode."""
    for notice in notices(ensemble, wanted, settings):
        print(f"warning: {notice}", file=sys.stderr)
    count = len(wanted.told)
    latents, traces = [], []
    with progress("sampling", -(-count // batch) * len(settings.evaluated_at), unit="steps") as bar:
        for first in range(0, count, batch):
            part, decisions = _batch(
                ensemble, wanted, settings, part=slice(first, min(first + batch, count)), trace=trace, bar=bar
            )
            latents.append(part)
            traces.append(decisions)
    made = torch.cat(latents)
    return Samples(made, decode(ensemble, made), wanted.told, settings, _joined(ensemble, traces) if trace else None)


def _batch(
    ensemble: Sampled, wanted: Request, settings: Settings, *, part: slice, trace: bool, bar: Any
) -> tuple[Tensor, list[Any]]:
    """The latents of one batch and its routing decisions."""
    used, rows = (rows.to(ensemble.device) for rows in torch.unique(wanted.rows[part], return_inverse=True))
    told = BatchConditions.of(None if wanted.condition is None else wanted.condition[used], rows, reused=True)
    clusters = None if wanted.clusters is None else wanted.clusters[part]
    decisions: list[Any] = []
    memory = RoutingState(settings.seed, part.start, decisions if trace else None)

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        bar.update(1)
        guidance = settings.guidance_at(float(t[0]))
        return ensemble.velocity(
            x,
            t[:1],
            told,
            routing=settings.routing,
            guidance=guidance,
            cluster=clusters,
            rescale=settings.rescale,
            memory=memory,
        )

    shape = (len(rows), *ensemble.shape)
    noise = rng.normal(shape, seed=settings.seed, stream=NOISE_STREAM, first=part.start).to(ensemble.device)
    own = settings.scheduler_times
    if ensemble.scheduler is not None:
        made = flow.run_scheduler(ensemble.scheduler, velocity, noise, steps=settings.steps, scheduler_times=own)
    else:
        made = flow.solve(
            velocity, noise, steps=settings.steps, solver=settings.solver, shift=settings.shift, scheduler_times=own
        )
    return made, decisions


def _joined(ensemble: Sampled, traces: list[list[Any]]) -> Trace:
    """The decisions of all batches, side by side."""
    steps = range(len(traces[0]))
    return Trace(
        torch.tensor([float(decision.t[0]) for decision in traces[0]]),
        torch.stack([torch.cat([decisions[step].probabilities for decisions in traces]) for step in steps]),
        torch.stack([torch.cat([decisions[step].weights for decisions in traces]) for step in steps]),
        tuple(expert.name for expert in ensemble.experts),
    )
