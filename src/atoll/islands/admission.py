"""Admission: the checks that an expert of another contributor must pass, from the cheapest to the most expensive.

1. The manifest: plain JSON, known files, sizes within the policy, the signature of a publisher.
2. The declaration: the right cluster; data, latents and statistics of this run; an objective and a network that the
   policy allows.
3. The files, in quarantine: hashes, exactly filled safetensors, the tensor names, shapes and dtypes of the declared
   network (built on the meta device, without memory), finite values.
4. The held-out loss on its cluster, measured here: at most the limit of the policy, and close to the claimed value.

A contribution that fails is refused with the reason, and its files are deleted.
"""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import safe_open
from torch import Tensor

from atoll import flow
from atoll.core import layout
from atoll.core.artifacts import Artifact, Manifest
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT, SHARDS, BridgeSpec, ShardsContent
from atoll.core.networks import read_network
from atoll.core.policy import Policy, Role
from atoll.core.signing import verify
from atoll.core.untrusted import Refused, check_bounded, strict_json
from atoll.data.dataset import Shards
from atoll.data.stages.latents import Statistics
from atoll.experts.density import CAPTION_RANK, DENSITY_FILE, RANK
from atoll.experts.expert import DeviceOptions, open_expert
from atoll.experts.run import expert_of_artifact
from atoll.experts.validation import validate
from atoll.islands.safetensors_headers import safetensors_header
from atoll.islands.store import Store
from atoll.islands.transfer import fetch, read_manifest, signature_key
from atoll.nets import DiT, build
from atoll.nets.io import CONFIG_FILE, WEIGHTS_FILE

DATA_FIELDS = ("labels", "source", "fingerprint", "latents", "statistics", "text")
"""Fields of the manifest that must equal those of the cluster's shards."""
# Other hardware and precisions round differently. A choice, not a measurement: an order of magnitude above rounding.
CLAIM_TOLERANCE = 0.1
"""Maximum relative difference between the claimed and the measured held-out loss."""
_BUILD_ERRORS = (
    AtollError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
)
"""Exceptions that building a network or objective from an invalid description can raise."""
# The dtypes of networks by their names in safetensors.
_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Contribution:
    """An expert that a contributor offers for one cluster of a run."""

    expert: int
    manifest: Manifest
    shards: Manifest
    """The manifest of the cluster's shards, from the run itself."""
    policy: Policy

    @cached_property
    def data(self) -> ShardsContent:
        """The content of the shards manifest."""
        return SHARDS.parse(self.shards, layout.shards(self.expert))

    @property
    def name(self) -> str:
        """The name of the artifact that it becomes if it is admitted."""
        return layout.final(layout.expert_job(self.expert))

    @property
    def claims(self) -> Mapping[str, Any]:
        """The content of the contributor's manifest: untrusted, with no field checked."""
        return self.manifest.content


def review(store: Store, expert: int, digest: str | None, *, policy: Policy | None, quarantine: Path) -> Artifact:
    """Download a contribution into quarantine, run all checks, and return it there; raise `Refused` if one fails."""
    rules = policy or Policy()
    name = layout.final(layout.expert_job(expert))
    shutil.rmtree(quarantine, ignore_errors=True)
    try:
        manifest = read_manifest(store, name, digest)
        data = read_manifest(store, layout.shards(expert))
        if manifest is None or data is None:
            raise Refused(f"{store.url} has no {'manifest' if manifest is None else 'shards'} for {name}")
        contribution = Contribution(expert, manifest, data, rules)
        check_signatures(store, contribution, ("publish",))
        check_declaration(contribution)
        artifact = Artifact(quarantine, name)
        fetch(store, name, manifest, target=artifact, quiet=True)
        own = Artifact(quarantine, layout.shards(expert))
        fetch(store, own.name, data, target=own, only=lambda file: not file.startswith("train-"), quiet=True)
        check_files(contribution, artifact)
        check_loss(contribution, artifact, own)
        return artifact
    except AtollError:
        shutil.rmtree(quarantine, ignore_errors=True)
        raise


