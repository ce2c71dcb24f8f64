"""The behavior of a network, measured on the shards of its run before somebody signs for it.

A contributor declares a validation loss, and chooses the seed of its noise. So an admitter measures again with another
seed, and everywhere that sampling looks: with the condition, with the null condition, and guided over a few steps of
the solver. The reference is a network of the same kind that was never trained, on the same noised images. The errors
of both are compared in *bands*: ten bins of the time, and each single time of a solver with a random number of steps,
of which the first is t = 1. A mean over all times would hide an expert that is wrong only at some of them. These images
are training images: an expert that memorizes a small cluster is honest, but worse than an untrained network on
validation images. The limit of the policy is for validation images.

The error in a band is that of the denoised image x - t v, which is t² times the error of the velocity v. Less noise
leaves less to guess, so this error falls as t falls, for every prediction. An untrained x0 network has an error as
large as the data even at t = 0, where it bounds nothing; there an expert is compared with itself at larger times.

An expert must also differ from the other networks of the run. A loss cannot find everything: see "What is not
protected" in docs/explanation/trust.md.
"""

import math
import secrets
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
from atoll.core.manifests import EXPERT, ROUTER, ExpertContent
from atoll.data.dataset import Batch, Shards
from atoll.experts.expert import DeviceOptions, OpenExpert, condition_of, open_expert, open_router
from atoll.experts.run import reference_of_artifact
from atoll.experts.validation import TIME_BINS, ValidationSet, time_weight, validate
from atoll.nets import build
from atoll.verify.trust import Policy
from atoll.verify.untrusted import Refused
from atoll.verify.verified_files import VerifiedFiles

# Other hardware and precisions round differently. A choice, not a measurement: an order of magnitude above rounding.
CLAIM_TOLERANCE = 0.1
"""Maximum relative difference between the claimed and the measured validation loss."""
IMAGES = 128
"""Validation images of each cluster for measurements with the admitter's seed: 1,280 rows, an error of 3 to 9 %."""
UNTRAINED = 0.999
"""An expert's loss must be below this part of that of an untrained network, on equal rows. 8 steps of 8 images reach
0.98 with velocities and 0.998 with DDPM. Untrained weights with noise of 1e-4 have more (a test)."""
BAND = 1.1
"""Largest error in each band, relative to that of an untrained network or, if that is larger, of a velocity of zero.
Velocity experts of `atoll demo` have at most 0.95, with the null condition. A DDPM expert had 1.31 of the untrained
network near t = 0, where its objective hardly trains, but 0.73 of a velocity of zero."""
GROWTH, CLEAN = 1.5, 0.2
"""Largest error in each band below the time `CLEAN`, relative to the largest of the same expert up to 2 t + 0.1,
or to that of a velocity of zero at t. The x0 experts of `atoll demo` have at most 1.21, its velocity expert 0.55. The
error of a hardly trained epsilon network grows below t = 1/2, where its calibrated x0 is no longer used."""
SCALE, SCALE_TOLERANCE = 0.6, 0.05
"""Limit on the factor of an expert's output that would make its loss smallest. A perfect expert has 1, and one whose
outputs are twice as large has 0.5. Honest experts have 0.9 or more. Untrained DDPM networks can have less, so an expert
may have as little as they, within a tolerance."""
GUIDANCE_SCALE, GUIDED_STEPS, GUIDED_IMAGES = 7.5, 4, 8
"""The guidance scale that is customary for text, and enough steps to see a trajectory leave the data."""
SOLVER_STEPS = range(25, 51)
"""Numbers of steps from which the admitter draws: those of samplers in practice, with times down to 0.04 or 0.02."""
MAX_RMS = 5.0
"""Largest root mean square of a guided sample, relative to the data or, if that is larger, the noise. Honest experts
have at most 2.1."""
COPY_IMAGES = 16
"""Images on which two networks are compared, in every bin of the time."""
COPY = 0.002
"""Two networks whose outputs differ by less than this part of what training changed (mean squares) are copies. Two tiny
experts from equal weights with 20 steps on similar clusters had 0.02; experts of `atoll demo` have 0.42 or more, and an
expert and the monolith 0.26. Copies with noise of 1 % of each tensor's standard deviation have 1e-5, with 5 % 3e-4."""


def float32_options() -> DeviceOptions:
    """Measure on the accelerator, if there is one, in float32: metrics do not depend on the device beyond rounding."""
    return DeviceOptions(device())


