"""The ensemble: many experts as one velocity field.

DDM splits the marginal velocity of the data into that of its clusters, u_t(x) = sum_k p_t(k | x) u_t^(k)(x): the router
gives the weights p_t(k | x), and expert k the velocity of cluster k. One evaluation for a batch of N images with K
experts goes as follows. Under guidance, G of the images also need the velocity with the null condition.

1. `route` computes the weights (N + G, K): a row for each image, then a row for each guided image with the null
   condition. Most weights are 0, for example all but one of a row with top-1.
2. `_mixture` groups the nonzero weights by expert. Each needed expert runs once, on one batch of all of its rows, with
   and without conditions. Its velocities are weighted and added to (N + G, C, H, W).
3. `guide` combines the last G rows with the rows of their images to (N, C, H, W).

Guidance combines mixtures, not experts: v_null + g (v - v_null), where v and v_null are weighted sums. A conditioned
router can weight both by p_t(k | x, c) ("conditional"), or v_null by p_t(k | x) ("separate"). With separate weights
both sums are exact marginal velocities, but their difference is one of clusters as well as of conditions, and guidance
amplifies both. A router that is not conditioned has the same weights for both.

On an accelerator the host must read the weights before it can launch the experts. It waits for the device once in an
evaluation, when it reads the logits of the router (or the states, for `nearest`). Rules, weights, and the grouping of
rows by expert are computed on the CPU from them, and go to the device as two small tensors. Times, clusters, guidance
scales and condition rows are therefore kept on the CPU. Experts may be on several devices: the states go to all of them
first, velocities come back last, and the devices compute at the same time.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from atoll.core.device import download, upload
from atoll.core.errors import AtollError
from atoll.core.names import GuidanceWeights
from atoll.core.sizes import Size, nearest_size
from atoll.ensemble.batching import ExpertBatches, attention_kernels
from atoll.ensemble.guidance import Guidance, guide, guided_rows
from atoll.ensemble.routing import Routing, RoutingState, parse
from atoll.experts.batch_conditions import BatchConditions
from atoll.experts.density import Density, resized
from atoll.experts.expert import Declaration, DeviceOptions, ExpertReference, OpenExpert, OpenRouter
from atoll.experts.expert_cache import ExpertCache
from atoll.experts.rescaling import rescaling
from atoll.flow.schedules import broadcast, check_times
from atoll.nets import Condition, PreparedCondition


class Ensemble(nn.Module):
    """Experts and a router as one velocity field. An ensemble of one expert is a dense model without a router."""

    def __init__(
        self,
        references: Sequence[ExpertReference],
        router: OpenRouter | None = None,
        *,
        device_options: DeviceOptions | None = None,
        max_loaded_experts: int | None = None,
        expert_devices: Sequence[torch.device] = (),
        routing: str | Routing = "top-1",
    ) -> None:
        """Keep at most `max_loaded_experts` experts on each device at once; None means all.

        The experts are spread over the devices of the options, unless `expert_devices` names one for each.
        """
        super().__init__()
        if not references:
            raise AtollError("an ensemble needs at least one expert")
        self.device_options = device_options or DeviceOptions()
        self.references = tuple(references)
        self.router = router
        self.routing = parse(routing)
        self.experts: tuple[Declaration, ...] = tuple(reference.declaration for reference in references)
        """The declarations of the experts, in the order of the columns of weights."""
        declared = [*self.experts, *([router.declaration] if router else [])]
        _check_alike(declared)
        # The router has no rescaling, so its normalization is the common one; experts are converted to it.
        self.space = declared[-1 if router else 0].statistics
        """The common normalization of the latents."""
        limit = len(references) if max_loaded_experts is None else max_loaded_experts
        self.cache = ExpertCache(self.references, self.space, self.device_options, limit, expert_devices)
        self.conditioning: frozenset[str] = frozenset().union(*(declaration.conditioning for declaration in declared))
        """What any of the experts, or the routing, is conditioned on: any of text, pooled and label."""
        if "text" in self.conditioning and any(
            reference.density and reference.density.caption for reference in references
        ):
            self.conditioning |= {"pooled"}

    @classmethod
    def of_expert(cls, expert: OpenExpert) -> "Ensemble":
        """Return a dense model of one expert that is already open."""
        device = next(expert.network.parameters()).device
        options = DeviceOptions(device, expert.dtype)
        ensemble = cls([ExpertReference(expert.declaration, lambda: expert.network, 0)], device_options=options)
        ensemble.cache.put(0, expert)
        return ensemble

    @property
    def device(self) -> torch.device:
        """The device of states, conditions and router."""
        return self.device_options.device

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of a latent of the default size."""
        return self.experts[0].shape

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Heights and widths of the latents that the experts were trained on, the default first."""
        return self.experts[0].sizes

    @property
    def patch(self) -> int:
        """What the sides of latents must be multiples of, for all networks."""
        declared = [*self.experts, *([self.router.declaration] if self.router else [])]
        return math.lcm(*(declaration.network.patch for declaration in declared))

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
        guidance_weights: GuidanceWeights = "separate",
        cluster: Tensor | None = None,
        rescale: float = 0.0,
        draw: Tensor | None = None,
        state: RoutingState | None = None,
    ) -> Tensor:
        """Return the velocity (batch, C, H, W) at states x (batch, C, H, W) of normalized latents.

        Times t and `guidance_scale` are one number, or one for each image (batch,). Oracle routing needs `cluster`
        (batch,); drawn and sample-1 take `draw` (batch,), or else draw from `state`, which carries the routing from one
        evaluation to the next. `rescale` is described in `guide`. All of them except x and the condition belong on the
        CPU; on an accelerator, they cost further waits.
        """
        _check_batch(x, self.shape[0], guidance_scale=guidance_scale, cluster=cluster, draw=draw)
        t = _times(t, x)
        conditions = self._conditions(condition, x)
        guided = guided_rows(guidance_scale, len(x), conditioned=conditions.conditioned and bool(self.conditioning))
        weights = self.route(
            x, t, conditions, routing=routing, guided=guided, guidance_weights=guidance_weights, cluster=cluster,
            draw=draw, state=state,
        )  # fmt: skip
        # Row i of the mixture is image images[i] with condition rows[i].
        images = torch.cat([torch.arange(len(x)), guided])
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
        guidance_weights: GuidanceWeights = "separate",
        cluster: Tensor | None = None,
        draw: Tensor | None = None,
        state: RoutingState | None = None,
    ) -> Tensor:
        """Return the weights (batch + guided, experts) of all images, then of the guided ones with the null condition.

        They are on the CPU, as `guided` (guided,), the indices of the guided images. They are computed in three steps.

        1. *Source.* The probabilities of the experts come from the router, from the densities of the clusters, or from
           the given clusters. If the source is conditioned, and there is guidance with separate weights, it gives two
           rows for each image, p(k | x, c) and p(k | x), so 2 · batch rows. Otherwise it gives one row for each image.
        2. *Rule.* A rule (top-2, nucleus, drawn …) turns every row of probabilities into weights that sum to 1.
        3. *Guidance rows.* The row of a guided image with the null condition is p(k | x) of step 1 if the source gave
           it; otherwise both velocities of the image have the same weights.
        """
        _check_batch(x, self.shape[0], cluster=cluster, draw=draw)
        t = _times(t, x)
        chosen, state = parse(routing or self.routing), state or RoutingState()
        guided = torch.empty(0, dtype=torch.long) if guided is None else guided
        if len(self.references) == 1:
            weights = torch.ones(len(x), 1)
            state.record(t, weights, weights)
        else:
            null = len(guided) > 0 and guidance_weights == "separate"
            t = self._update_sources(
                x, t, self._conditions(condition, x), chosen=chosen, cluster=cluster, null=null, state=state
            )
            weights = chosen.apply(t, state, draw=draw, count=len(x))
        offset = len(weights) - len(x)  # of the rows with the null condition; 0 if there is one row for each image
        return torch.cat([weights[: len(x)], weights[offset + guided]])

    def _conditions(self, condition: Condition | BatchConditions | None, x: Tensor) -> BatchConditions:
        if isinstance(condition, BatchConditions):
            return condition
        return BatchConditions.of(condition and condition.to(self.device), torch.arange(len(x)))

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
    ) -> Tensor:
        """Compute the probabilities of every source that an active rule needs, and store them in `state`.

        Return the times on the CPU.
        """
        needed = set()
        # Times on an accelerator are not known yet: any rule may be active.
        for rule in chosen.active(t) if t.is_cpu else chosen.rules:
            if rule.source == "given":
                state.probabilities["given"] = self._given(cluster, len(x))
            elif (final_weights := chosen.final_weights(rule, state)) is not None:
                # All images have drawn their expert. The last probabilities stay, for the trace; they decide nothing.
                state.probabilities.setdefault(rule.source, final_weights)
            else:
                needed.add(rule.source)
        empty = x[:0]
        logits = self._router_logits(x, t, conditions, null=null) if "router" in needed else empty
        states, described = empty, Condition()
        if "nearest" in needed:
            states, described = x.detach(), replace(conditions.distinct, text=None, text_mask=None)
        # The one wait of an evaluation.
        logits, states, t, *parts = download(logits, states, t, *described.tensors())
        described = described.with_tensors(parts)
        if "router" in needed:
            state.probabilities["router"] = logits[:, self._router_columns()].softmax(-1)
        if "nearest" in needed:
            state.probabilities["nearest"] = self._nearest(states, t, described, rows=conditions.rows, null=null)
        return t

    def _router_columns(self) -> list[int]:
        """Return the column of each expert in the logits of the router."""
        if self.router is None:
            raise AtollError("this model has no router; train one, or use --routing nearest or oracle")
        column = {cluster: number for number, cluster in enumerate(self.router.declaration.clusters)}
        unknown = [expert.name for expert in self.experts if expert.clusters[0] not in column]
        if unknown:
            raise AtollError(
                f"the router was trained without {', '.join(unknown)}; train it again, or use --routing nearest"
            )
        return [column[expert.clusters[0]] for expert in self.experts]

    def _router_logits(self, x: Tensor, t: Tensor, conditions: BatchConditions, *, null: bool) -> Tensor:
        """Return the router's logits (batch, clusters) on its device.

        With `null`, a conditioned router also gives those with the null condition: (2 · batch, clusters).
        """
        self._router_columns()  # raises an error if the router is missing, or was trained without an expert
        assert self.router is not None
        t = _to_device(t, x.device)
        if not (self.router.declaration.conditioning and conditions.conditioned):
            return self.router.logits(x, t, Condition())
        rows, halves = (torch.cat([conditions.rows, conditions.null]), 2) if null else (conditions.rows, 1)
        times = t if t.numel() == 1 else t.repeat(halves)
        return self.router.logits(x.repeat(halves, 1, 1, 1), times, conditions.distinct[upload(rows, x.device)])

    def _nearest(self, x: Tensor, t: Tensor, condition: Condition, *, rows: Tensor, null: bool) -> Tensor:
        """Return the posterior of the clusters (batch, experts) by their densities.

        With `null` and known conditions, the rows with the null condition follow: (2 · batch, experts). Each density is
        evaluated in the normalization of its expert; `log_volume` makes the columns comparable. `rows` (batch,) are
        those of the distinct conditions. Everything is on the CPU.
        """
        columns, captions, t = [], [], t.expand(len(x))
        by_size = [_densities(reference) for reference in self.references]
        # All columns must be densities of states of one size, for which every expert has one.
        shared = set.intersection(*(set(densities) for densities in by_size))
        size = Size(*x.shape[2:])
        if size not in shared:
            size = nearest_size(shared, size.width, size.height)
            x = resized(x, size)
        for reference, densities in zip(self.references, by_size, strict=True):
            change = rescaling(self.space, reference.declaration.statistics, reference.declaration.name)
            own, own_t = (x, t) if change is None else change.state(x, t)
            density = densities[size].log_density(own, own_t)
            columns.append(density if change is None else density + change.log_volume(t, x[0].numel()))
            # Captions and classes do not depend on the size; the density of the default size has them.
            captions.append(densities[reference.declaration.size].log_condition(condition))
        posterior = torch.stack(columns, 1)
        known = [caption for caption in captions if caption is not None]
        # Only if every expert has a density of its captions: otherwise the columns would not be comparable.
        if len(known) == len(captions):
            conditioned = posterior + torch.stack(known, 1)[rows]
            posterior = torch.cat([conditioned, posterior]) if null else conditioned
        return posterior.softmax(-1).to(x.dtype)

    def _given(self, cluster: Tensor | None, count: int) -> Tensor:
        """Put all weight on the expert of the given cluster."""
        if cluster is None:
            raise AtollError("oracle routing needs the cluster of every image")
        clusters = torch.tensor([expert.clusters[0] for expert in self.experts])
        given = cluster.cpu().reshape(-1).expand(count)
        weights = (given[:, None] == clusters).float()
        if not bool(weights.any(-1).all()):
            absent = sorted(set(given.tolist()) - set(clusters.tolist()))
            raise AtollError(f"this model has no expert of cluster {', '.join(map(str, absent))}")
        return weights

    def _mixture(
        self, x: Tensor, t: Tensor, conditions: BatchConditions, *, images: Tensor, rows: Tensor, weights: Tensor
    ) -> Tensor:
        """Return the weighted sum (rows, C, H, W) of the experts' velocities; each expert runs at most once.

        Row i of `weights` (rows, experts) belongs to image `images[i]` with condition `rows[i]` of `conditions`. All
        three are on the CPU.
        """
        device, single = x.device, t.numel() == 1
        t = _to_device(t, device)
        batches = ExpertBatches.of(weights, padded=device.type != "cpu")
        # One copy for all indices: the row of the result, the image and the condition of every pair (expert, row).
        indices = torch.stack([batches.row, images[batches.row], rows[batches.row]])
        uploaded, factor = upload(indices, device), upload(batches.weight.to(x.dtype), device)
        # A copy between two devices lets each wait for what is queued on the other; the host does not wait. So that all
        # devices compute at the same time, they get their inputs before any expert runs, the experts on the device of
        # the states run last, and velocities are copied when all experts are queued.
        order = self.cache.order(list(batches.spans), last=device)
        places = {self.cache.devices[number]: None for number in order}
        sent = {place: [part.to(place, non_blocking=True) for part in (x, t, uploaded)] for place in places}

        def condition(number: int) -> Condition | PreparedCondition:
            loaded, span = self.cache.get(number), batches.spans[number]
            return loaded.condition(conditions, indices[2, span], sent[loaded.device][2][2, span])

        elsewhere = [number for number in order if self.cache.devices[number] != device and number in self.cache]
        ready = {number: condition(number) for number in elsewhere}
        velocities: dict[int, Tensor] = {}
        with attention_kernels(device):
            for number, following in zip(order, [*order[1:], None], strict=True):
                loaded = self.cache.get(number, following)
                states, times, (_, image, _) = sent[loaded.device]
                image = image[batches.spans[number]]
                mine = ready.pop(number) if number in ready else condition(number)
                velocities[number] = loaded.expert.velocity(states[image], times if single else times[image], mine)
                del loaded, mine  # otherwise the expert would stay in memory while the next one is loaded
        # Terms are concatenated in the order of the experts, whatever order they ran in. The sum of two terms does not
        # depend on their order. That of three or more does, by rounding: on accelerators index_add has no fixed order.
        parts = torch.cat([velocities[number].to(device, non_blocking=True) for number in batches.spans])
        return x.new_zeros(len(rows), *x.shape[1:]).index_add(0, uploaded[0], parts * broadcast(factor, x))


def _densities(reference: ExpertReference) -> dict[Size, Density]:
    """Return the densities of an expert's cluster by the size of the latents."""
    if reference.density is None:
        raise AtollError(
            f"{reference.declaration.name} has no cluster density (it is a foreign expert), which --routing nearest "
            "needs; use a router"
        )
    return {reference.declaration.size: reference.density, **reference.density.sizes}


