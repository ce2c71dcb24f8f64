"""Admission: what an expert from elsewhere must show before it joins. Each check is cheaper than the next one.

1. the manifest: plain JSON, known files, sizes within the policy, a signature of someone who may publish
2. what it declares: its own cluster, this run's data, latents and statistics, an objective and a network that the
   policy allows
3. the files, in quarantine: hashes, safetensors that fill their file exactly, names, shapes and dtypes of the network
   declared (built without memory, on the meta device), finite numbers
4. the held-out error on its own cluster, measured here, against the policy's bar and against what it claims

Whatever fails is refused with its reason; nothing of it is left but that sentence.
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

FROM_THE_DATA = ("labels", "source", "fingerprint", "latents", "statistics", "text")
CLAIM_TOLERANCE = 0.1
"""How far the claimed held-out error may be from the one measured: other hardware rounds otherwise."""
_BUILDING = (AtollError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, ArithmeticError, AssertionError)
"""What an impossible description can raise while a network is built from it."""
_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Contribution:
    """An expert that someone offers for a cluster of a run."""

    expert: int
    manifest: Manifest
    shards: Manifest
    """The run's own manifest of that cluster's data."""
    policy: Policy

    @cached_property
    def data(self) -> ShardsContent:
        """Return what the run declares of that cluster's data."""
        return SHARDS.parse(self.shards, layout.shards(self.expert))

    @property
    def name(self) -> str:
        """The artifact it wants to become."""
        return layout.final(layout.expert_job(self.expert))

    @property
    def claims(self) -> Mapping[str, Any]:
        """Return what it declares, as somebody wrote it: nothing of it is checked yet."""
        return self.manifest.content


def review(store: Store, expert: int, digest: str | None, *, policy: Policy | None, quarantine: Path) -> Artifact:
    """Fetch a contribution into quarantine and check all of it; the artifact there, or `Refused`."""
    rules = policy or Policy()
    name = layout.final(layout.expert_job(expert))
    shutil.rmtree(quarantine, ignore_errors=True)
    try:
        manifest = read_manifest(store, name, digest)
        data = read_manifest(store, layout.shards(expert))
        if manifest is None or data is None:
            raise Refused(f"{store.url} has no {'manifest' if manifest is None else 'data'} of {name}")
        offered = Contribution(expert, manifest, data, rules)
        check_signatures(store, offered, ("publish",))
        check_declaration(offered)
        artifact = Artifact(quarantine, name)
        fetch(store, name, manifest, target=artifact, quiet=True)
        own = Artifact(quarantine, layout.shards(expert))
        fetch(store, own.name, data, target=own, only=lambda file: not file.startswith("train-"), quiet=True)
        check_files(offered, artifact)
        check_loss(offered, artifact, own)
        return artifact
    except AtollError:
        shutil.rmtree(quarantine, ignore_errors=True)
        raise


def check_signatures(store: Store, offered: Contribution, roles: tuple[Role, ...]) -> dict[Role, object]:
    """The signatures over a manifest, each by someone whom the policy gives that role."""
    found: dict[Role, object] = {}
    for role in roles:
        key = signature_key(offered.name, offered.manifest.digest, role)
        data = store.read(key, 4096)
        found[role] = None if data is None else strict_json(data, key)
        try:
            verify(offered.policy, role, offered.name, manifest=offered.manifest, signature=found[role])
        except AtollError as error:
            raise Refused(str(error)) from error
    return {role: value for role, value in found.items() if value is not None}


# Before anything is fetched


def check_declaration(offered: Contribution) -> None:
    """What the manifest says must fit the run, the cluster and the policy."""
    if offered.manifest.kind != EXPERT.name:
        raise Refused(f"it is a {offered.manifest.kind!r}; expected {EXPERT.name!r}")
    _check_listing(offered)
    _check_origin(offered)
    _check_objective(offered)
    tensors = declared_tensors(offered)
    room = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    data = offered.data
    # The density: directions and a mean of latents and of pooled captions, the classes, and room for a few more.
    words = (CAPTION_RANK + 8) * (data.text.pooled or 0) if data.text else 0
    density = 4 * ((RANK + 16) * math.prod(data.latents.shape) + words + len(data.labels))
    for name, entry in offered.manifest.files.items():
        # Tensors and a header of at most 1 kB each.
        most = max(room, density) + 1024 * (len(tensors) + 64)
        if entry.size > most:
            raise Refused(f"{name} has {entry.size:,} bytes; the network declared needs at most {most:,}")
    try:
        EXPERT.parse(offered.manifest, offered.name)
    except AtollError as error:
        raise Refused(str(error)) from error


