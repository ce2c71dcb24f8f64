"""The behavior of a network, measured on the shards of its run before somebody signs for it.

A contributor chooses what to declare. So nothing declared is used: an admitter measures with a seed of their own,
everywhere that sampling looks: with the condition, with the null condition, and guided over a few steps of the solver.
Each result is a `Figure` with its limit. A refusal says what is wrong, and not by how much: a number could be aimed at.
`benchmarks/admission.py RUN` prints all figures of all experts of a run.

The first reference is a network of the same kind that was never trained, on the same noised images. Errors are compared
in *bands*: ten bins of the time, and each single time of a solver with a random number of steps, of which the first is
t = 1. A mean over all times would hide an expert that is wrong only at some of them. These images are training images:
an expert that memorizes a small cluster is honest, but worse than an untrained network on validation images. The limit
of the policy is for validation images.

The error in a band is that of the denoised image x - t v, which is t² times the error of the velocity v. Less noise
leaves less to guess, so this error falls as t falls, for every prediction. An untrained x0 network has an error as
large as the data even at t = 0, where it bounds nothing; there an expert is compared with itself at larger times.

An error that all images share moves every sample: a *tint* is one of a channel, a *pattern* one of channels and
positions. Let r = min(1, t/`SHARED_TIME`) (v - (eps - x0)), and m_A, m_B (C, H, W) its means over all times and one
half of the images each. Their product estimates the square of the common error without bias, since the noise of the two
halves is independent. In units of the data's standard deviation:

    tint = max over channels of sqrt(max(0, mean_HW(m_A) mean_HW(m_B))),    pattern = sqrt(max(0, mean_CHW(m_A m_B)))

The second reference are the other networks of the run with the same prediction: on images of its own cluster, an
expert must be better than the experts of other clusters and than the shared start. Errors on different clusters are
never compared, because clusters differ in difficulty, and nor are those of different predictions, which learn at
different speeds: a DDPM expert of CIFAR-10 had 1.04 times the error of a velocity expert of another cluster after as
many images. A loss cannot find everything: see "What is not protected" in docs/explanation/trust.md.
"""

import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from atoll import flow
from atoll.core import layout
from atoll.core.artifacts import Artifact, Manifest
from atoll.core.device import device, full_float32
from atoll.core.manifests import EXPERT, ROUTER
from atoll.core.networks import BaseConfig
from atoll.data.dataset import Batch, Shards
from atoll.experts.expert import DeviceOptions, OpenExpert, condition_of, open_expert, open_router
from atoll.experts.run import reference_of_artifact
from atoll.experts.validation import TIME_BINS, ValidationSet, time_weight, validate
from atoll.nets import build
from atoll.verify.trust import Policy
from atoll.verify.untrusted import Refused
from atoll.verify.verified_files import VerifiedFiles

