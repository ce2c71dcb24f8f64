"""The ensemble: many experts as one velocity field.

At every evaluation the router is asked once, each sample is given its experts, and every expert that is needed runs
once on all of its samples: those told something and, under guidance, those told nothing, in one batch.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from atoll.core.errors import AtollError
from atoll.data.stages.latents import Statistics
from atoll.ensemble import sampler
from atoll.ensemble.plan import Plan
from atoll.ensemble.plan import plan as make_plan
from atoll.ensemble.routing import RoutingState, Routing, Source, parse
from atoll.experts.batch_conditions import BatchConditions
from atoll.experts.expert import Declaration
from atoll.experts.expert_cache import ExpertReference, DeviceOptions, ExpertCache
from atoll.experts.rescaling import rescaling
from atoll.experts.router import OpenRouter
from atoll.flow.schedules import broadcast, check_times
from atoll.nets import Condition

Guidance = float | Tensor


class Ensemble(nn.Module):
    """Experts and a router as one model. An ensemble of one expert is a dense model and needs no router."""

    def __init__(
        self,
        members: Sequence[ExpertReference],
        router: OpenRouter | None = None,
        *,
        placement: DeviceOptions | None = None,
        resident: int | None = None,
        routing: str | Routing = "top-1",
        missing: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if not members:
            raise AtollError("an ensemble needs at least one expert")
        self.placement = placement or DeviceOptions(torch.device("cpu"))
        self.members = tuple(members)
        self.router = router
        self.routing = parse(routing)
        self.missing = tuple(missing)
        self.models = sampler.Models(members[0].declaration)
        self.scheduler: Any = None  # a diffusers scheduler that takes the place of the solver
        first = (router or members[0]).declaration
        self.space: Statistics = first.statistics
        self.cache = ExpertCache(self.members, self.space, self.placement, resident or len(members))
        _check_alike([member.declaration for member in members] + ([router.declaration] if router else []))

    @property
    def experts(self) -> tuple[Declaration, ...]:
        """What each expert that is there declares, in the order of the columns of weights."""
        return tuple(member.declaration for member in self.members)

    @property
    def quantisation_error(self) -> dict[str, float]:
        """By how much eight-bit weights change the velocity of each expert that was opened, relative to its size."""
        return self.cache.quantisation_error

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.placement.device

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of a latent."""
        return self.experts[0].shape

    @property
    def told(self) -> frozenset[str]:
        """What any of its experts, or its routing, wants to be told."""
        declared = [*self.experts, *([self.router.declaration] if self.router else [])]
        told: frozenset[str] = frozenset().union(*(declaration.told for declaration in declared))
        captions = "text" in told and any(member.density and member.density.caption for member in self.members)
        return told | {"pooled"} if captions else told

    def forward(self, x: Tensor, t: Tensor | float, condition: Condition | BatchConditions | None = None, **how: Any) -> Tensor:
        """`velocity`."""
        return self.velocity(x, t, condition, **how)

    def velocity(
        self,
        x: Tensor,
        t: Tensor | float,
        condition: Condition | BatchConditions | None = None,
        *,
        routing: str | Routing | None = None,
        guidance: Guidance = 1.0,
        cluster: Tensor | None = None,
        rescale: float = 0.0,
        draw: Tensor | None = None,
        memory: RoutingState | None = None,
    ) -> Tensor:
        """The velocity at states x (batch, channels, height, width) of the ensemble's space.

        Times t and `guidance` are one number, or one for each sample. `cluster` is what routing by oracle needs, `draw`
        what drawn and sample-1 need; `memory` carries routing from one evaluation to the next.
        """
        self._check_batch(x, {"guidance": guidance, "cluster": cluster, "draw": draw})
        t = check_times(torch.as_tensor(t, dtype=torch.float32, device=x.device), x)[: torch.as_tensor(t).numel()]
        told = condition if isinstance(condition, BatchConditions) else self.tell(condition, len(x))
        guided = self._guided(guidance, told, x)
        memory = memory or RoutingState()
        weights = self._weights(
            x,
            t,
            told,
            routing=parse(routing or self.routing),
            cluster=cluster,
            draw=draw,
            m=memory,
            null=len(guided) > 0,
        )
        samples = torch.arange(len(x), device=x.device)
        halves = len(weights) // len(x)  # a router that is told something has another answer for the null condition
        rows = torch.cat([told.rows, told.null[guided]])
        weights = torch.cat([weights[: len(x)], weights[(halves - 1) * len(x) + guided]])
        v = self._mixed(x, t, told, samples=torch.cat([samples, guided]), rows=rows, weights=weights)
        return _guide(v, guided, guidance, count=len(x), rescale=rescale) if len(guided) else v

    def tell(self, condition: Condition | None, count: int) -> BatchConditions:
        """A condition of `count` samples, to be given to one evaluation of the velocity."""
        return BatchConditions.of(condition, torch.arange(count, device=self.device))

    def weights(
        self,
        x: Tensor,
        t: Tensor | float,
        condition: Condition | BatchConditions | None = None,
        *,
        routing: str | Routing | None = None,
        cluster: Tensor | None = None,
        draw: Tensor | None = None,
    ) -> Tensor:
        """The weights (batch, experts) that routing gives each expert."""
        self._check_batch(x, {"cluster": cluster, "draw": draw})
        t = check_times(torch.as_tensor(t, dtype=torch.float32, device=x.device), x)[: torch.as_tensor(t).numel()]
        told = condition if isinstance(condition, BatchConditions) else self.tell(condition, len(x))
        return self._weights(
            x, t, told, routing=parse(routing or self.routing), cluster=cluster, draw=draw, m=RoutingState()
        )[: len(x)]

    def _check_batch(self, x: Tensor, options: Mapping[str, Any]) -> None:
        """Refuse states of other latents, and options of another batch size."""
        if x.ndim != 4 or x.shape[1] != self.shape[0]:
            raise AtollError(
                f"got states of shape {tuple(x.shape)}, expected (batch, {self.shape[0]}, height, width) in the latent "
                "space of these experts"
            )
        for name, value in options.items():
            if isinstance(value, Tensor) and value.numel() not in (1, len(x)):
                raise AtollError(f"{name} has shape {tuple(value.shape)}, expected ({len(x)},): one for each state")

    def encode(self, prompts: Sequence[str] | None = None, labels: Sequence[str | int] | None = None) -> Condition:
        """The condition of prompts, of classes (names or numbers), or of both, one row for each."""
        return sampler.encode(self, prompts, labels)

    def decode(self, latents: Tensor) -> list[Image.Image]:
        """Pictures of latents in the ensemble's space."""
        return sampler.decode(self, latents)

    def sample(self, prompts: Sequence[str] | None = None, **how: Any) -> list[Image.Image]:
        """Pictures of prompts, of `labels`, or of nothing in particular; see `generate` for all that can be said."""
        return self.generate(prompts, **how).images

    def generate(
        self,
        prompts: Sequence[str] | None = None,
        labels: Sequence[str | int] | None = None,
        n: int | None = None,
        *,
        clusters: Sequence[int] | None = None,
        batch: int = 64,
        trace: bool = False,
        **settings: Any,
    ) -> sampler.Samples:
        """Pictures with their latents and, with `trace`, every routing decision.

        `n` pictures take prompts, labels and clusters (for the oracle) in turn; without `n` there is one for each.
        Further keywords are those of `Settings`: routing, steps, guidance, guidance_interval, rescale, solver, shift,
        scheduler_times, seed.
        """
        chosen = sampler.Settings(**{"routing": self.routing.text, **settings})
        return sampler.generate(
            self, sampler.request(self, prompts, labels, n=n, clusters=clusters), chosen, batch=batch, trace=trace
        )

    def plan(self, batch: int = 64, distinct: int | None = None, guided: bool = True) -> Plan:
        """What sampling batches of that size will take in memory; `distinct` prompts, one for each sample if None."""
        return make_plan(self, batch, batch if distinct is None else distinct, guided=guided)

    def _guided(self, guidance: Guidance, told: BatchConditions, x: Tensor) -> Tensor:
        """The samples that also need the answer for the null condition."""
        if not told.something or not self.told or (isinstance(guidance, float | int) and guidance == 1):
            return torch.empty(0, dtype=torch.long, device=x.device)
        if isinstance(guidance, Tensor):
            return torch.nonzero(guidance.to(x.device) != 1).flatten()
        return torch.arange(len(x), device=x.device)

    def _weights(
        self,
        x: Tensor,
        t: Tensor,
        told: BatchConditions,
        *,
        routing: Routing,
        cluster: Tensor | None,
        draw: Tensor | None,
        m: RoutingState,
        null: bool = False,
    ) -> Tensor:
        """Weights (rows, experts): of the samples, and below them of the same with the null condition if it differs."""
        if len(self.members) == 1:
            weights = torch.ones(len(x), 1, device=x.device)
            m.record(t, weights, weights)
            return weights
        asked: set[Source] = set()
        for rule in routing.active(t):
            if rule.source == "given":
                m.kept["given"] = self._given(cluster, x)
            elif (settled := routing.settled(rule, m)) is not None:  # the router need not be asked again
                m.kept.setdefault(rule.source, settled)
            elif rule.source not in asked:
                m.kept[rule.source] = self._probabilities(rule.source, x, t, told=told, null=null)
                asked.add(rule.source)
        rows = max(len(p) for p in m.kept.values())
        kept = {source: p.repeat(rows // len(p), 1) for source, p in m.kept.items()}
        if draw is None and routing.draws:
            draw = m.draw(routing, len(x))
        draw = None if draw is None else draw.to(x.device)
        times = t if t.numel() == 1 else t.repeat(rows // len(x))
        weights = routing.weights(kept, times, m, draw=draw)
        m.record(t, kept[routing.active(t)[0].source][: len(x)], weights[: len(x)])
        return weights

    def _probabilities(self, source: Source, x: Tensor, t: Tensor, *, told: BatchConditions, null: bool) -> Tensor:
        """Probabilities of the experts that are there, renormalised over them; below, with the null condition."""
        if source == "nearest":
            return self._nearest(x, t, told, null=null)
        if self.router is None:
            raise AtollError("this ensemble has no router; train one, or use --routing nearest or oracle")
        column = {cluster: number for number, cluster in enumerate(self.router.declaration.clusters)}
        unknown = [expert.name for expert in self.experts if expert.clusters[0] not in column]
        if unknown:
            raise AtollError(f"the router does not know {', '.join(unknown)}; train it again, or use --routing nearest")
        if self.router.declaration.told and told.something:
            rows, halves = (torch.cat([told.rows, told.null]), 2) if null else (told.rows, 1)
            times = t if t.numel() == 1 else t.repeat(halves)
            logits = self.router.logits(x.repeat(halves, 1, 1, 1), times, told.distinct[rows])
        else:
            logits = self.router.logits(x, t, Condition())
        return logits[:, [column[expert.clusters[0]] for expert in self.experts]].softmax(-1)

    def _nearest(self, x: Tensor, t: Tensor, told: BatchConditions, *, null: bool) -> Tensor:
        """Posterior of the clusters by their own densities, each measured in its expert's own space."""
        columns, words, t, states = [], [], t.cpu().expand(len(x)), x.detach().cpu()
        for member in self.members:
            name = member.declaration.name
            if member.density is None:
                raise AtollError(
                    f"{name} does not tell how its cluster is distributed (it was trained by an older Atoll, or comes "
                    "from elsewhere), so --routing nearest cannot judge it; train it again, or use a router"
                )
            change = rescaling(self.space, member.declaration.statistics, name)
            own, own_t = (states, t) if change is None else change.state(states, t)
            density = member.density.log_density(own, own_t)
            columns.append(density if change is None else density + change.log_volume(t, x[0].numel()))
            words.append(member.density.log_told(told.distinct) if told.something else None)
        posterior = torch.stack(columns, 1)
        known = [word for word in words if word is not None]
        if len(known) == len(words):  # else some would be judged by less than others
            heard = posterior + torch.stack(known, 1)[told.rows.cpu()]
            posterior = torch.cat([heard, posterior]) if null else heard
        return posterior.softmax(-1).to(x.device, x.dtype)

    def _given(self, cluster: Tensor | None, x: Tensor) -> Tensor:
        """All weight on the expert of the given cluster."""
        if cluster is None:
            raise AtollError("routing by oracle needs the cluster of every sample")
        clusters = torch.tensor([expert.clusters[0] for expert in self.experts], device=x.device)
        given = cluster.to(x.device).reshape(-1).expand(len(x))
        weights = (given[:, None] == clusters).float()
        if not bool(weights.any(-1).all()):
            absent = sorted(set(given.tolist()) - set(clusters.tolist()))
            raise AtollError(f"there is no expert of cluster {', '.join(map(str, absent))} here")
        return weights

    def _mixed(self, x: Tensor, t: Tensor, told: BatchConditions, *, samples: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the experts' velocities, each expert asked once.

        Row i of `weights` is sample `samples[i]` with the condition of number `rows[i]`.
        """
        expert, row = torch.nonzero(weights.T).unbind(1)  # sorted by expert
        borders = [0, *torch.bincount(expert, minlength=len(self.members)).cumsum(0).tolist()]
        spans = {number: span for number, span in enumerate(pairwise(borders)) if span[0] < span[1]}
        order = self.cache.order(list(spans))
        answers: dict[int, Tensor] = {}
        for number, following in zip(order, [*order[1:], None], strict=True):
            resident = self.cache.get(number, following)
            mine = row[slice(*spans[number])]
            which = samples[mine]
            condition = resident.condition(told, rows[mine])
            answers[number] = resident.expert.velocity(x[which], t if t.numel() == 1 else t[which], condition)
            del resident, condition  # else this one would still be there while the next one comes
        # The terms are in the order of the experts, whatever order they ran in. Two terms have one sum. Three or more
        # have one up to float32 rounding only: on an accelerator, index_add adds rows of equal index in any order.
        parts = torch.cat([answers[number] for number in spans])
        parts = parts * broadcast(weights.T[expert, row].to(x.dtype), x)
        return torch.zeros(len(rows), *x.shape[1:], dtype=x.dtype, device=x.device).index_add(0, row, parts)


def _guide(v: Tensor, guided: Tensor, guidance: Guidance, *, count: int, rescale: float) -> Tensor:
    """Classifier-free guidance, v_null + g (v - v_null), for the guided samples.

    Guidance makes velocities too large; `rescale` moves their spread back to that of the unguided ones (Lin 2023).
    """
    told, null = v[:count][guided], v[count:]
    scale = guidance if isinstance(guidance, float | int) else broadcast(guidance.to(v)[guided], v)
    answer = null + scale * (told - null)
    if rescale:
        spread = tuple(range(1, v.ndim))
        factor = told.std(spread, keepdim=True) / answer.std(spread, keepdim=True).clamp(min=1e-12)
        answer = answer * (rescale * factor + 1 - rescale)
    return v[:count].index_copy(0, guided, answer)


def _check_alike(declarations: Sequence[Declaration]) -> None:
    """Experts may differ in nearly everything, but not in what a latent, a text token or a class is."""
    first = declarations[0]
    for other in declarations[1:]:
        for what, ours, theirs in (
            ("the shape of latents", first.shape, other.shape),
            ("the autoencoder", first.latents.weights, other.latents.weights),
            ("the text encoder", first.text and first.text.weights, other.text and other.text.weights),
            ("the classes", first.labels, other.labels),
        ):
            if ours and theirs and ours != theirs:
                raise AtollError(
                    f"{first.name} and {other.name} differ in {what}: {ours} and {theirs}; they are not one model"
                )
