"""The behavior of a network, measured on the shards of its run before somebody signs for it.

A contributor declares a held-out loss, and chooses the seed of its noise. So an admitter measures again with a seed of
its own, and everywhere that sampling looks: with the condition, with the null condition, and guided over a few steps of
the solver. An expert must also be better than a network that was never trained, and its density must be the one that
its shards give. A loss cannot find everything: see "What is not protected" in docs/explanation/trust.md.
"""

import math
import secrets
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from atoll import flow
from atoll.core import layout
from atoll.core.artifacts import Artifact, Manifest
from atoll.core.manifests import EXPERT, ROUTER, ExpertContent
from atoll.core.trust import Policy
from atoll.core.untrusted import Refused
from atoll.core.verified_files import VerifiedFiles
from atoll.data.dataset import Shards
from atoll.experts.density import DENSITY_FILE, Density, fit_density
from atoll.experts.expert import DeviceOptions, OpenExpert, open_expert, open_router
from atoll.experts.run import expert_of_artifact, router_of_artifact
from atoll.experts.validation import ValidationSet, condition_of, validate
from atoll.nets import Condition, build

# Other hardware and precisions round differently. A choice, not a measurement: an order of magnitude above rounding.
CLAIM_TOLERANCE = 0.1
"""Maximum relative difference between the claimed and the measured held-out loss."""
IMAGES = 128
"""Held-out images of each cluster for measurements with the admitter's seed: 1,280 rows, an error of 3 to 9 %."""
UNTRAINED = 0.995
"""An expert's loss must be below this part of that of an untrained network, on equal rows. 20 steps reach 0.98."""
NULL_FACTOR = 2.0
"""Largest loss with the null condition, relative to that with the condition or untrained. Honest experts have 1.0."""
GUIDANCE_SCALE, GUIDED_STEPS, GUIDED_IMAGES = 7.5, 4, 8
"""The guidance scale that is customary for text, and enough steps to see a trajectory leave the data."""
MAX_RMS = 10.0
"""Largest root mean square of a guided sample. Normalized latents have 1; strong guidance gives 2 or 3."""
DENSITY_TOLERANCE = 1e-3
"""Relative difference of densities. Float32 and other processors give 1e-6."""


@torch.no_grad()
def check_measured(artifact: Artifact, manifest: Manifest, data: list[Artifact], *, policy: Policy) -> None:
    """Refuse a network that does not do what it claims. `data` are the shards of its clusters."""
    held_out, job = Shards(data, "held-out"), manifest.content["job"]
    files = VerifiedFiles(artifact, manifest)
    if not len(held_out):
        if policy.max_held_out_loss is not None:
            raise Refused(f"{job} has no held-out images to check the limit {policy.max_held_out_loss} with")
    elif job == layout.ROUTER:
        _check_router(artifact, manifest, held_out, files=files)
    else:
        content = EXPERT.parse(manifest, artifact.folder)
        reference = expert_of_artifact(artifact, manifest, files)
        expert = open_expert(reference, held_out.statistics, DeviceOptions())
        _check_claim(expert, content, held_out, seed=_claimed_seed(manifest))
        _check_loss(expert, content, held_out, policy=policy)
        _check_guided(expert, held_out)
    if DENSITY_FILE in manifest.files:
        _check_density(artifact.path(DENSITY_FILE), Shards(data, "train"))


def _check_claim(expert: OpenExpert, content: ExpertContent, held_out: Shards, *, seed: int) -> None:
    """Compare the declared loss with the one that is measured in the same way."""
    loss = validate(expert.velocity, held_out, seed=seed, conditioning=expert.conditioning).mean
    claim = content.held_out_loss
    if loss is None or not math.isfinite(loss) or claim is None or abs(claim - loss) > CLAIM_TOLERANCE * loss:
        raise Refused(f"it claims a held-out loss of {claim}; measured here: {loss:.4g}")


def _check_loss(expert: OpenExpert, content: ExpertContent, held_out: Shards, *, policy: Policy) -> None:
    """Measure with a seed of our own: with the condition, with the null condition, and an untrained network."""
    seed, limit = secrets.randbelow(1 << 31), policy.max_held_out_loss
    # The random initialization of the network must not depend on, or change, the state of the caller.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = OpenExpert(expert.declaration, build(content.network).eval(), expert.dtype, expert.change)

    def loss(network: OpenExpert, *, null: bool = False) -> float:
        def velocity(x: Tensor, t: Tensor, condition: Condition) -> Tensor:
            return network.velocity(x, t, condition.unconditional() if null else condition)

        found = validate(velocity, held_out, seed=seed, conditioning=network.conditioning, limit=IMAGES).mean
        assert found is not None  # there are held-out images
        return found

    given, untrained = loss(expert), loss(fresh)
    if not math.isfinite(given) or (limit is not None and given > limit):
        raise Refused(f"its held-out loss on the shards of this run is {given:.4g}; the limit is {limit}")
    if given >= UNTRAINED * untrained:
        raise Refused(f"its held-out loss is {given:.4g}; an untrained network of its kind has {untrained:.4g}")
    if expert.conditioning:
        null = loss(expert, null=True)
        if not null <= NULL_FACTOR * max(given, untrained):
            raise Refused(f"its loss is {null:.4g} with the null condition, and {given:.4g} with the condition")