IMAGES = 128
"""Images of each cluster for measurements: 1,280 rows, an error of 3 to 9 %."""
UNTRAINED = 0.999
"""An expert's loss must be below this part of that of an untrained network, on equal rows. 8 steps of 8 images reach
0.98 with velocities and 0.998 with DDPM. Untrained weights with noise of 1e-4 have more (a test)."""
BAND = 1.1
"""Largest error in each band, relative to that of an untrained network or, if that is larger, of a velocity of zero.
Experts of demo, emoji and CIFAR-10 have at most 0.86, with the null condition. A DDPM expert had 1.31 of the untrained
network near t = 0, where its objective hardly trains, but 0.73 of a velocity of zero."""
EARLY_BAND = 1.5
"""The same for a checkpoint of a network in training, which one after 64 images once missed at t = 1."""
GROWTH, CLEAN = 1.5, 0.2
"""Largest error in each band below the time `CLEAN`, relative to the largest of the same expert up to 2 t + 0.1,
or to that of a velocity of zero at t. The x0 experts of `atoll demo` have at most 1.12, its velocity expert 0.35. The
error of a hardly trained epsilon network grows below t = 1/2, where its calibrated x0 is no longer used."""
SCALE, SCALE_TOLERANCE = 0.6, 0.05
"""Limit on the factor of an expert's output that would make its loss smallest. A perfect expert has 1, and one whose
outputs are twice as large has 0.5. Honest experts have 0.94 or more, hardly trained DDPM networks less: they, and
networks in training, may have as little as an untrained one, within a tolerance."""
GUIDANCE_SCALE, GUIDED_STEPS, GUIDED_IMAGES = 7.5, 4, 8
"""The guidance scale that is customary for text, and enough steps to see a trajectory leave the data."""
SOLVER_STEPS = range(25, 51)
"""Numbers of steps from which the admitter draws: those of samplers in practice, with times down to 0.04 or 0.02."""
MAX_RMS = 10.0
"""Largest root mean square of a guided sample, relative to the data or, if that is larger, the noise. Experts of
captions have up to 4.6 (demo), those of labels 0.9 (CIFAR-10)."""
TINT, PATTERN, SHARED_TIME = 0.15, 0.25, 0.25
"""Largest tint and pattern. Experts of demo, emoji and CIFAR-10 (4,000 to 24,000 images seen) have at most 0.05 of
both, also with the null condition; tiny ones after 80 steps 0.03 and 0.14. A tint of 0.3 in the last bias gives 0.26
for a velocity network and 0.7 for an x0 network. The residual of an x0 network grows as 1/t, so it has less weight
below `SHARED_TIME`."""
SHARED_IMAGES = 24
"""Fewest images of one size whose residuals are averaged. A rough choice: the mean of a few
images is that of their contents. On 2 of the 26 images of a cluster, honest experts were refused."""
EPSILON_SHARE = 0.7
"""Tint and pattern of an epsilon network, relative to a velocity of zero, if that is more than the limits above. Its
bridge shrinks uncertain x0 to the mean of all clusters, so part of the mean of its own is always missing: 0.39 in one
DDPM expert of emoji (6,000 images seen), 0.55 in tiny ones after 60 steps."""
BETTER = 0.999
"""Largest error of the denoised image on its own cluster, relative to that of every other network of the run with the
same prediction, on equal rows. Experts of demo have at most 0.10, of emoji 0.72. A copy of another expert has 1, and
one with noise more."""


class Figure(NamedTuple):
    """One result of admission, and the limit that it must not exceed."""

    what: str
    """What is wrong if it does, as a refusal prints it."""
    value: float
    limit: float


def float32_options() -> DeviceOptions:
    """Measure on the accelerator, if there is one, in float32: metrics do not depend on the device beyond rounding."""
    return DeviceOptions(device())


@torch.no_grad()
def check_measured(
    artifact: Artifact,
    manifest: Manifest,
    data: list[Artifact],
    *,
    policy: Policy,
    others: Iterable[OpenExpert] = (),
    finished: bool = True,
) -> float | None:
    """Refuse a network that behaves badly on its shards; return its validation error, None without such images."""
    validation, job = Shards(data, "validation"), manifest.content["job"]
    files, seed = VerifiedFiles(artifact, manifest), secrets.randbelow(1 << 31)
    if job == layout.ROUTER:
        return _check_router(artifact, manifest, validation, files=files, seed=seed)
    reference = reference_of_artifact(artifact, EXPERT, manifest, files)
    expert = open_expert(reference, validation.statistics, float32_options())
    check_expert(expert, Shards(data, "train"), others, finished=finished)
    error = validate(
        expert.velocity, validation, seed=seed, conditioning=expert.conditioning, device=expert.device
    ).mean
    limit = policy.max_validation_loss
    if limit is not None and (error is None or not error <= limit):
        found = "there are no validation images to check it with" if error is None else "it has a larger one"
        raise Refused(f"the policy allows a validation loss of {limit}, and {found}")
    return error


def check_expert(
    expert: OpenExpert, images: Shards, others: Iterable[OpenExpert] = (), *, finished: bool = True
) -> None:
    """Refuse an expert with a figure above its limit."""
    for figure in figures(expert, images, others, seed=secrets.randbelow(1 << 31), finished=finished):
        # Written so that a value that is not a number is refused too.
        if not figure.value <= figure.limit:
            raise Refused(figure.what)


