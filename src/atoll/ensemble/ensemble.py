"""The ensemble: many experts as one velocity field.

At every evaluation the router is evaluated once, each image is given its experts, and every expert that is needed runs
once on all of its images: those with their conditions and, under guidance, those with the null condition, in one batch.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from atoll.core.errors import AtollError
from atoll.ensemble.guidance import Guidance, guide, guided_rows
from atoll.ensemble.routing import Routing, RoutingState, parse
from atoll.experts.batch_conditions import BatchConditions
from atoll.experts.expert import Declaration, DeviceOptions, ExpertReference, OpenExpert, OpenRouter
from atoll.experts.expert_cache import ExpertCache
from atoll.experts.rescaling import rescaling
from atoll.flow.schedules import broadcast, check_times
from atoll.nets import Condition


class Ensemble(nn.Module):
    """Experts and a router as one velocity field. An ensemble of one expert is a dense model and needs no router."""

    def __init__(
        self,
        references: Sequence[ExpertReference],
        router: OpenRouter | None = None,
        *,
        device_options: DeviceOptions | None = None,
        max_loaded_experts: int | None = None,
        routing: str | Routing = "top-1",
    ) -> None:
        """Put at most `max_loaded_experts` experts in memory at once; None is all of them."""
        super().__init__()
        if not references:
            raise AtollError("an ensemble needs at least one expert")
        self.device_options = device_options or DeviceOptions()
        self.references = tuple(references)
        self.router = router
        self.routing = parse(routing)
        self.experts: tuple[Declaration, ...] = tuple(reference.declaration for reference in references)
        """What each expert declares, in the order of the columns of weights."""
        declared = [*self.experts, *([router.declaration] if router else [])]
        _check_alike(declared)
        self.space = declared[-1 if router else 0].statistics
        """How the latents of the states are normalized."""
        self.cache = ExpertCache(
            self.references, self.space, self.device_options, max_loaded_experts or len(references)
        )
        self.conditioning: frozenset[str] = frozenset().union(*(declaration.conditioning for declaration in declared))
        """What any of the experts, or the routing, is conditioned on."""
        if "text" in self.conditioning and any(
            reference.density and reference.density.caption for reference in references
        ):
            self.conditioning |= {"pooled"}

    @classmethod
    def of_expert(cls, expert: OpenExpert) -> "Ensemble":
        """Make a dense model of one expert that is open already."""
        device = next(expert.network.parameters()).device
        options = DeviceOptions(device, expert.dtype)
        ensemble = cls([ExpertReference(expert.declaration, lambda: expert.network, 0)], device_options=options)
        ensemble.cache.put(0, expert)
        return ensemble

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.device_options.device

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of a latent."""
        return self.experts[0].shape

    def forward(
        self, x: Tensor, t: Tensor | float, condition: Condition | BatchConditions | None = None, **options: object
    ) -> Tensor:
        """Return `velocity`."""
        return self.velocity(x, t, condition, **options)  # type: ignore[arg-type]

    def velocity(
        self,
        x: Tensor,
        t: Tensor | float,
        condition: Condition | BatchConditions | None = None,
        *,
        routing: str | Routing | None = None,
        guidance_scale: Guidance = 1.0,
        cluster: Tensor | None = None,
        rescale: float = 0.0,
        draw: Tensor | None = None,
        state: RoutingState | None = None,
    ) -> Tensor:
        """Return the velocity at states x (batch, channels, height, width) of the ensemble's space.

        Times t and `guidance` are one number, or one for each image. `cluster` is what routing by oracle needs, `draw`
        what drawn and sample-1 need; `state` carries routing from one evaluation to the next.
        """
        _check_batch(x, self.shape[0], guidance_scale=guidance_scale, cluster=cluster, draw=draw)
        t = check_times(torch.as_tensor(t, dtype=torch.float32, device=x.device), x)[: torch.as_tensor(t).numel()]
        conditions = self._conditions(condition, x)
        guided = guided_rows(guidance_scale, x, conditioned=conditions.conditioned and bool(self.conditioning))
        weights = self.route(
            x, t, conditions, routing=routing, guided=guided, cluster=cluster, draw=draw, state=state
        )  # fmt: skip
        images = torch.cat([torch.arange(len(x), device=x.device), guided])
        rows = torch.cat([conditions.rows, conditions.null[guided]])
        v = self._mixture(x, t, conditions, images=images, rows=rows, weights=weights)
        return guide(v, guided, guidance_scale, rescale=rescale) if len(guided) else v

    def route(
        self,
        x: Tensor,
        t: Tensor | float,
        condition: Condition | BatchConditions | None = None,
        *,
        routing: str | Routing | None = None,
        guided: Tensor | None = None,
        cluster: Tensor | None = None,
        draw: Tensor | None = None,
        state: RoutingState | None = None,
    ) -> Tensor:
        """Return the weights (batch + guided, experts): of each image, then of each guided image without condition.

        A weight is decided in three steps.

        1. *Source.* The probabilities of the experts come from the router, from the clusters' densities, or from the
           given clusters. A router that is conditioned has one opinion of an image with its prompt and another without,
           so under guidance it is evaluated for both: 2 · batch rows. All other sources have one row for each image.
        2. *Rule.* A rule (top-2, nucleus, drawn …) turns every row of probabilities into weights that sum to 1.
        3. *Guidance rows.* Guidance mixes the velocity with and without the condition. The row of an image without the
           condition is the one of step 1 if there is one; else both velocities have the same weights.
        """
        _check_batch(x, self.shape[0], cluster=cluster, draw=draw)
        t = check_times(torch.as_tensor(t, dtype=torch.float32, device=x.device), x)[: torch.as_tensor(t).numel()]
        chosen, state = parse(routing or self.routing), state or RoutingState()
        guided = torch.empty(0, dtype=torch.long, device=x.device) if guided is None else guided
        if len(self.references) == 1:
            weights = torch.ones(len(x), 1, device=x.device)
            state.record(t, weights, weights)
        else:
            self._update_sources(
                x, t, self._conditions(condition, x), chosen=chosen, cluster=cluster, null=len(guided) > 0, state=state
            )
            weights = chosen.apply(t, state, draw=draw, count=len(x))
        without = len(weights) - len(x)  # 0 if the source has one row for each image
        return torch.cat([weights[: len(x)], weights[without + guided]])

    def _conditions(self, condition: Condition | BatchConditions | None, x: Tensor) -> BatchConditions:
        if isinstance(condition, BatchConditions):
            return condition
        return BatchConditions.of(condition, torch.arange(len(x), device=self.device))

    def _update_sources(
        self,
        x: Tensor,
        t: Tensor,
        conditions: BatchConditions,
        *,
        chosen: Routing,
        cluster: Tensor | None,
        null: bool,
        state: RoutingState,
    ) -> None:
        """Take the first step of routing: the probabilities of every source that a rule needs now, in `state`."""
        fresh = set()
        for rule in chosen.active(t):
            if rule.source == "given":
                state.probabilities["given"] = self._given(cluster, x)
            elif (final_weights := chosen.final_weights(rule, state)) is not None:  # the router is not needed again
                state.probabilities.setdefault(rule.source, final_weights)
            elif rule.source not in fresh:
                source = self._nearest if rule.source == "nearest" else self._routed
                state.probabilities[rule.source] = source(x, t, conditions, null=null)
                fresh.add(rule.source)

    def _routed(self, x: Tensor, t: Tensor, conditions: BatchConditions, *, null: bool) -> Tensor:
        """Return the router's probabilities, renormalized over the experts that are there; below, without condition."""
        if self.router is None:
            raise AtollError("this ensemble has no router; train one, or use --routing nearest or oracle")
        column = {cluster: number for number, cluster in enumerate(self.router.declaration.clusters)}
        unknown = [expert.name for expert in self.experts if expert.clusters[0] not in column]
        if unknown:
            raise AtollError(f"the router does not know {', '.join(unknown)}; train it again, or use --routing nearest")
        if self.router.declaration.conditioning and conditions.conditioned:
            rows, halves = (torch.cat([conditions.rows, conditions.null]), 2) if null else (conditions.rows, 1)
            times = t if t.numel() == 1 else t.repeat(halves)
            logits = self.router.logits(x.repeat(halves, 1, 1, 1), times, conditions.distinct[rows])
        else:
            logits = self.router.logits(x, t, Condition())
        return logits[:, [column[expert.clusters[0]] for expert in self.experts]].softmax(-1)

    def _nearest(self, x: Tensor, t: Tensor, conditions: BatchConditions, *, null: bool) -> Tensor:
        """Return the posterior of the clusters by their own densities, each measured in its expert's own space."""
        columns, captions, t, states = [], [], t.cpu().expand(len(x)), x.detach().cpu()
        for reference in self.references:
            name = reference.declaration.name
            if reference.density is None:
                raise AtollError(
                    f"{name} does not declare how its cluster is distributed (it was trained by an older Atoll, or "
                    "comes from elsewhere), so --routing nearest cannot judge it; train it again, or use a router"
                )
            change = rescaling(self.space, reference.declaration.statistics, name)
            own, own_t = (states, t) if change is None else change.state(states, t)
            density = reference.density.log_density(own, own_t)
            columns.append(density if change is None else density + change.log_volume(t, x[0].numel()))
            captions.append(reference.density.log_condition(conditions.distinct) if conditions.conditioned else None)
        posterior = torch.stack(columns, 1)
        known = [caption for caption in captions if caption is not None]
        if len(known) == len(captions):  # else some would be judged by less than others
            conditioned = posterior + torch.stack(known, 1)[conditions.rows.cpu()]
            posterior = torch.cat([conditioned, posterior]) if null else conditioned
        return posterior.softmax(-1).to(x.device, x.dtype)

    def _given(self, cluster: Tensor | None, x: Tensor) -> Tensor:
        """Put all weight on the expert of the given cluster."""
        if cluster is None:
            raise AtollError("routing by oracle needs the cluster of every image")
        clusters = torch.tensor([expert.clusters[0] for expert in self.experts], device=x.device)
        given = cluster.to(x.device).reshape(-1).expand(len(x))
        weights = (given[:, None] == clusters).float()
        if not bool(weights.any(-1).all()):
            absent = sorted(set(given.tolist()) - set(clusters.tolist()))
            raise AtollError(f"there is no expert of cluster {', '.join(map(str, absent))} here")
        return weights

    def _mixture(
        self, x: Tensor, t: Tensor, conditions: BatchConditions, *, images: Tensor, rows: Tensor, weights: Tensor
    ) -> Tensor:
        """Return the weighted sum of the experts' velocities; each expert runs once.

        Row i of `weights` (rows, experts) is the image `images[i]` with the condition of number `rows[i]`.
        """
        expert, row = torch.nonzero(weights.T).unbind(1)  # sorted by expert
        borders = [0, *torch.bincount(expert, minlength=len(self.references)).cumsum(0).tolist()]
        spans = {number: span for number, span in enumerate(pairwise(borders)) if span[0] < span[1]}
        order = self.cache.order(list(spans))
        velocities: dict[int, Tensor] = {}
        for number, following in zip(order, [*order[1:], None], strict=True):
            loaded = self.cache.get(number, following)
            mine = row[slice(*spans[number])]
            which = images[mine]
            condition = loaded.condition(conditions, rows[mine])
            velocities[number] = loaded.expert.velocity(x[which], t if t.numel() == 1 else t[which], condition)
            del loaded, condition  # else this one would still be there while the next one comes
        # The terms are in the order of the experts, whatever order they ran in. Two terms have one sum. Three or more
        # have one up to float32 rounding only: on an accelerator, index_add adds rows of equal index in any order.
        parts = torch.cat([velocities[number] for number in spans])
        parts = parts * broadcast(weights.T[expert, row].to(x.dtype), x)
        return torch.zeros(len(rows), *x.shape[1:], dtype=x.dtype, device=x.device).index_add(0, row, parts)


def _check_batch(x: Tensor, channels: int, **options: Tensor | float | None) -> None:
    """Refuse states of other latents, and options of another batch size."""
    if x.ndim != 4 or x.shape[1] != channels:
        raise AtollError(
            f"got states of shape {tuple(x.shape)}, expected (batch, {channels}, height, width) in the latent "
            "space of these experts"
        )
    for name, value in options.items():
        if isinstance(value, Tensor) and value.numel() not in (1, len(x)):
            raise AtollError(f"{name} has shape {tuple(value.shape)}, expected ({len(x)},): one for each state")


def _check_alike(declarations: Sequence[Declaration]) -> None:
    """Refuse experts that differ in what a latent, a text token or a class is; all else may differ."""
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