def _check_listing(offered: Contribution) -> None:
    files = offered.manifest.files
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if name not in files:
            raise Refused(f"{name} is missing")
    for name in files:
        average = name.startswith("average-") and name.endswith(".safetensors") and "/" not in name
        if name not in (CONFIG_FILE, WEIGHTS_FILE, DENSITY_FILE) and not average:
            raise Refused(f"{name} is no file of an expert; expected {CONFIG_FILE}, {WEIGHTS_FILE} and averages")
    size = sum(entry.size for entry in files.values())
    if size > offered.policy.max_bytes:
        raise Refused(f"its files have {size:,} bytes; the policy allows {offered.policy.max_bytes:,}")


def _check_origin(offered: Contribution) -> None:
    """It must come from its own cluster's shards of this run, in this run's space."""
    facts, data = offered.claims, offered.shards.content
    job = layout.expert_job(offered.expert)
    if facts.get("job") != job or facts.get("clusters") != [offered.expert]:
        raise Refused(f"it declares job {facts.get('job')!r} of clusters {facts.get('clusters')!r}; expected {job!r}")
    for key in FROM_THE_DATA:
        if key not in facts:
            raise Refused(f"it does not declare its {key}")
        if facts[key] != data[key]:
            raise Refused(f"its {key} is not that of this run's cluster {offered.expert}")
    if offered.manifest.made_from.get("data") != [offered.shards.digest]:
        raise Refused(f"it was not made from this run's shards of cluster {offered.expert}")


def _check_objective(offered: Contribution) -> None:
    claims, policy = offered.claims, offered.policy
    spec, bridge, conditioning = (claims.get(key) for key in ("objective", "bridge", "conditioning"))
    try:
        check_bounded(spec, "objective")
        if not isinstance(spec, dict) or flow.objective(**spec).spec.model_dump(mode="json") != spec:
            raise Refused("its objective is not one that Atoll knows")
    except _BUILDING as error:
        raise Refused(f"its objective cannot be built: {error}") from error
    allowed = [flow.objective(name).spec.model_dump(mode="json") for name in policy.objectives or ()]
    if policy.objectives is not None and spec not in allowed:
        raise Refused(f"its objective is none of those the policy allows: {', '.join(policy.objectives)}")
    try:
        given = BridgeSpec.model_validate(bridge, strict=True)
        usual = given == BridgeSpec(prediction_error=given.prediction_error) and 0 <= given.prediction_error <= 10
    except ValidationError:
        usual = False
    if not usual:
        raise Refused(f"its bridge is {str(bridge)[:80]}; expected a prediction_error from 0 to 10")
    data = offered.data
    possible = ({"text", "pooled"} if data.text else set()) | ({"label"} if data.labels else set())
    if not isinstance(conditioning, list) or not set(map(str, conditioning)) <= possible:
        raise Refused(f"it is conditioned on {str(conditioning)[:80]}; this run's data has {sorted(possible)}")


def declared_tensors(offered: Contribution) -> dict[str, Tensor]:
    """Names, shapes and dtypes of the network it declares, without memory."""
    description = offered.claims.get("network")
    if not isinstance(description, dict):
        raise Refused("it does not declare its network")
    kind = description.get("_class_name")
    if kind not in offered.policy.networks:
        raise Refused(f"its network is a {str(kind)[:40]!r}; the policy allows {', '.join(offered.policy.networks)}")
    check_bounded(description, "network")
    shape = offered.data.latents.shape
    side = description.get("size", description.get("sample_size", shape[-1]))
    channels = description.get("channels", description.get("in_channels"))
    if channels != shape[0] or not isinstance(side, int) or not 1 <= side <= 4 * shape[-1]:
        raise Refused(f"its network is for {channels} channels and side {side}; the latents are {list(shape)}")
    try:
        with torch.device("meta"):
            network = build(read_network(description))
    except _BUILDING as error:
        raise Refused(f"its network cannot be built: {error}") from error
    scale = network.config.normalization if isinstance(network, DiT) else None
    if scale is not None and Statistics.of_scale(scale, shape[0]) != Statistics.of(offered.data.statistics):
        raise Refused(f"its network is for latents normalized as {scale}; this run normalizes them otherwise")
    count = sum(parameter.numel() for parameter in network.parameters())
    if count > offered.policy.max_parameters:
        raise Refused(f"its network has {count:,} parameters; the policy allows {offered.policy.max_parameters:,}")
    return dict(network.state_dict())