@torch.no_grad()
def check_measured(artifact: Artifact, manifest: Manifest, data: list[Artifact], *, policy: Policy) -> None:
    """Refuse a network that does not do what it claims. `data` are the shards of its clusters."""
    validation, job = Shards(data, "validation"), manifest.content["job"]
    files = VerifiedFiles(artifact, manifest)
    if not len(validation) and policy.max_validation_loss is not None:
        raise Refused(f"{job} has no validation images to check the limit {policy.max_validation_loss} with")
    if job == layout.ROUTER:
        if len(validation):
            _check_router(artifact, manifest, validation, files=files)
    else:
        content = EXPERT.parse(manifest, artifact.folder)
        expert = open_expert(
            reference_of_artifact(artifact, EXPERT, manifest, files), validation.statistics, float32_options()
        )
        if len(validation):
            _check_claim(expert, content, validation, seed=_claimed_seed(manifest))
            _check_limit(expert, validation, policy)
        check_expert(expert, Shards(data, "train"))


def _check_claim(expert: OpenExpert, content: ExpertContent, validation: Shards, *, seed: int) -> None:
    """Compare the declared loss with the one that is measured in the same way."""
    loss = validate(expert.velocity, validation, seed=seed, conditioning=expert.conditioning, device=expert.device).mean
    claim = content.validation_loss
    if loss is None or not math.isfinite(loss) or claim is None or abs(claim - loss) > CLAIM_TOLERANCE * loss:
        raise Refused(f"it claims a validation loss of {claim}; measured here: {loss:.4g}")


def _check_limit(expert: OpenExpert, validation: Shards, policy: Policy) -> None:
    """Compare the loss with the limit of the policy, with a seed of our own."""
    if (limit := policy.max_validation_loss) is None:
        return
    seed = secrets.randbelow(1 << 31)
    loss = validate(
        expert.velocity, validation, seed=seed, conditioning=expert.conditioning, limit=IMAGES, device=expert.device
    ).mean
    if loss is None or not loss <= limit:
        raise Refused(f"its validation loss on the shards of this run is {loss:.4g}; the limit is {limit}")


@torch.no_grad()
def check_expert(expert: OpenExpert, images: Shards) -> None:
    """Measure an expert with a seed of our own: with the condition, with the null condition, and guided."""
    seed = secrets.randbelow(1 << 31)
    fields: dict[str, _VelocityField] = {
        "with its condition": _Field(expert), "untrained": _Field(_untrained(expert, seed)), "zero": _zero_velocity,
    }  # fmt: skip
    if expert.conditioning:
        fields["with the null condition"] = _Field(expert, null=True)
    found = _measure(fields, images, seed=seed, device=expert.device)
    given, untrained, zero = found["with its condition"].mean, found.pop("untrained"), found.pop("zero")
    # Bands first: their message names the place, and a network that is wrong in one place can be good in the mean.
    for how, errors in found.items():
        for band, error in errors.bands.items():
            still = zero.bands[band]
            most = BAND * max(untrained.bands[band], still)
            noisier = band.noisier(errors.bands)
            if band.low < CLEAN and noisier:
                most = min(most, GROWTH * max(still, *(errors.bands[other] for other in noisier)))
            if not error <= most:
                raise Refused(f"its error {band} is {error:.4g} {how}; at most {most:.4g} is allowed there")
    # Written so that a value that is not a number is refused too.
    if not given < UNTRAINED * untrained.mean:
        raise Refused(f"its loss is {given:.4g}; an untrained network of its kind has {untrained.mean:.4g}")
    for how, errors in found.items():
        if not errors.scale >= min(SCALE, untrained.scale - SCALE_TOLERANCE):
            raise Refused(f"its outputs {how} are {1 / errors.scale:.3g} times as large as the data demands")
    _check_guided(expert, images, seed=seed)


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
    bands: Mapping[_Band, float]
    """Mean error of the denoised image in each band."""
    scale: float
    """The factor of the output that would make the error smallest; infinite if all outputs are zero."""


@full_float32()
def _measure(
    fields: Mapping[str, _VelocityField], images: Shards, *, seed: int, device: torch.device
) -> dict[str, _Errors]:
    """Return the errors of velocity fields on equal rows."""
    # For each field and band: number of rows, and sums of the error of the image, the error of the velocity, the
    # overlap of velocity and target, and the energy of the velocity.
    sums: dict[str, dict[_Band, Tensor]] = {name: {} for name in fields}
    for band, batch, noised in _noised_images(images, seed, device):
        t, weight, target = noised.t.double(), time_weight(noised.t.double()), noised.target.double()
        for name, field in fields.items():
            v = field(noised.input, noised.t, batch).double()
            square, overlap, energy = (part.flatten(1).mean(1) for part in ((v - target) ** 2, v * target, v * v))
            parts = torch.stack([torch.ones_like(t), t**2 * square, weight * square, weight * overlap, weight * energy])
            sums[name][band] = sums[name].get(band, 0) + parts.sum(1).cpu()
    return {name: _summary(found) for name, found in sums.items()}


