"""Routing: which experts compute the velocity of an image, and with which weights.

A routing is a short string, the same in Python and on the command line:

    top-1, top-2, …       the most probable experts, weighted by their probabilities
    full                  all experts
    threshold-0.2         all experts of probability 0.2 or more; the most probable one in any case
    nucleus-0.9           the fewest experts that together have probability 0.9
    drawn                 one expert, drawn once by its probability and kept to the end
    once                  the most probable expert of the first step, kept to the end
    sample-1              one expert, drawn anew at every evaluation by its probability
    oracle                the expert of the given cluster of each image
    nearest               no router: probabilities from the densities of the clusters (`nearest:top-2`; alone, top-1)
    top-2@0.6,top-1       top-2 at times of 0.6 and above, top-1 below

The weights of an image depend on its probabilities alone and are renormalized over the chosen experts. DDM compares
full, top-K, nucleus, sample-1 and oracle; HDDM adds threshold; drawn, once and nearest are Atoll's.

Tensors: probabilities p (rows, experts) become weights (rows, experts) that sum to 1. A batch of N images has N rows,
or 2 N if the source of the probabilities distinguishes the images with their conditions (first N rows) from the images
with the null condition (last N rows).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from atoll.core.errors import AtollError, nearest
from atoll.flow import rng

NEGLIGIBLE = 1e-7
"""Smaller weights are set to 0, so that their experts need not run: float32 rounds at 6e-8 of the largest weight."""
RULES = ("full", "top-K", "threshold-P", "nucleus-P", "drawn", "once", "sample-1", "oracle", "nearest")
_EXAMPLES = (
    *("full", "top-1", "top-2", "threshold-0.2", "nucleus-0.9", "drawn", "once", "sample-1", "oracle"),
    *("nearest", "nearest:top-2", "nearest:drawn", "nearest:full"),
)

WeightSource = Literal["router", "nearest", "given"]


@dataclass(frozen=True)
class Rule:
    """A rule that selects and weights experts, at times of `above` and more."""

    name: str
    number: float = 0.0
    source: WeightSource = "router"
    above: float = 0.0

    @property
    def draws(self) -> bool:
        """Whether the rule selects an expert for each image, which `once` does without its random number."""
        return self.name in ("drawn", "once", "sample")

    @property
    def keeps(self) -> bool:
        """Whether an image keeps the expert that the rule selects first."""
        return self.name in ("drawn", "once")

    def weights(self, p: Tensor, draw: Tensor | None) -> Tensor:
        """Return weights (rows, experts) that sum to 1, from probabilities p; `draw` (rows,) is in [0, 1)."""
        if self.name == "full":
            chosen = torch.ones_like(p, dtype=torch.bool)
        elif self.name == "nucleus":
            # An expert is kept if those before it, in descending order, do not reach the mass yet.
            ordered, order = p.sort(dim=-1, descending=True, stable=True)
            keep = ordered.cumsum(-1) - ordered < self.number * p.sum(-1, keepdim=True)
            chosen = torch.zeros_like(keep).scatter_(-1, order, keep)
        else:
            if self.name in ("threshold", "once"):
                index = p.argmax(-1, keepdim=True)
            elif self.draws:
                if draw is None:
                    raise ValueError("drawn and sample-1 need `draw`: one number in [0, 1) for each image")
                # Inverse transform sampling: the first expert whose cumulative probability exceeds the number.
                cumulated = (p / p.sum(-1, keepdim=True)).cumsum(-1)
                index = (cumulated <= draw[:, None]).sum(-1, keepdim=True).clamp(max=p.shape[-1] - 1)
            else:
                index = p.topk(min(int(self.number), p.shape[-1]), dim=-1).indices
            chosen = torch.zeros_like(p, dtype=torch.bool).scatter_(-1, index, True)
            if self.name == "threshold":
                chosen |= p >= self.number
        # Chosen experts may all have probability 0 in float32; the clamp avoids 0/0.
        kept = torch.where(chosen, p.clamp(min=1e-30), 0)
        kept = kept / kept.sum(-1, keepdim=True)
        return torch.where(kept < NEGLIGIBLE, 0, kept)


@dataclass(frozen=True)
class Routing:
    """One rule, or several over time, the first for the noisiest times."""

    rules: tuple[Rule, ...]
    text: str

    def active(self, t: Tensor) -> tuple[Rule, ...]:
        """Return the rules that apply to some image at times t (rows or 1,)."""
        stage = self._stage(t)
        return tuple(rule for number, rule in enumerate(self.rules) if bool((stage == number).any()))

    @property
    def needs_router(self) -> bool:
        """Whether any of its rules needs a router."""
        return any(rule.source == "router" for rule in self.rules)

    @property
    def draws(self) -> bool:
        """Whether any of its rules selects an expert for each image."""
        return any(rule.draws for rule in self.rules)

    def stream(self, evaluation: int) -> int:
        """Return the random stream of an evaluation: sample-1 draws anew each time, drawn only once."""
        return rng.Stream.DRAW + (evaluation if any(rule.name == "sample" for rule in self.rules) else 0)

    def final_weights(self, rule: Rule, state: "RoutingState") -> Tensor | None:
        """Return the weights (images, experts) of all later steps once they are known, else None.

        They are known if `rule` keeps its experts, all images have one, and no other rule follows. The router is not
        needed then.
        """
        drawn = state.drawn if rule.keeps and rule is self.rules[-1] else None
        return drawn if drawn is not None and bool(drawn.any(-1).all()) else None

    def weights(
        self, probabilities: dict[WeightSource, Tensor], t: Tensor, state: "RoutingState", *, draw: Tensor | None
    ) -> Tensor:
        """Return weights (rows, experts) at times t (rows or 1,); the rows of an image share its number in `draw`."""
        stage = self._stage(t)[:, None]
        weights = None
        for rule in self.active(t):
            p, here = probabilities[rule.source], stage == self.rules.index(rule)
            if rule.source == "given":
                part = p
            elif rule.keeps and draw is not None:
                # The expert that an image has, or gets now with its condition, serves all rows of the image.
                new = rule.weights(p[: len(draw)], draw)
                before = torch.zeros_like(new) if state.drawn is None else state.drawn
                drawn = torch.where(before.any(-1, keepdim=True), before, new)
                state.drawn = torch.where(here[: len(draw)], drawn, before)
                part = drawn.repeat(len(p) // len(draw), 1)
            else:
                part = rule.weights(p, None if draw is None else draw.repeat(len(p) // len(draw)))
            weights = part if weights is None else torch.where(here, part, weights)
        assert weights is not None
        return weights

    def _stage(self, t: Tensor) -> Tensor:
        """Return the index of the rule for each time."""
        borders = torch.tensor([rule.above for rule in self.rules[:-1]], device=t.device, dtype=t.dtype)
        return (t[:, None] < borders).sum(-1)


@dataclass
class RoutingState:
    """The state of routing from one evaluation of a batch to the next."""

    seed: int | Sequence[int] = 0
    """One for all images, or one for each."""
    first: int = 0
    """Position of the batch's first image, which with one seed determines its draws."""
    trace: "list[Decision] | None" = None
    evaluations: int = 0
    probabilities: dict[WeightSource, Tensor] = field(default_factory=dict)
    """The most recent probabilities of each source."""
    drawn: Tensor | None = None
    """The expert that each image keeps, one-hot (images, experts); zeros for images that have none yet."""

    def draw(self, routing: Routing, count: int) -> Tensor:
        """Return the random numbers (count,) of this evaluation, by seed, position and, for sample-1, its number."""
        stream = routing.stream(self.evaluations)
        if isinstance(self.seed, int):
            return rng.uniform(count, seed=self.seed, stream=stream, first=self.first)
        return torch.cat([rng.uniform(1, seed=seed, stream=stream, first=0) for seed in self.seed])

    def record(self, t: Tensor, probabilities: Tensor, weights: Tensor) -> None:
        """Count an evaluation, and add its decision to the trace."""
        if self.trace is not None:
            self.trace.append(Decision(t.cpu(), probabilities.cpu(), weights.cpu()))
        self.evaluations += 1


