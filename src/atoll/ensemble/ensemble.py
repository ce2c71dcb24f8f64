"""The ensemble: many experts as one velocity field.

DDM splits the marginal velocity of the data into velocities of its clusters, u_t(x) = sum_k p_t(k | x) u_t^(k)(x): the
router gives the weights p_t(k | x), and expert k the velocity of cluster k. One evaluation for a batch of N images with
K experts goes as follows. Under guidance, G of the images also need the velocity with the null condition.

1. `route` computes the weights (N + G, K): a row for each image, then a row for each guided image with the null
   condition. Most weights are 0, for example all but one of a row with top-1.
2. `_mixture` groups the nonzero weights by expert. Each needed expert runs once, on one batch of all of its rows, with
   and without conditions. Its velocities are weighted and added to (N + G, C, H, W).
3. `guide` combines the last G rows with the rows of their images to (N, C, H, W).

Guidance combines mixtures, not experts: v_null + g (v - v_null), where v and v_null are weighted sums. A conditioned
router can weight both by p_t(k | x, c) ("conditional"), or v_null by p_t(k | x) ("separate"). With separate weights
both sums are exact marginal velocities, but their difference is one of clusters as well as of conditions, and guidance
amplifies both. A router that is not conditioned has the same weights for both.

Autoguidance (Karras et al. 2024, arXiv 2406.02507) replaces v_null by the velocity v_weak of networks that were trained
less: v_weak + g (v - v_weak). Both have the condition, and the same weights of the experts. Each expert has a weak
network of its own; the ensemble counts it as one more expert, so the G rows belong to the experts K … 2K - 1.

On an accelerator the host must read the weights before it can launch the experts. It waits for the device once in an
evaluation, when it reads the logits of the router (or the states, for `nearest`). Rules, weights, and the grouping of
rows by expert are computed on the CPU from them, and go to the device as two small tensors. Times, clusters, guidance
scales and condition rows are therefore kept on the CPU. Experts may be on several devices: the states go to all of them
first, velocities come back last, and the devices compute at the same time.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from atoll.core.device import download, upload
from atoll.core.errors import AtollError
from atoll.core.names import GuidanceName, GuidanceWeights
from atoll.core.sizes import Size, nearest_size
from atoll.data.density import resized
from atoll.ensemble.routing import Routing, RoutingState, WeightSource, parse
from atoll.experts import calibration
from atoll.experts.batch_conditions import BatchConditions
from atoll.experts.expert import DeviceOptions, NetworkReference, OpenExpert, OpenRouter, Rescaling
from atoll.experts.expert_cache import ExpertCache, spread_experts
from atoll.flow.schedules import broadcast, check_times
from atoll.nets import Condition, PreparedCondition

Guidance = float | Tensor
"""A guidance scale: one number for all images, or one for each (batch,). 1 is no guidance."""
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention on CUDA without cuDNN, which builds a plan for every new batch size; routing changes them at every step."""