def _check_guided(expert: OpenExpert, held_out: Shards) -> None:
    """Sample with strong guidance: values must stay finite and near the data."""
    rows = min(len(held_out), GUIDED_IMAGES)
    batch = next(ValidationSet(held_out, 0, rows).batches(torch.device("cpu"))).batch
    condition = condition_of(batch, expert.conditioning)

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        given = expert.velocity(x, t, condition)
        if not expert.conditioning:
            return given
        null = expert.velocity(x, t, condition.unconditional())
        return null + GUIDANCE_SCALE * (given - null)

    generator = torch.Generator().manual_seed(secrets.randbelow(1 << 31))
    noise = torch.randn(len(batch.index), *expert.declaration.shape, generator=generator)
    samples = flow.solve(velocity, noise, steps=GUIDED_STEPS)
    rms = samples.square().mean().sqrt().item()
    if not rms <= MAX_RMS:
        raise Refused(f"its guided samples have a root mean square of {rms:.4g}; at most {MAX_RMS} is allowed")


def _check_router(artifact: Artifact, manifest: Manifest, held_out: Shards, *, files: VerifiedFiles) -> None:
    """Measure the cross-entropy of a router; it must be finite with both conditions, and as good as it claims."""
    router = open_router(router_of_artifact(artifact, manifest, files), DeviceOptions())
    claim = ROUTER.parse(manifest, artifact.folder).held_out_loss
    for seed, null in ((_claimed_seed(manifest), False), (secrets.randbelow(1 << 31), True)):
        losses = []
        for part in ValidationSet(held_out, seed).batches(torch.device("cpu")):
            condition = condition_of(part.batch, router.declaration.conditioning)
            logits = router.logits(part.noised.input, part.noised.t, condition.unconditional() if null else condition)
            losses.append(functional.cross_entropy(logits, part.batch.cluster, reduction="none"))
        loss = torch.cat(losses).mean().item()
        wrong = not null and (claim is None or abs(claim - loss) > CLAIM_TOLERANCE * max(loss, 0.1))
        if not math.isfinite(loss) or wrong:
            raise Refused(f"it claims a held-out loss of {claim}; measured here: {loss:.4g}")


def _check_density(file: Path, train: Shards) -> None:
    """Compare the density of an expert with the one of its shards."""
    expected = fit_density(train)
    if expected is None:
        raise Refused(f"{file.name} is a density of too few images; it would reveal them")
    found = Density.from_tensors(load_file(file))
    pairs = [("latents", found, expected)]
    if expected.caption is not None:
        assert found.caption is not None  # `check_files` compared the names of the tensors
        pairs.append(("captions", found.caption, expected.caption))
    for what, one, other in pairs:
        if difference(one, other) > DENSITY_TOLERANCE:
            raise Refused(f"{file.name} is not the density of the {what} of its shards")
    if expected.classes is not None and (found.classes is None or not torch.equal(found.classes, expected.classes)):
        raise Refused(f"{file.name} does not count the classes of its shards")


def difference(a: Density, b: Density) -> float:
    """Return the largest relative difference of two densities: of mean, variances, count and the space of directions.

    It is infinite if directions are not orthonormal. Directions may be rotated among equal variances. So the matrices
    U diag(l) U^T are compared, by their squared Frobenius norm, which needs only U_a^T U_b of shape (rank, rank).
    """
    if a.variances.shape != b.variances.shape:
        return math.inf
    for one in (a, b):
        gram = one.directions.double() @ one.directions.double().T
        if not torch.allclose(gram, torch.eye(len(gram), dtype=torch.float64), atol=1e-4):
            return math.inf
    overlap = (a.directions.double() @ b.directions.double().T).square()
    la, lb = a.variances.double(), b.variances.double()
    between = la.square().sum() + lb.square().sum() - 2 * (la[:, None] * overlap * lb).sum()
    parts = [
        (between.clamp(min=0) / lb.square().sum().clamp(min=1e-12)).sqrt(),
        (a.mean.double() - b.mean.double()).norm() / b.mean.double().norm().clamp(min=1e-6),
        (a.rest.double() - b.rest.double()).abs() / b.rest.double(),
        (a.count.double() - b.count.double()).abs() / b.count.double().clamp(min=1),
        # Small variances, too, have a large effect on the logarithm of the density.
        *((la.sort()[0] - lb.sort()[0]).abs() / (lb.sort()[0] + b.rest.double())),
    ]
    return max(part.item() if part.isfinite() else math.inf for part in parts)


def _claimed_seed(manifest: Manifest) -> int:
    """Return the seed of its training, which also fixes the noise of its declared loss."""
    settings = manifest.made_from.get("train")
    seed = settings.get("seed", 0) if isinstance(settings, dict) else 0
    return seed if type(seed) is int and 0 <= seed < 1 << 31 else 0