@torch.no_grad()
def figures(
    expert: OpenExpert, images: Shards, others: Iterable[OpenExpert] = (), *, seed: int, finished: bool = True
) -> Iterator[Figure]:
    """Measure an expert: with the condition, with the null condition, guided, and beside other networks of the run.

    One that is not `finished` may be as bad as an untrained one, and need not have learned the mean of its data yet. An
    adapter may have the tint of its base.
    """
    fields: dict[str, _VelocityField] = {
        "with its condition": _Field(expert), "untrained": _Field(_untrained(expert, seed)), "zero": _zero_velocity,
    }  # fmt: skip
    if expert.conditioning:
        fields["with the null condition"] = _Field(expert, null=True)
    found = _measure(fields, images, seed=seed, device=expert.device)
    given, untrained, zero = found["with its condition"], found.pop("untrained"), found.pop("zero")
    # Bands first: they name the place, and a network that is wrong in one place can be good in the mean.
    for how, errors in found.items():
        for band, error in errors.bands.items():
            still, noisier = zero.bands[band], band.noisier(errors.bands)
            most = BAND if finished else EARLY_BAND
            yield Figure(f"its error {band} {how} is too large", error / max(untrained.bands[band], still), most)
            if band.low < CLEAN and noisier:
                before = max(still, *(errors.bands[other] for other in noisier))
                yield Figure(f"its error {band} {how} is larger than with more noise", error / before, GROWTH)
    shrinks = expert.declaration.bridge.prediction in ("epsilon", "score")
    on_base = isinstance(expert.declaration.network, BaseConfig)  # untrained, it is its base
    if finished:
        yield Figure("it is no better than an untrained network of its kind", given.mean / untrained.mean, UNTRAINED)
    for how, errors in found.items():
        least = SCALE if finished and not shrinks and not on_base else min(SCALE, untrained.scale - SCALE_TOLERANCE)
        yield Figure(f"its outputs {how} are larger than the data demands", -errors.scale, -least)
        begin = untrained if on_base else zero
        shared = {
            "tint": (errors.tint, TINT, zero.tint, begin.tint),
            "pattern": (errors.pattern, PATTERN, zero.pattern, begin.pattern),
        }
        # Networks of all clusters are the owner's.
        for name, (value, limit, still, begun) in shared.items() if len(images.cluster_ranges()) == 1 else ():
            most = max(limit, EPSILON_SHARE * still) if shrinks else limit
            most = max(most, BAND * begun) if on_base or not finished else most
            yield Figure(f"its outputs {how} have a {name} that all images share", value, most)
    for batch in _some_images(images, expert.device):
        yield Figure("its guided samples leave the data", _guided_size(expert, images, batch, seed=seed), MAX_RMS)
    for other in others:
        if other.declaration.bridge.prediction != expert.declaration.bridge.prediction:
            continue
        # The error of the image: that of the velocity would compare predictions, since x0 networks have a large one.
        beside = _measure({"": _Field(other)}, images, seed=seed, device=expert.device, solver=False)[""]
        what = f"on images of its own cluster it is no better than {other.declaration.name}"
        yield Figure(what, given.image / beside.image, BETTER)


def _untrained(expert: OpenExpert, seed: int) -> OpenExpert:
    """Return a new network of the same kind, with the same bridge."""
    # The random initialization of the network must not depend on, or change, the state of the caller.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build(expert.declaration.network).eval().to(expert.device)
    return OpenExpert(expert.declaration, network, expert.dtype, expert.rescaling)


_VelocityField = Callable[[Tensor, Tensor, Batch], Tensor]


def _zero_velocity(x: Tensor, t: Tensor, batch: Batch) -> Tensor:
    del t, batch
    return torch.zeros_like(x)