def _summary(sums: Mapping[_Band, Tensor]) -> _Errors:
    rows, _, error, _, _ = torch.stack([total for band, total in sums.items() if band.width]).sum(0).tolist()
    *_, overlap, energy = torch.stack(list(sums.values())).sum(0).tolist()
    return _Errors(
        mean=error / rows,
        bands={band: (total[1] / total[0]).item() for band, total in sums.items()},
        scale=overlap / energy if energy else math.inf,
    )


def _noised_images(images: Shards, seed: int, device: torch.device) -> Iterator[tuple[_Band, Batch, flow.Noised]]:
    """Yield bands, each with images that are noised to times in it."""
    for part in ValidationSet(images, seed, IMAGES).batches(device):
        yield _Band(int(part.noised.t.mean() * TIME_BINS) / TIME_BINS, 1 / TIME_BINS), part.batch, part.noised
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


def _check_guided(expert: OpenExpert, images: Shards, *, seed: int) -> None:
    """Sample with strong guidance in every size: values must stay finite and near the data."""
    for batch in _some_images(images, expert.device):
        _check_guided_batch(expert, images, batch, seed=seed)


def _check_guided_batch(expert: OpenExpert, images: Shards, batch: Batch, *, seed: int) -> None:
    given, null = _Field(expert), _Field(expert, null=True)

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        base = null(x, t, batch)
        return base + GUIDANCE_SCALE * (given(x, t, batch) - base) if expert.conditioning else base

    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch.mean.shape, generator=generator).to(expert.device)
    samples = flow.solve(velocity, noise, steps=GUIDED_STEPS)
    data = images.latents(batch, seed=seed, position=0).square().mean().sqrt().item()
    rms = samples.square().flatten(1).mean(1).max().sqrt().item()
    if not rms <= MAX_RMS * max(1.0, data):
        raise Refused(f"its guided samples have a root mean square of {rms:.4g}; the data has {data:.4g}")


@torch.no_grad()
@full_float32()
def check_copy(expert: OpenExpert, other: OpenExpert, data: list[Artifact]) -> None:
    """Refuse an expert that behaves like another network of the run, up to noise.

    Experts may start from the same weights, so that their weights are similar. The difference of their outputs is
    compared with what training changed: mean |v_a - v_b|^2 / mean |v_a - v_untrained|^2. Outputs do not depend on the
    order of neurons or on factors between layers, by which somebody could disguise a copy.
    """
    seed, validation = secrets.randbelow(1 << 31), Shards(data, "validation")
    # Two networks that were trained on an image agree on it, so validation images distinguish them better.
    images = validation if len(validation) else Shards(data, "train")
    fields = _Field(expert), _Field(other), _Field(_untrained(expert, seed))
    between = changed = 0.0
    for part in ValidationSet(images, seed, COPY_IMAGES).batches(expert.device):
        own, others, untrained = (field(part.noised.input, part.noised.t, part.batch) for field in fields)
        between += (own - others).double().square().sum().item()
        changed += (own - untrained).double().square().sum().item()
    if not between > COPY * changed:
        raise Refused(f"its outputs are those of {other.declaration.name}, up to noise")


def _check_router(artifact: Artifact, manifest: Manifest, validation: Shards, *, files: VerifiedFiles) -> None:
    """Measure the cross-entropy of a router; it must be finite with both conditions, and as good as it claims."""
    options = float32_options()
    router = open_router(reference_of_artifact(artifact, ROUTER, manifest, files), options)
    claim = ROUTER.parse(manifest, artifact.folder).validation_loss
    for seed, null in ((_claimed_seed(manifest), False), (secrets.randbelow(1 << 31), True)):
        losses = []
        for part in ValidationSet(validation, seed).batches(options.device):
            condition = condition_of(part.batch, router.declaration.conditioning)
            logits = router.logits(part.noised.input, part.noised.t, condition.unconditional() if null else condition)
            losses.append(functional.cross_entropy(logits, part.batch.cluster, reduction="none"))
        loss = torch.cat(losses).mean().item()
        wrong = not null and (claim is None or abs(claim - loss) > CLAIM_TOLERANCE * max(loss, 0.1))
        if not math.isfinite(loss) or wrong:
            raise Refused(f"it claims a validation loss of {claim}; measured here: {loss:.4g}")


def _claimed_seed(manifest: Manifest) -> int:
    """Return the seed of its training, which also fixes the noise of its declared loss."""
    settings = manifest.made_from.get("train")
    seed = settings.get("seed", 0) if isinstance(settings, dict) else 0
    return seed if type(seed) is int and 0 <= seed < 1 << 31 else 0