def _times(t: Tensor | float, x: Tensor) -> Tensor:
    """Return checked times (batch or 1,) in float32, where they are."""
    t = torch.as_tensor(t, dtype=torch.float32)
    return check_times(t, x)[: t.numel()]


def _to_device(t: Tensor, device: torch.device) -> Tensor:
    """Return times on a device. One time for all images is filled in there, which needs no copy."""
    return torch.full_like(t, float(t), device=device) if t.is_cpu and t.numel() == 1 else upload(t, device)


def _check_batch(x: Tensor, channels: int, **options: Tensor | float | None) -> None:
    """Raise an error for states of another shape, and for options of another batch size."""
    if x.ndim != 4 or x.shape[1] != channels:
        raise AtollError(
            f"got states of shape {tuple(x.shape)}, expected (batch, {channels}, height, width), the latents of "
            "these experts"
        )
    for name, value in options.items():
        if isinstance(value, Tensor) and value.numel() not in (1, len(x)):
            raise AtollError(f"{name} has shape {tuple(value.shape)}, expected ({len(x)},): one for each state")


def _check_alike(declarations: Sequence[Declaration]) -> None:
    """Raise an error for experts with different latents, text encoders or classes; everything else may differ."""
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
                    f"{first.name} and {other.name} differ in {what}: {ours} and {theirs}; they cannot be mixed"
                )