def check_signatures(store: Store, contribution: Contribution, roles: tuple[Role, ...]) -> dict[Role, object]:
    """Return the signatures over a manifest; refuse it if the policy requires one that is missing or invalid."""
    found: dict[Role, object] = {}
    for role in roles:
        key = signature_key(contribution.name, contribution.manifest.digest, role)
        data = store.read(key, 4096)
        found[role] = None if data is None else strict_json(data, key)
        try:
            verify(contribution.policy, role, contribution.name, manifest=contribution.manifest, signature=found[role])
        except AtollError as error:
            raise Refused(str(error)) from error
    return {role: value for role, value in found.items() if value is not None}


# Checks before the download


def check_declaration(contribution: Contribution) -> None:
    """Refuse a manifest that does not fit the run, the cluster and the policy."""
    if contribution.manifest.kind != EXPERT.name:
        raise Refused(f"it is an artifact of kind {contribution.manifest.kind!r}; expected {EXPERT.name!r}")
    _check_listing(contribution)
    _check_origin(contribution)
    _check_objective(contribution)
    tensors = declared_tensors(contribution)
    tensor_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    data = contribution.data
    # Upper bound of the density file in bytes, float32: principal directions (rank, latent size) and a mean, the same
    # for pooled captions, one count per class, and a margin of a few rows for the small tensors.
    caption_values = (CAPTION_RANK + 8) * (data.text.pooled or 0) if data.text else 0
    density = 4 * ((RANK + 16) * math.prod(data.latents.shape) + caption_values + len(data.labels))
    for name, entry in contribution.manifest.files.items():
        # The tensors, and at most 1 kB of header for each.
        limit = max(tensor_bytes, density) + 1024 * (len(tensors) + 64)
        if entry.size > limit:
            raise Refused(f"{name} has {entry.size:,} bytes; the declared network needs at most {limit:,}")
    try:
        EXPERT.parse(contribution.manifest, contribution.name)
    except AtollError as error:
        raise Refused(str(error)) from error


def _check_listing(contribution: Contribution) -> None:
    files = contribution.manifest.files
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if name not in files:
            raise Refused(f"{name} is missing")
    for name in files:
        is_ema = name.startswith("ema-") and name.endswith(".safetensors") and "/" not in name
        if name not in (CONFIG_FILE, WEIGHTS_FILE, DENSITY_FILE) and not is_ema:
            raise Refused(f"{name} is not a file of an expert; expected {CONFIG_FILE}, {WEIGHTS_FILE} and EMA weights")
    size = sum(entry.size for entry in files.values())
    if size > contribution.policy.max_bytes:
        raise Refused(f"its files have {size:,} bytes; the policy allows {contribution.policy.max_bytes:,}")


def _check_origin(contribution: Contribution) -> None:
    """Refuse an expert that was not trained on this cluster's shards, with the latents of this run."""
    claims, data = contribution.claims, contribution.shards.content
    job = layout.expert_job(contribution.expert)
    if claims.get("job") != job or claims.get("clusters") != [contribution.expert]:
        raise Refused(f"it declares job {claims.get('job')!r} of clusters {claims.get('clusters')!r}; expected {job!r}")
    for key in DATA_FIELDS:
        if key not in claims:
            raise Refused(f"it does not declare its {key}")
        if claims[key] != data[key]:
            raise Refused(f"its field {key!r} differs from that of cluster {contribution.expert} of this run")
    if contribution.manifest.made_from.get("data") != [contribution.shards.digest]:
        raise Refused(f"it was not trained on the shards of cluster {contribution.expert} of this run")


