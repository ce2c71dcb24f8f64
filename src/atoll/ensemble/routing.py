"""Routing: which experts answer for a sample, and how much each counts.

A routing is written as a few words, the same in Python and on the command line:

    top-1, top-2, …       the most probable experts, weighted by their probabilities
    full                  all experts
    threshold-0.2         all experts of probability 0.2 or more; the most probable one in any case
    nucleus-0.9           the fewest experts that together have probability 0.9
    drawn                 one expert, drawn once by its probability and kept to the end
    sample-1              one expert, drawn anew at every step by its probability
    oracle                the expert of the cluster that is given for the sample
    nearest               no router: probabilities from the clusters' own densities (`nearest:top-2`; alone, top-1)
    top-2@0.6,top-1       top-2 at times of 0.6 and above, top-1 below

Weights are renormalised over the chosen experts, and decided for each sample by itself.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from atoll.core.errors import AtollError, nearest
from atoll.flow import rng

NEGLIGIBLE = 1e-7
"""Weights below this, the rounding of float32, are taken as 0: their experts need not run."""
DRAW_STREAM = 1 << 20
"""Stream of the first step's draws of drawn and sample-1; later steps have the streams after it."""
RULES = ("full", "top-K", "threshold-P", "nucleus-P", "drawn", "sample-1", "oracle", "nearest")
_EXAMPLES = (
    *("full", "top-1", "top-2", "threshold-0.2", "nucleus-0.9", "drawn", "sample-1", "oracle"),
    *("nearest", "nearest:top-2", "nearest:drawn", "nearest:full"),
)

Source = Literal["router", "nearest", "given"]


@dataclass(frozen=True)
class Rule:
    """How experts are chosen and weighted, from times of `above` on."""

    name: str
    number: float = 0.0
    source: Source = "router"
    above: float = 0.0

    @property
    def draws(self) -> bool:
        """Whether it leaves the choice to chance."""
        return self.name in ("drawn", "sample")

    def weights(self, p: Tensor, draw: Tensor | None) -> Tensor:
        """Weights (rows, experts) that sum to 1, from probabilities p."""
        kept = torch.where(self._chosen(p, draw), p.clamp(min=1e-30), 0)
        kept = kept / kept.sum(-1, keepdim=True)
        return torch.where(kept < NEGLIGIBLE, 0, kept)

    def _chosen(self, p: Tensor, draw: Tensor | None) -> Tensor:
        if self.name == "full":
            return torch.ones_like(p, dtype=torch.bool)
        if self.draws:
            if draw is None:
                raise ValueError("drawn and sample-1 need `draw`: one number in [0, 1) for each sample")
            cumulated = (p / p.sum(-1, keepdim=True)).cumsum(-1)
            index = (cumulated <= draw[:, None]).sum(-1, keepdim=True).clamp(max=p.shape[-1] - 1)
        elif self.name == "nucleus":
            ordered, order = p.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            keep = before < self.number * p.sum(-1, keepdim=True)
            return torch.zeros_like(keep).scatter_(-1, order, keep)
        elif self.name == "threshold":
            best = torch.zeros_like(p, dtype=torch.bool).scatter_(-1, p.argmax(-1, keepdim=True), True)
            return (p >= self.number) | best
        else:
            index = p.topk(min(int(self.number), p.shape[-1]), dim=-1).indices
        return torch.zeros_like(p, dtype=torch.bool).scatter_(-1, index, True)