# In quarantine


def check_files(offered: Contribution, artifact: Artifact) -> None:
    """The files are those of the network declared, tensor by tensor, and every number is finite."""
    config = strict_json(artifact.path(CONFIG_FILE).read_bytes(), CONFIG_FILE, 1 << 16)
    if config != offered.claims["network"]:
        raise Refused(f"{CONFIG_FILE} is not the network that the manifest declares")
    expected = {name: (_dtype_name(tensor), tuple(tensor.shape)) for name, tensor in declared_tensors(offered).items()}
    for file in offered.manifest.files:
        if not file.endswith(".safetensors"):
            continue
        found = safetensors_header(artifact.path(file))
        if file == DENSITY_FILE:
            _check_density(offered, found, artifact.path(file))
        elif unknown := sorted(set(found) - set(expected)):
            raise Refused(f"{file} has a tensor {unknown[0][:80]!r} that the network does not have")
        elif file == WEIGHTS_FILE and (missing := sorted(set(expected) - set(found))):
            raise Refused(f"{file} has no tensor {missing[0]!r}")
        else:
            for name, kind in found.items():
                if kind != expected[name]:
                    raise Refused(f"{file}: {name} is {kind[0]} {list(kind[1])}; expected {expected[name]}")
        _check_finite(artifact.path(file))


def _dtype_name(tensor: Tensor) -> str:
    return _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))


def _check_density(offered: Contribution, found: dict[str, tuple[str, tuple[int, ...]]], file: Path) -> None:
    data = offered.data
    size, rows = math.prod(data.latents.shape), data.rows["train"]
    shapes = _density_shapes(found, "", size)
    if data.text:
        shapes |= _density_shapes(found, "caption.", data.text.pooled or 0)
    if data.labels:
        shapes["classes"] = (len(data.labels),)
    if {name: shape for name, (_, shape) in found.items()} != shapes:
        raise Refused(f"{file.name} does not hold the density of latents of {size} numbers and of what is said of them")
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
                raise Refused(f"{file.name}: {name} holds numbers that are not finite")


@torch.no_grad()
def check_loss(offered: Contribution, artifact: Artifact, data: Artifact) -> None:
    """The held-out error on its own cluster, measured here."""
    held_out = Shards([data], "held-out")
    content = EXPERT.parse(offered.manifest, offered.name)
    bar, claim = offered.policy.max_held_out_loss, content.held_out_loss
    if not len(held_out):
        if bar is not None:
            raise Refused(f"cluster {offered.expert} has no held-out images to hold it against the bar {bar}")
        return
    expert = open_expert(expert_of_artifact(artifact, offered.manifest), held_out.statistics, DeviceOptions())
    loss = validate(expert.velocity, held_out, seed=_seed(offered), conditioning=expert.conditioning).mean
    assert loss is not None  # there are held-out images
    if not math.isfinite(loss) or (bar is not None and loss > bar):
        raise Refused(f"its held-out loss on cluster {offered.expert} is {loss:.4g}; the bar is {bar}")
    if claim is None or abs(claim - loss) > CLAIM_TOLERANCE * loss:
        raise Refused(f"it claims a held-out loss of {claim}; measured here: {loss:.4g}")


def _seed(offered: Contribution) -> int:
    """The seed of its training also fixes the noise its held-out error was measured with."""
    seed = offered.manifest.made_from.get("train", {}).get("seed", 0)
    return seed if isinstance(seed, int) and 0 <= seed < 1 << 31 else 0