def _check_objective(contribution: Contribution) -> None:
    claims, policy = contribution.claims, contribution.policy
    spec, bridge, conditioning = (claims.get(key) for key in ("objective", "bridge", "conditioning"))
    try:
        check_bounded(spec, "objective")
        if not isinstance(spec, dict) or flow.objective(**spec).spec.model_dump(mode="json") != spec:
            raise Refused("its objective is not one that Atoll supports")
    except _BUILD_ERRORS as error:
        raise Refused(f"its objective cannot be built: {error}") from error
    allowed = [flow.objective(name).spec.model_dump(mode="json") for name in policy.objectives or ()]
    if policy.objectives is not None and spec not in allowed:
        raise Refused(f"its objective is not among those that the policy allows: {', '.join(policy.objectives)}")
    try:
        given = BridgeSpec.model_validate(bridge, strict=True)
        valid = given == BridgeSpec(prediction_error=given.prediction_error) and 0 <= given.prediction_error <= 10
    except ValidationError:
        valid = False
    if not valid:
        raise Refused(f"its bridge is {str(bridge)[:80]}; expected a prediction_error from 0 to 10")
    data = contribution.data
    possible = ({"text", "pooled"} if data.text else set()) | ({"label"} if data.labels else set())
    if not isinstance(conditioning, list) or not set(map(str, conditioning)) <= possible:
        raise Refused(f"it is conditioned on {str(conditioning)[:80]}; this run's data has {sorted(possible)}")


def declared_tensors(contribution: Contribution) -> dict[str, Tensor]:
    """Return the state dict of the declared network on the meta device: names, shapes and dtypes without memory."""
    description = contribution.claims.get("network")
    if not isinstance(description, dict):
        raise Refused("it does not declare its network")
    kind = description.get("_class_name")
    if kind not in contribution.policy.networks:
        raise Refused(
            f"its network is a {str(kind)[:40]!r}; the policy allows {', '.join(contribution.policy.networks)}"
        )
    check_bounded(description, "network")
    shape = contribution.data.latents.shape
    side = description.get("size", description.get("sample_size", shape[-1]))
    channels = description.get("channels", description.get("in_channels"))
    if channels != shape[0] or not isinstance(side, int) or not 1 <= side <= 4 * shape[-1]:
        raise Refused(f"its network is for {channels} channels and size {side}; the latents are {list(shape)}")
    try:
        with torch.device("meta"):
            network = build(read_network(description))
    except _BUILD_ERRORS as error:
        raise Refused(f"its network cannot be built: {error}") from error
    scale = network.config.normalization if isinstance(network, DiT) else None
    if scale is not None and Statistics.of_scale(scale, shape[0]) != Statistics.of(contribution.data.statistics):
        raise Refused(f"its network is for latents normalized as {scale}; this run normalizes them differently")
    count = sum(parameter.numel() for parameter in network.parameters())
    if count > contribution.policy.max_parameters:
        raise Refused(f"its network has {count:,} parameters; the policy allows {contribution.policy.max_parameters:,}")
    return dict(network.state_dict())


# Checks in quarantine


def check_files(contribution: Contribution, artifact: Artifact) -> None:
    """Refuse files that differ from the declared network in any tensor, or hold values that are not finite."""
    config = strict_json(artifact.path(CONFIG_FILE).read_bytes(), CONFIG_FILE, 1 << 16)
    if config != contribution.claims["network"]:
        raise Refused(f"{CONFIG_FILE} is not the network that the manifest declares")
    expected = {
        name: (_dtype_name(tensor), tuple(tensor.shape)) for name, tensor in declared_tensors(contribution).items()
    }
    for file in contribution.manifest.files:
        if not file.endswith(".safetensors"):
            continue
        found = safetensors_header(artifact.path(file))
        if file == DENSITY_FILE:
            _check_density(contribution, found, artifact.path(file))
        elif unknown := sorted(set(found) - set(expected)):
            raise Refused(f"{file} has a tensor {unknown[0][:80]!r} that the declared network lacks")
        elif file == WEIGHTS_FILE and (missing := sorted(set(expected) - set(found))):
            raise Refused(f"{file} has no tensor {missing[0]!r}")
        else:
            for name, kind in found.items():
                if kind != expected[name]:
                    raise Refused(f"{file}: {name} is {kind[0]} {list(kind[1])}; expected {expected[name]}")
        _check_finite(artifact.path(file))