@dataclass(frozen=True, eq=False)
class Decision:
    """One routing decision of a batch: probabilities and weights (images, experts) at time t."""

    t: Tensor
    probabilities: Tensor
    weights: Tensor


def parse(text: str | Routing) -> Routing:
    """Parse a routing; an error suggests the most similar valid one."""
    if isinstance(text, Routing):
        return text
    parts = [part.strip() for part in text.split(",")]
    rules = []
    for number, part in enumerate(parts):
        word, at, above = part.partition("@")
        if bool(at) != (number < len(parts) - 1):
            raise _invalid(text, "every rule but the last needs its smallest time, as in top-2@0.6")
        rules.append(_rule(word, _fraction(above, text) if at else 0.0, text))
    times = [rule.above for rule in rules]
    if times != sorted(times, reverse=True) or len(set(times)) != len(times):
        raise _invalid(text, "times must decrease from rule to rule")
    return Routing(tuple(rules), text)


def _rule(word: str, above: float, text: str) -> Rule:
    source: WeightSource = "router"
    if word == "nearest":
        word, source = "top-1", "nearest"
    elif word.startswith("nearest:"):
        word, source = word.removeprefix("nearest:"), "nearest"
    name, _, value = word.partition("-")
    if word in ("full", "drawn", "once"):
        return Rule(word, 0.0, source, above)
    if word == "oracle" and source == "router":
        return Rule("oracle", 0.0, "given", above)
    if word == "sample-1" or (name == "top" and value.isdecimal() and int(value) > 0):
        return Rule(name, int(value), source, above)
    if name in ("threshold", "nucleus") and value:
        return Rule(name, _fraction(value, text), source, above)
    guess = nearest(word, _EXAMPLES)
    raise _invalid(text, f"unknown rule {word!r}" + (f" (did you mean {guess!r}?)" if guess else ""))


def _fraction(value: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise _invalid(text, f"{value!r} is not a number") from None
    if not 0 <= number <= 1:
        raise _invalid(text, f"{value} is not between 0 and 1")
    return number


def _invalid(text: str, reason: str) -> AtollError:
    return AtollError(f"routing {text!r}: {reason}; known: {', '.join(RULES)}, and rules over time: top-2@0.6,top-1")