@dataclass(frozen=True)
class Routing:
    """One rule, or several over time, the earliest (noisiest) first."""

    rules: tuple[Rule, ...]
    text: str

    def active(self, t: Tensor) -> tuple[Rule, ...]:
        """The rules that some sample needs at times t."""
        if len(self.rules) == 1:
            return self.rules
        stage = self._stage(t)
        return tuple(rule for number, rule in enumerate(self.rules) if bool((stage == number).any()))

    @property
    def needs_router(self) -> bool:
        """Whether any of its rules needs a router."""
        return any(rule.source == "router" for rule in self.rules)

    @property
    def draws(self) -> bool:
        """Whether any of its rules leaves the choice to chance."""
        return any(rule.draws for rule in self.rules)

    def stream(self, step: int) -> int:
        """The stream of random numbers at a step: another at every step only for what is drawn anew."""
        return DRAW_STREAM + (step if any(rule.name == "sample" for rule in self.rules) else 0)

    def final_weights(self, rule: Rule, state: "RoutingState") -> Tensor | None:
        """The weights (samples, experts) to the end, once all samples have drawn and no other rule follows."""
        drawn = state.drawn if rule.name == "drawn" and rule is self.rules[-1] else None
        return drawn if drawn is not None and bool(drawn.any(-1).all()) else None

    def apply(self, t: Tensor, state: "RoutingState", *, count: int, draw: Tensor | None = None) -> Tensor:
        """Return the weights (rows, experts) of `count` images from the probabilities in `state`, and record them.

        A source has one row for each image, or two: the second ones, below, are those without condition.
        """
        rows = max(len(p) for p in state.probabilities.values())
        kept = {source: p.repeat(rows // len(p), 1) for source, p in state.probabilities.items()}
        first = self.active(t)[0].source
        if draw is None and self.draws:
            draw = state.draw(self, count)
        draw = None if draw is None else draw.to(kept[first].device)
        times = t if t.numel() == 1 else t.repeat(rows // count)
        weights = self.weights(kept, times, state, draw=draw)
        state.record(t, kept[first][:count], weights[:count])
        return weights

    def weights(
        self, probabilities: dict[Source, Tensor], t: Tensor, state: "RoutingState", *, draw: Tensor | None
    ) -> Tensor:
        """Weights (rows, experts) at times t (rows or 1,); `draw` (samples,), where a sample may have several rows."""
        active, stage = self.active(t), self._stage(t)[:, None]
        weights = None
        for rule in active:
            here = stage == self.rules.index(rule)
            part = self._one(rule, probabilities[rule.source], here, state=state, draw=draw)
            weights = part if weights is None else torch.where(here, part, weights)
        assert weights is not None
        return weights

    def _one(self, rule: Rule, p: Tensor, here: Tensor, *, state: "RoutingState", draw: Tensor | None) -> Tensor:
        if rule.source == "given":
            return p
        if rule.name == "drawn" and draw is not None:
            return self._drawn(rule, p, here, state=state, draw=draw)
        return rule.weights(p, None if draw is None else draw.repeat(len(p) // len(draw)))

    def _drawn(self, rule: Rule, p: Tensor, here: Tensor, *, state: "RoutingState", draw: Tensor) -> Tensor:
        """What was drawn before, else what is drawn now: one expert answers for all rows of a sample."""
        new = rule.weights(p[: len(draw)], draw)
        before = torch.zeros_like(new) if state.drawn is None else state.drawn
        drawn = torch.where(before.any(-1, keepdim=True), before, new)
        state.drawn = torch.where(here[: len(draw)], drawn, before)
        return drawn.repeat(len(p) // len(draw), 1)

    def _stage(self, t: Tensor) -> Tensor:
        """The number of the rule for each time."""
        borders = torch.tensor([rule.above for rule in self.rules[:-1]], device=t.device, dtype=t.dtype)
        return (t[:, None] < borders).sum(-1)


@dataclass
class RoutingState:
    """What routing remembers along a batch's way from noise to data."""

    seed: int = 0
    first: int = 0
    trace: "list[Decision] | None" = None
    evaluations: int = 0
    probabilities: dict[Source, Tensor] = field(default_factory=dict)
    """The last probabilities of each source."""
    drawn: Tensor | None = None
    """The one expert that each sample has drawn (samples, experts); zeros where it has not yet."""

    def draw(self, routing: Routing, count: int) -> Tensor:
        """The numbers of drawn and sample-1 for this evaluation: a function of seed and position, and of the step."""
        stream = routing.stream(self.evaluations)
        return rng.uniform(count, seed=self.seed, stream=stream, first=self.first)

    def record(self, t: Tensor, probabilities: Tensor, weights: Tensor) -> None:
        """One more evaluation is decided."""
        if self.trace is not None:
            self.trace.append(Decision(t.cpu(), probabilities.cpu(), weights.cpu()))
        self.evaluations += 1


@dataclass(frozen=True, eq=False)
class Decision:
    """One routing decision of a batch: probabilities and weights (samples, experts) at time t."""

    t: Tensor
    probabilities: Tensor
    weights: Tensor


def parse(text: str | Routing) -> Routing:
    """Read a routing as people write it; a wrong one is refused with the nearest right one."""
    if isinstance(text, Routing):
        return text
    parts = [part.strip() for part in text.split(",")]
    rules = []
    for number, part in enumerate(parts):
        word, at, above = part.partition("@")
        if bool(at) != (number < len(parts) - 1):
            raise _refused(text, "all rules but the last say from which time on they count")
        rules.append(_rule(word, _number(above, text, 0, high=1) if at else 0.0, text))
    times = [rule.above for rule in rules]
    if times != sorted(times, reverse=True) or len(set(times)) != len(times):
        raise _refused(text, "times must fall from rule to rule")
    return Routing(tuple(rules), text)


def _rule(word: str, above: float, text: str) -> Rule:
    source: Source = "router"
    if word == "nearest":
        word, source = "nearest:top-1", "nearest"
    if word.startswith("nearest:"):
        word, source = word.removeprefix("nearest:"), "nearest"
    if word == "full":
        return Rule("full", source=source, above=above)
    if word == "oracle" and source == "router":
        return Rule("oracle", source="given", above=above)
    name, _, value = word.partition("-")
    if word == "drawn":
        return Rule("drawn", source=source, above=above)
    if name == "sample" and value == "1":
        return Rule("sample", 1, source=source, above=above)
    if name == "top" and value.isdecimal() and int(value) > 0:
        return Rule("top", int(value), source=source, above=above)
    if name in ("threshold", "nucleus") and value:
        return Rule(name, _number(value, text, 0, high=1), source=source, above=above)
    guess = nearest(word, _EXAMPLES)
    raise _refused(text, f"unknown rule {word!r}" + (f" (did you mean {guess!r}?)" if guess else ""))


def _number(value: str, text: str, low: float, *, high: float) -> float:
    try:
        number = float(value)
    except ValueError:
        raise _refused(text, f"{value!r} is not a number") from None
    if not low <= number <= high:
        raise _refused(text, f"{value} is not between {low} and {high}")
    return number


def _refused(text: str, reason: str) -> AtollError:
    return AtollError(f"routing {text!r}: {reason}; known: {', '.join(RULES)}, and rules over time: top-2@0.6,top-1")