class Ensemble:
    """Experts and a router as one velocity field. An ensemble of one expert is a dense model without a router."""

    def __init__(
        self,
        references: Sequence[NetworkReference],
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
        if not references:
            raise AtollError("an ensemble needs at least one expert")
        self.references = tuple(references)
        self.router = router
        self.routing = parse(routing)
        self.declarations = tuple(reference.declaration for reference in references)
        """Declarations of the experts, in the order of the columns of weights."""
        declared = [*self.declarations, *([router.declaration] if router else [])]
        # Latents, text encoder and classes must be the same; everything else may differ.
        first = declared[0]
        for other in declared[1:]:
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
        self.steps = first.steps
        """Number of sampling steps of few-step students; None for velocities at any time."""
        if any(other.steps != first.steps for other in self.declarations):
            raise AtollError("these experts sample in different numbers of steps; they cannot be mixed")
        self.shape, self.sizes = first.shape, first.sizes
        """Channels, height and width of a latent of the default size; all sizes of latents, the default first."""
        self.patch = math.lcm(*(declaration.network.patch for declaration in declared))
        """What the sides of latents must be multiples of, for all networks."""
        # The router has no rescaling, so its normalization is the common one; experts are converted to it.
        self.normalization = declared[-1 if router else 0].statistics
        """The common normalization of the latents."""
        self.device_options = device_options or DeviceOptions()
        self.device = self.device_options.device
        """The device of states, conditions and router."""
        # Weak networks follow the experts, each on the device of its expert.
        stored, options = list(self.references), self.device_options
        devices = tuple(expert_devices) or spread_experts(stored, options.devices or (options.device,))
        if any(reference.weak for reference in stored):
            stored += [reference.weak or reference for reference in stored]
            devices *= 2
        limit = len(stored) if max_loaded_experts is None else max_loaded_experts
        self.cache = ExpertCache(stored, self.normalization, options, limit, devices)
        self.temperatures = calibration.temperatures(
            [one.calibration for one in self.declarations],
            [reference.density.images if reference.density else 0.0 for reference in references],
        )
        """Of `nearest` routing, by bin of t; None if no expert measured them."""
        self.conditioning: frozenset[str] = frozenset().union(*(declaration.conditioning for declaration in declared))
        """What any of the experts, or the routing, is conditioned on: any of text, pooled, label and arguments."""
        if self.conditioning & {"text", "arguments"} and any(
            reference.density and reference.density.caption for reference in references
        ):
            self.conditioning |= {"pooled"}

    @classmethod
    def of_expert(cls, expert: OpenExpert) -> "Ensemble":
        """Return a dense model of one expert that is already open."""
        options = DeviceOptions(expert.device, expert.dtype)
        ensemble = cls([NetworkReference(expert.declaration, lambda: expert.network, 0)], device_options=options)
        ensemble.cache.put(0, expert)
        return ensemble

    def velocity(
        self,
        x: Tensor,
        t: Tensor | float,
        condition: Condition | BatchConditions | None = None,
        *,
        routing: str | Routing | None = None,
        guidance_scale: Guidance = 1.0,
        guidance: GuidanceName = "classifier-free",
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
        t, conditions = self._check(x, t, condition, guidance_scale=guidance_scale, cluster=cluster, draw=draw)
        # Images whose scale is not 1 also need the velocity with the null condition, or that of the weak networks.
        guided, auto = torch.empty(0, dtype=torch.long), guidance == "autoguidance"
        if auto or (conditions.conditioned and self.conditioning):
            scales = torch.as_tensor(guidance_scale).cpu().flatten().expand(len(x))
            guided = torch.nonzero(scales != 1).flatten()
        weights = self.route(
            x, t, conditions, routing=routing, guided=guided,
            guidance_weights="conditional" if auto else guidance_weights, cluster=cluster, draw=draw, state=state,
        )  # fmt: skip
        if auto and len(guided):
            self.check_weak()
            # (batch + guided, 2 · experts): the rows of the guided images belong to the weak networks.
            strong, weak = weights[: len(x)], weights[len(x) :]
            weights = torch.cat(
                [functional.pad(strong, (0, strong.shape[1])), functional.pad(weak, (weak.shape[1], 0))]
            )
        # Row i of the mixture is image images[i] with condition rows[i].
        images = torch.cat([torch.arange(len(x)), guided])
        rows = torch.cat([conditions.rows, (conditions.rows if auto else conditions.null)[guided]])
        v = self._mixture(x, t, conditions, images=images, rows=rows, weights=weights)
        return guide(v, guided, guidance_scale, rescale=rescale) if len(guided) else v

    def check_weak(self) -> None:
        """Raise an error if an expert has no weak network."""
        if without := [one.declaration.name for one in self.references if one.weak is None]:
            raise AtollError(
                f"autoguidance needs weak networks, and {', '.join(without)} was trained without; train with "
                "train.weak_share, such as 0.2. Exports and copies of shared runs have no weak networks"
            )

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
        t, conditions = self._check(x, t, condition, cluster=cluster, draw=draw)
        chosen, state = parse(routing or self.routing), state or RoutingState()
        guided = torch.empty(0, dtype=torch.long) if guided is None else guided
        if len(self.references) == 1:
            p = weights = torch.ones(len(x), 1)
        else:
            # 1. Source.
            null = len(guided) > 0 and guidance_weights == "separate"
            found, t = self._probabilities(x, t, conditions, routing=chosen, cluster=cluster, null=null, state=state)
            state.probabilities |= found
            # 2. Rule. Sources with one row per image are repeated, so that all have the same number of rows.
            rows = max(len(p) for p in found.values())
            sources = {source: p.repeat(rows // len(p), 1) for source, p in found.items()}
            draw = state.draw(chosen, len(x)) if draw is None and chosen.draws else draw
            times = t if t.numel() == 1 else t.repeat(rows // len(x))
            weights = chosen.weights(sources, times, state, draw=None if draw is None else draw.cpu())
            p = sources[chosen.active(t)[0].source]
        state.record(t, p[: len(x)], weights[: len(x)])
        # 3. Guidance rows. With two rows for each image, those with the null condition are the second half.
        conditioned, null_rows = weights[: len(x)], weights[-len(x) :]
        return torch.cat([conditioned, null_rows[guided]])

    def _check(
        self, x: Tensor, t: Tensor | float, condition: Condition | BatchConditions | None, **options: Guidance | None
    ) -> tuple[Tensor, BatchConditions]:
        """Return times (batch or 1,) in float32, on their current device, and conditions; check all shapes."""
        if x.ndim != 4 or x.shape[1] != self.shape[0]:
            raise AtollError(
                f"got states of shape {tuple(x.shape)}, expected (batch, {self.shape[0]}, height, width), the latents "
                "of these experts"
            )
        for name, value in options.items():
            if isinstance(value, Tensor) and value.numel() not in (1, len(x)):
                raise AtollError(f"{name} has shape {tuple(value.shape)}, expected ({len(x)},): one for each state")
        t = torch.as_tensor(t, dtype=torch.float32)
        t = check_times(t, x)[: t.numel()]
        if not isinstance(condition, BatchConditions):
            condition = BatchConditions.of(condition and condition.to(self.device), torch.arange(len(x)))
        return t, condition

    def _probabilities(
        self,
        x: Tensor,
        t: Tensor,
        conditions: BatchConditions,
        *,
        routing: Routing,
        cluster: Tensor | None,
        null: bool,
        state: RoutingState,
    ) -> tuple[dict[WeightSource, Tensor], Tensor]:
        """Return the probabilities of every source that an active rule needs, and the times, on the CPU.

        A source has a row for each image (batch, experts). With `null` and known conditions, a conditioned source also
        has the rows with the null condition, after them: (2 · batch, experts).
        """
        found: dict[WeightSource, Tensor] = {}
        needed = set()
        # Times on an accelerator are not known yet: any rule may be active.
        for rule in routing.active(t) if t.is_cpu else routing.rules:
            if (final_weights := routing.final_weights(rule, state)) is None:
                needed.add(rule.source)
            else:
                # All images have their expert. The last probabilities stay, for the trace; they decide nothing.
                found[rule.source] = state.probabilities.get(rule.source, final_weights)
        if "given" in needed:
            # All weight is on the expert of the given cluster.
            if cluster is None:
                raise AtollError("oracle routing needs the cluster of every image")
            clusters = torch.tensor([declaration.clusters[0] for declaration in self.declarations])
            given = cluster.cpu().reshape(-1).expand(len(x))
            found["given"] = (given[:, None] == clusters).float()
            if absent := sorted(set(given.tolist()) - set(clusters.tolist())):
                raise AtollError(f"this model has no expert of cluster {', '.join(map(str, absent))}")
        # What no rule needs stays empty, so that one download below fits all cases.
        logits = states = x[:0]
        described = Condition()
        if "router" in needed:
            if self.router is None:
                raise AtollError("this model has no router; train one, or use --routing nearest or oracle")
            column = {cluster: number for number, cluster in enumerate(self.router.declaration.clusters)}
            if unknown := [one.name for one in self.declarations if one.clusters[0] not in column]:
                raise AtollError(
                    f"the router was trained without {', '.join(unknown)}; train it again, or use --routing nearest"
                )
            times = _to_device(t, x.device)
            if self.router.declaration.conditioning and conditions.conditioned:
                rows, halves = (torch.cat([conditions.rows, conditions.null]), 2) if null else (conditions.rows, 1)
                times = times if t.numel() == 1 else times.repeat(halves)
                condition = conditions.distinct[upload(rows, x.device)]
                logits = self.router.logits(x.repeat(halves, 1, 1, 1), times, condition)
            else:
                logits = self.router.logits(x, times, Condition())
        if "nearest" in needed:
            states, described = x.detach(), replace(conditions.distinct, text=None, text_mask=None)
        # The one wait of an evaluation.
        logits, states, t, *parts = download(logits, states, t, *described.tensors())
        if "router" in needed:
            found["router"] = logits[:, [column[one.clusters[0]] for one in self.declarations]].softmax(-1)
        if "nearest" in needed:
            described = described.with_tensors(parts)
            null_rows = conditions.null if null else None
            found["nearest"] = self._nearest(states, t, described, rows=conditions.rows, null=null_rows)
        return found, t

    def _nearest(self, x: Tensor, t: Tensor, condition: Condition, *, rows: Tensor, null: Tensor | None) -> Tensor:
        """Return the posterior of the clusters by their densities, in rows as `_probabilities`.

        Each density is evaluated in the normalization of its expert; `log_volume` makes the columns comparable. The
        temperature is that of the experts' calibrations. `rows`
        and `null` (batch,) select from the distinct conditions. Everything is on the CPU.
        """
        by_size = []
        for reference in self.references:
            if reference.density is None:
                raise AtollError(
                    f"{reference.declaration.name} has no cluster density (it is a foreign expert), which --routing "
                    "nearest needs; use a router"
                )
            by_size.append({reference.declaration.size: reference.density, **reference.density.sizes})
        # All columns must be densities of states of one size, for which every expert has one.
        shared = set.intersection(*(set(densities) for densities in by_size))
        size = Size(*x.shape[2:])
        if size not in shared:
            size = nearest_size(shared, size.width, size.height)
            x = resized(x, size)
        columns, captions, t = [], [], t.expand(len(x))
        for reference, densities in zip(self.references, by_size, strict=True):
            declaration = reference.declaration
            rescaling = Rescaling.between(self.normalization, declaration.statistics, declaration.name)
            own, own_t = (x, t) if rescaling is None else rescaling.state(x, t)
            density = densities[size].log_density(own, own_t) - densities[size].count.double().log()
            columns.append(density if rescaling is None else density + rescaling.log_volume(t, x[0].numel()))
            # Captions and classes do not depend on the size; the density of the default size has them.
            captions.append(densities[declaration.size].log_condition(condition))
        evidence = torch.stack(columns, 1)
        images = torch.stack([densities[size].count for densities in by_size])
        temperature = None if self.temperatures is None else calibration.temperature_at(self.temperatures, t)[:, None]
        known = [caption for caption in captions if caption is not None]
        # Only if every expert has a density of its captions: otherwise the columns would not be comparable.
        if len(known) == len(captions):
            caption = torch.stack(known, 1)
            parts = [evidence + caption[own] for own in (rows, null) if own is not None]
            evidence = torch.cat(parts)
            temperature = None if temperature is None else temperature.repeat(len(parts), 1)
        log_p = calibration.log_posterior(evidence, images, 1.0 if temperature is None else temperature)
        return log_p.exp().to(x.dtype)

    def _mixture(
        self, x: Tensor, t: Tensor, conditions: BatchConditions, *, images: Tensor, rows: Tensor, weights: Tensor
    ) -> Tensor:
        """Return the weighted sum (rows, C, H, W) of the experts' velocities; each expert runs at most once.

        Row i of `weights` (rows, experts) belongs to image `images[i]` with condition `rows[i]` of `conditions`. All
        three are on the CPU.
        """
        device, single = x.device, t.numel() == 1
        t = _to_device(t, device)
        row, weight, spans = expert_batches(weights, padded=device.type != "cpu")
        # One copy for all indices: the row of the result, the image and the condition of every pair (expert, row).
        indices = torch.stack([row, images[row], rows[row]])
        uploaded, factor = upload(indices, device), upload(weight.to(x.dtype), device)
        # A copy between two devices lets each wait for what is queued on the other; the host does not wait. So that all
        # devices compute at the same time, they get their inputs before any expert runs, the experts on the device of
        # the states run last, and velocities are copied when all experts are queued.
        order = self.cache.order(list(spans), last=device)
        places = {self.cache.devices[number]: None for number in order}
        sent = {place: [part.to(place, non_blocking=True) for part in (x, t, uploaded)] for place in places}

        def condition(number: int) -> Condition | PreparedCondition:
            loaded, span = self.cache.get(number), spans[number]
            return loaded.condition(conditions, indices[2, span], sent[loaded.device][2][2, span])

        elsewhere = [number for number in order if self.cache.devices[number] != device and number in self.cache]
        ready = {number: condition(number) for number in elsewhere}
        velocities: dict[int, Tensor] = {}
        with sdpa_kernel(KERNELS) if device.type == "cuda" else nullcontext():
            for number, following in zip(order, [*order[1:], None], strict=True):
                loaded = self.cache.get(number, following)
                states, times, (_, image, _) = sent[loaded.device]
                image = image[spans[number]]
                mine = ready.pop(number) if number in ready else condition(number)
                velocities[number] = loaded.expert.velocity(states[image], times if single else times[image], mine)
                del loaded, mine  # otherwise the expert would stay in memory while the next one is loaded
        # Terms are concatenated in the order of the experts, whatever order they ran in. The sum of two terms does not
        # depend on their order. That of three or more does, by rounding: on accelerators index_add has no fixed order.
        parts = torch.cat([velocities[number].to(device, non_blocking=True) for number in spans])
        return x.new_zeros(len(rows), *x.shape[1:]).index_add(0, uploaded[0], parts * broadcast(factor, x))


def expert_batches(weights: Tensor, *, padded: bool) -> tuple[Tensor, Tensor, dict[int, slice]]:
    """Group the nonzero weights (rows, experts) by expert, on the CPU.

    Return the row (pairs,) and the weight (pairs,) of all pairs (expert, row), sorted by expert, and the pairs of each
    expert that has any. With `padded`, the batch of an expert is filled up to one of few sizes: its last row is
    repeated with weight 0. Accelerators choose kernels, and compile graphs, by size.
    """
    expert, row = torch.nonzero(weights.T).unbind(1)
    weight = weights.T[expert, row]
    counts = torch.bincount(expert, minlength=weights.shape[1]).tolist()
    rows, factors, spans, start = [], [], {}, 0
    for number, (own, factor) in enumerate(zip(torch.split(row, counts), torch.split(weight, counts), strict=True)):
        if len(own):
            size = padded_size(len(own)) if padded else len(own)
            rows += [own, own[-1:].expand(size - len(own))]
            factors += [factor, factor.new_zeros(size - len(own))]
            spans[number] = slice(start, start + size)
            start += size
    return torch.cat(rows), torch.cat(factors), spans


def padded_size(count: int) -> int:
    """Return the next number of the form 2^k or 3 · 2^k: 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on.

    There are 14 of them up to 128. At most a third of the rows are padding, on average 13 % if all counts are equally
    frequent.
    """
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def guide(v: Tensor, guided: Tensor, guidance_scale: Guidance, *, rescale: float = 0.0) -> Tensor:
    """Return v_null + g (v - v_null) for the guided images, and v for the others: (batch, C, H, W).

    This is classifier-free guidance (Ho and Salimans 2022), or autoguidance, for which v_null is v_weak. `v`
    (batch + guided, C, H, W) holds the velocities of all images, then v_null of the guided images; `guided` (guided,)
    is on the CPU. Guidance increases the standard deviation of the velocity; `rescale` in [0, 1] moves it back towards
    the standard deviation of the conditional velocity (Lin et al. 2023, arXiv 2305.08891, section 3.4).
    """
    count = len(v) - len(guided)
    everything = len(guided) == count
    index = guided if everything else upload(guided, v.device)
    conditioned, null = v[:count] if everything else v[:count][index], v[count:]
    if isinstance(guidance_scale, Tensor):
        some = guidance_scale.cpu().flatten().expand(count)[guided]
        guidance_scale = broadcast(upload(some.to(v.dtype), v.device), v)
    result = null + guidance_scale * (conditioned - null)
    if rescale:
        pixels = tuple(range(1, v.ndim))
        factor = conditioned.std(pixels, keepdim=True) / result.std(pixels, keepdim=True).clamp(min=1e-12)
        result = result * (rescale * factor + 1 - rescale)
    return result if everything else v[:count].index_copy(0, index, result)


def _to_device(t: Tensor, device: torch.device) -> Tensor:
    """Return times on a device. One time for all images is filled in there, which needs no copy."""
    return torch.full_like(t, float(t), device=device) if t.is_cpu and t.numel() == 1 else upload(t, device)