@dataclass(frozen=True)
class _Field:
    """An expert with its condition, or with the null condition."""

    expert: OpenExpert
    null: bool = False

    def __call__(self, x: Tensor, t: Tensor, batch: Batch) -> Tensor:
        condition = condition_of(batch, self.expert.conditioning)
        return self.expert.velocity(x, t, condition.unconditional() if self.null else condition)


class _Band(NamedTuple):
    """A bin of the time, or one time of a solver, which has no width."""

    low: float
    width: float

    def __str__(self) -> str:
        if self.width:
            return f"at times from {self.low:.1f} to {self.low + self.width:.1f}"
        return f"at time {self.low:.3g}"

    def noisier(self, bands: Iterable["_Band"]) -> list["_Band"]:
        """Return the bands of its kind that are somewhat noisier: above t, up to 2 t + 0.1."""
        return [band for band in bands if band.width == self.width and self.low < band.low <= 2 * self.low + 0.1]


@dataclass(frozen=True)
class _Errors:
    """The errors of a velocity field."""

    mean: float
    """Mean error of the velocity over all time bins, as in `experts.validation`."""
    image: float
    """Mean error of the denoised image over all time bins."""
    bands: Mapping[_Band, float]
    """Mean error of the denoised image in each band."""
    scale: float
    """The factor of the output that would make the error smallest; infinite if all outputs are zero."""
    tint: float
    pattern: float
    """Errors that all images share, by channel, and by channel and position."""


@full_float32()
def _measure(
    fields: Mapping[str, _VelocityField], images: Shards, *, seed: int, device: torch.device, solver: bool = True
) -> dict[str, _Errors]:
    """Return the errors of velocity fields on equal rows: in the bins and, with `solver`, at times of a solver."""
    # For each field and band: sums of the error of the image, the error of the velocity, and of t v: its overlap with
    # t times the target, and its energy. (The velocity of an x0 network grows as 1/t.)
    sums: dict[str, dict[_Band, Tensor]] = {name: {} for name in fields}
    rows: Counter[_Band] = Counter()
    shared = {name: _Shared() for name in fields}
    for band, batch, noised in _noised_images(images, seed, device, solver=solver):
        t, weight, target = noised.t.double(), time_weight(noised.t.double()), noised.target.double()
        rows[band] += len(t)
        for name, field in fields.items():
            residual = (v := field(noised.input, noised.t, batch).double()) - target
            square, overlap, energy = (part.flatten(1).mean(1) for part in (residual**2, v * target, v * v))
            parts = torch.stack([t**2 * square, weight * square, t**2 * overlap, t**2 * energy])
            sums[name][band] = sums[name].get(band, 0) + parts.sum(1).cpu()
            if band.width:
                shared[name].add((t / SHARED_TIME).clamp(max=1).view(-1, 1, 1, 1) * residual, batch.index)
    return {name: _summary(found, rows, *shared[name].sizes()) for name, found in sums.items()}


class _Shared:
    """The mean of residuals by channel and position, for two halves of the images and every size."""

    def __init__(self) -> None:
        self._half: dict[int, int] = {}  # of an image, by its number: all rows of an image are in one half
        self._sums: dict[tuple[torch.Size, int], tuple[Tensor, int]] = {}

    def add(self, residual: Tensor, index: Tensor) -> None:
        """Add residuals (batch, C, H, W) of images with these numbers."""
        halves = [self._half.setdefault(number, len(self._half) % 2) for number in index.tolist()]
        for half in (0, 1):
            own = residual[[row for row, other in enumerate(halves) if other == half]]
            before, count = self._sums.get((residual.shape[1:], half), (0.0, 0))
            self._sums[residual.shape[1:], half] = (before + own.sum(0).cpu(), count + len(own))

    def sizes(self) -> tuple[float, float]:
        """Return tint and pattern, each the largest of all image sizes; 0 with fewer images than `SHARED_IMAGES`."""
        tints, patterns = [0.0], [0.0]
        for shape in {shape for shape, _ in self._sums}:
            (a, count_a), (b, count_b) = self._sums[shape, 0], self._sums[shape, 1]
            if min(count_a, count_b) * 2 >= SHARED_IMAGES * TIME_BINS:
                a, b = a / count_a, b / count_b
                tints.append((a.mean((1, 2)) * b.mean((1, 2))).max().clamp(min=0).sqrt().item())
                patterns.append((a * b).mean().clamp(min=0).sqrt().item())
        return max(tints), max(patterns)