def _dtype_name(tensor: Tensor) -> str:
    return _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))


def _check_density(contribution: Contribution, found: dict[str, tuple[str, tuple[int, ...]]], file: Path) -> None:
    data = contribution.data
    size, rows = math.prod(data.latents.shape), data.rows["train"]
    shapes = _density_shapes(found, "", size)
    if data.text:
        shapes |= _density_shapes(found, "caption.", data.text.pooled or 0)
    if data.labels:
        shapes["classes"] = (len(data.labels),)
    if {name: shape for name, (_, shape) in found.items()} != shapes:
        raise Refused(f"{file.name} does not hold a density of latents with {size} values and of their conditioning")
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in shapes if not name.endswith(("mean", "directions"))}
    for name, expected in (("count", rows), ("caption.count", 1)):
        if name in tensors and tensors[name].item() != expected:
            raise Refused(f"{file.name} counts {tensors[name].item()} images as its {name}; expected {expected}")
    if "classes" in tensors and tensors["classes"].sum() > rows:
        raise Refused(f"{file.name} counts {tensors['classes'].sum().item()} images with a class; there are {rows}")
    for name, tensor in tensors.items():
        if tensor.numel() and (tensor.min() < 0 or (name.endswith("rest") and not tensor)):
            raise Refused(f"{file.name}: {name} is not positive")


def _density_shapes(
    found: dict[str, tuple[str, tuple[int, ...]]], prefix: str, size: int
) -> dict[str, tuple[int, ...]]:
    rank = found.get(f"{prefix}variances", ("", (0,)))[1]
    shapes = {"mean": (size,), "directions": (*rank, size), "variances": rank, "rest": (), "count": ()}
    return {prefix + name: shape for name, shape in shapes.items()}


def _check_finite(file: Path) -> None:
    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a dictionary
            if not bool(tensors.get_tensor(name).isfinite().all()):
                raise Refused(f"{file.name}: {name} holds values that are not finite")


@torch.no_grad()
def check_loss(contribution: Contribution, artifact: Artifact, data: Artifact) -> None:
    """Measure the held-out loss on its cluster; refuse it above the policy's limit or far from the claimed value."""
    held_out = Shards([data], "held-out")
    content = EXPERT.parse(contribution.manifest, contribution.name)
    max_loss, claim = contribution.policy.max_held_out_loss, content.held_out_loss
    if not len(held_out):
        if max_loss is not None:
            raise Refused(f"cluster {contribution.expert} has no held-out images to check the limit {max_loss} with")
        return
    expert = open_expert(expert_of_artifact(artifact, contribution.manifest), held_out.statistics, DeviceOptions())
    loss = validate(expert.velocity, held_out, seed=_seed(contribution), conditioning=expert.conditioning).mean
    assert loss is not None  # there are held-out images
    if not math.isfinite(loss) or (max_loss is not None and loss > max_loss):
        raise Refused(f"its held-out loss on cluster {contribution.expert} is {loss:.4g}; the limit is {max_loss}")
    if claim is None or abs(claim - loss) > CLAIM_TOLERANCE * loss:
        raise Refused(f"it claims a held-out loss of {claim}; measured here: {loss:.4g}")


def _seed(contribution: Contribution) -> int:
    """Return the seed of its training, which also fixes the noise of its held-out loss."""
    seed = contribution.manifest.made_from.get("train", {}).get("seed", 0)
    return seed if isinstance(seed, int) and 0 <= seed < 1 << 31 else 0