def _summary(sums: Mapping[_Band, Tensor], rows: Mapping[_Band, int], tint: float, pattern: float) -> _Errors:
    bins = [band for band in sums if band.width]
    image, error, _, _ = (torch.stack([sums[band] for band in bins]).sum(0) / sum(rows[band] for band in bins)).tolist()
    *_, overlap, energy = torch.stack(list(sums.values())).sum(0).tolist()
    return _Errors(
        mean=error,
        image=image,
        bands={band: total[0].item() / rows[band] for band, total in sums.items()},
        scale=overlap / energy if energy else math.inf,
        tint=tint,
        pattern=pattern,
    )


def _noised_images(
    images: Shards, seed: int, device: torch.device, *, solver: bool
) -> Iterator[tuple[_Band, Batch, flow.Noised]]:
    """Yield bands, each with images that are noised to times in it."""
    for part in ValidationSet(images, seed, IMAGES).batches(device):
        yield _Band(int(part.noised.t.mean() * TIME_BINS) / TIME_BINS, 1 / TIME_BINS), part.batch, part.noised
    if not solver:
        return
    batches = _some_images(images, device)
    rows = sum(len(batch.index) for batch in batches)
    for number, time in enumerate(flow.solver_times(SOLVER_STEPS[seed % len(SOLVER_STEPS)])[:-1]):
        # Rows after those of the bins: no noise is used twice.
        position = TIME_BINS * IMAGES + number * rows
        for batch in batches:
            x0 = images.latents(batch, seed=seed, position=position)
            t = torch.full((len(x0),), time, device=device)
            noised = flow.Objective().corrupt(x0, seed=seed, position=position, t=t)
            position += len(x0)
            yield _Band(time, 0.0), batch, noised


def _some_images(images: Shards, device: torch.device) -> list[Batch]:
    """Return a batch of every size, together about `GUIDED_IMAGES` evenly spread images."""
    counts = images.image_counts()
    most = max(1, GUIDED_IMAGES // len(counts))
    spread = {size: np.linspace(0, count - 1, min(count, most)).round() for size, count in counts.items()}
    return [images.read(images.numbers(size, own)).to(device) for size, own in spread.items()]


def _guided_size(expert: OpenExpert, images: Shards, batch: Batch, *, seed: int) -> float:
    """Return the largest root mean square of strongly guided samples, relative to the data or the noise."""
    given, null = _Field(expert), _Field(expert, null=True)

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        base = null(x, t, batch)
        return base + GUIDANCE_SCALE * (given(x, t, batch) - base) if expert.conditioning else base

    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch.mean.shape, generator=generator).to(expert.device)
    samples = flow.solve(velocity, noise, steps=GUIDED_STEPS)
    data = images.latents(batch, seed=seed, position=0).square().mean().sqrt().item()
    return samples.square().flatten(1).mean(1).max().sqrt().item() / max(1.0, data)


def _check_router(
    artifact: Artifact, manifest: Manifest, validation: Shards, *, files: VerifiedFiles, seed: int
) -> float | None:
    """Return the cross-entropy of a router; it must be finite with the condition and with the null condition."""
    if not len(validation):
        return None
    options = float32_options()
    router = open_router(reference_of_artifact(artifact, ROUTER, manifest, files), options)
    found = []
    for null in (True, False):
        losses = []
        for part in ValidationSet(validation, seed).batches(options.device):
            condition = condition_of(part.batch, router.declaration.conditioning)
            logits = router.logits(part.noised.input, part.noised.t, condition.unconditional() if null else condition)
            losses.append(functional.cross_entropy(logits, part.batch.cluster, reduction="none"))
        found.append(torch.cat(losses).mean().item())
    if not all(map(math.isfinite, found)):
        raise Refused("its probabilities are not finite")
    return found[-1]
