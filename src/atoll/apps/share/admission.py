"""Admission: the checks that every network must pass, from the cheapest to the most expensive.

1. The manifest: plain JSON, known files, sizes within the policy, the signature of a publisher or owner.
2. The declaration: the right job and clusters; data, latents, statistics and cluster density of this run; an objective
   and a network that the policy allows.
3. The files: hashes, the tensor names, shapes and dtypes of the declared network (built on the meta device, without
   memory), finite values, not the tensors of another network of the run.
4. Its behavior, measured on the shards of the run (`atoll.apps.share.measured`).

`check_network` is all of them but the signature. Contributors run it before they sign, `atoll admit` and `atoll push`
before they list a network. `atoll pull` leaves the fourth out: it trusts the signed snapshot, and needs no shards.
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from atoll import flow
from atoll.apps.share.measured import check_measured, float32_options
from atoll.apps.share.remote_run import RemoteRun
from atoll.apps.share.transfer import fetch, read_manifest
from atoll.core import layout
from atoll.core.artifacts import Artifact, Content, Manifest
from atoll.core.errors import AtollError, first_line
from atoll.core.manifests import EXPERT, ROUTER, SHARDS, BridgeSpec, DataSpec, ExpertContent, RouterContent, StartSpec
from atoll.core.networks import BASE, LOCAL, BaseConfig, DiTConfig, NetworkConfig, RouterConfig
from atoll.data.dataset import Shards
from atoll.data.density import DENSITY_FILE
from atoll.encoders.autoencoder import Statistics
from atoll.encoders.base_pipeline import register_base
from atoll.experts.cost import parameter_count
from atoll.experts.expert import OpenExpert, open_expert
from atoll.experts.run import reference_of_artifact
from atoll.nets import build
from atoll.nets.io import CONFIG_FILE, WEIGHTS_FILE, weights_digest
from atoll.verify.trust import Network, Policy
from atoll.verify.untrusted import Refused, check_bounded, strict_json
from atoll.verify.verified_files import VerifiedFiles

_BUILD_ERRORS = (
    *(AtollError, ValueError, TypeError, KeyError, AttributeError),
    *(RuntimeError, ArithmeticError, AssertionError),
)
"""Exceptions that building a network or objective from an invalid description can raise."""


@dataclass(frozen=True)
class Contribution:
    """A network that somebody offers for one job of a run."""

    job: str
    manifest: Manifest
    shards: tuple[Manifest, ...]
    """The manifests of the shards of its clusters, from the run itself."""
    policy: Policy
    start: StartSpec | None = None
    """The shared start with which an expert of this run must begin."""

    @cached_property
    def data(self) -> DataSpec:
        """The content of the first shards manifest; the other clusters have the same latents, text and labels."""
        return SHARDS.parse(self.shards[0], layout.shards(self.clusters[0]))

    @property
    def clusters(self) -> tuple[int, ...]:
        """The clusters that it must be trained on."""
        number = layout.expert_number(self.job)
        return tuple(range(len(self.shards))) if number is None else (number,)

    @cached_property
    def content(self) -> ExpertContent | RouterContent:
        """What it declares: plain values of the right types, and otherwise untrusted."""
        claims = self.manifest.content
        network, base = claims.get("network"), self.data.model_dump(mode="json")["text"] or {}
        # A network and an objective are built from these, so they must not ask for a million layers.
        if (base := base.get("base")) and isinstance(network, dict) and self.job != layout.ROUTER:
            # The shards declare the base: nothing of the contributor's is built but the adapter.
            if {**network, "lora": None} != {**base, "lora": None}:
                raise Refused("its base network is not the one that the data of this run was prepared for")
            network = network.get("lora")
        check_bounded(network, "network")
        check_bounded(claims.get("objective"), "objective")
        try:
            return (ROUTER if self.job == layout.ROUTER else EXPERT).parse(self.manifest, "its manifest")
        except AtollError as error:
            raise Refused(str(error)) from error

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The state dict of the declared network on the meta device: names, shapes and dtypes without memory."""
        with torch.device("meta"):
            return dict(build(self.content.network).state_dict())


@dataclass(frozen=True)
class Checked:
    """What the checks of a network found."""

    weights: str
    """Digest of its tensors."""
    error: float | None = None
    """`Network.error`, if it was measured."""


def review(remote: RemoteRun, job: str, digest: str, *, quarantine: Path) -> Network:
    """Download a contribution into quarantine and run all checks; raise `Refused` if one fails.

    It is compared with the other networks of the run, which are downloaded, too.
    """
    name = layout.final(job)
    shutil.rmtree(quarantine, ignore_errors=True)
    try:
        manifest = read_manifest(remote.store, name, digest)
        signature = remote.read_signature("publish", name, digest)
        checked = check_network(remote, job, manifest, quarantine, measure=True, compare=True)
        if signature.weights != checked.weights:
            raise Refused("its weights are not those that its publisher signed")
        return Network(manifest=digest, signature=signature, error=checked.error)
    finally:
        shutil.rmtree(quarantine, ignore_errors=True)


def find_base(remote: RemoteRun, folder: Path) -> None:
    """Find the base model of a shared run on this machine, if it has one; raise an error if it is not the declared one.

    Its files are never in a store. `folder` is the local copy of the run.
    """
    if not (encoder := remote.config.text.encoder).startswith(BASE):
        return
    text = SHARDS.parse(remote.shards(0), layout.shards(0)).text
    declared = text.base if text else None
    if not isinstance(declared, BaseConfig):
        raise Refused("the settings of this run name a base model, and its shards do not")
    setting = f"networks.default.base in {folder / layout.CONFIG_FILE}"
    if encoder.removeprefix(BASE).partition("#")[0] == LOCAL:
        raise AtollError(
            f"the experts of this run are on a base model that you need to have (fingerprint {declared.weights[:16]}); "
            f"ask its owner for it, and set {setting} to its folder"
        )
    if (found := register_base(encoder)) != declared.weights:
        raise AtollError(
            f"{setting} has the fingerprint {found[:16]}, but the experts of this run are on {declared.base} with the "
            f"fingerprint {declared.weights[:16]}"
        )


def check_network(
    remote: RemoteRun,
    job: str,
    manifest: Manifest,
    folder: Path,
    *,
    measure: bool,
    compare: bool = False,
    finished: bool = True,
) -> Checked:
    """Run all checks of a network in a local folder; raise `Refused` if one fails.

    Its files, and with `measure` the shards of its clusters, are downloaded into the folder if it lacks them. With
    `compare`, its behavior is compared with that of the other networks of the run, too. `finished` as in `figures`.
    """
    name, number = layout.final(job), layout.expert_number(job)
    clusters = range(len(remote.trust.current.shards)) if number is None else [number]
    start = None if number is None else remote.shared_start()
    contribution = Contribution(job, manifest, tuple(map(remote.shards, clusters)), remote.policy, start)
    check_declaration(contribution)
    artifact = Artifact(folder, name)
    fetch(remote.store, name, manifest, target=artifact, quiet=True)
    weights = check_files(contribution, artifact)
    if weights in remote.trust.current.withdrawn:
        raise Refused("its weights were withdrawn by the owners of the run")
    for other, known in remote.networks().items():
        if other != job and known.weights == weights:
            raise Refused(f"its weights are a copy of those of {other}")
    if not measure:
        return Checked(weights)
    data = [Artifact(folder, layout.shards(cluster)) for cluster in clusters]
    for target, own in zip(data, contribution.shards, strict=True):
        fetch(remote.store, target.name, own, target=target, quiet=True)
    others = _other_networks(remote, job, folder, data) if compare and number is not None else iter(())
    try:
        error = check_measured(artifact, manifest, data, policy=remote.policy, others=others, finished=finished)
    except AtollError:
        raise
    except _BUILD_ERRORS as reason:
        raise Refused(f"it cannot be evaluated on the data of this run: {first_line(reason)}") from reason
    return Checked(weights, error)


def _other_networks(remote: RemoteRun, job: str, folder: Path, data: list[Artifact]) -> Iterator[OpenExpert]:
    """Download the finished experts of other clusters and the shared start; open one after the other."""
    space = Shards(data, "train").statistics
    for other, network in remote.networks().items():
        if other == job or not (layout.is_expert(other) or other == layout.START):
            continue
        target = Artifact(folder, layout.final(other))
        try:
            manifest = read_manifest(remote.store, target.name, network.manifest)
            # Its EMA weights and its density are not needed.
            manifest = replace(manifest, files={file: manifest.files[file] for file in (CONFIG_FILE, WEIGHTS_FILE)})
            fetch(remote.store, target.name, manifest, target=target, quiet=True)
            reference = reference_of_artifact(target, EXPERT, manifest, VerifiedFiles(target, manifest))
            expert = open_expert(reference, space, float32_options())
        except _BUILD_ERRORS:
            # Nobody can use a network that is missing or damaged in the store. It must not stop the others.
            continue
        yield expert


# Checks before the download


def check_declaration(contribution: Contribution) -> None:
    """Refuse a manifest that does not fit the run, the job and the policy."""
    job, content, policy = contribution.job, contribution.content, contribution.policy
    _check_listing(contribution)
    _check_origin(contribution)
    data, router = contribution.data, job == layout.ROUTER
    text = {"pooled", "arguments" if data.text.base else "text"} if data.text else set()
    possible = text | ({"label"} if data.labels else set())
    if not set(content.conditioning) <= possible:
        raise Refused(f"it is conditioned on {', '.join(content.conditioning)}; this run's data has {sorted(possible)}")
    if isinstance(content, ExpertContent):
        try:
            supported = flow.objective(**content.objective.model_dump(mode="json")).spec == content.objective
        except _BUILD_ERRORS as error:
            raise Refused(f"its objective cannot be built: {error}") from error
        rms = content.bridge.prediction_error
        if not supported or content.bridge != BridgeSpec(prediction_error=rms) or not 0 <= rms <= 10:
            raise Refused("its objective or its bridge is not one that Atoll supports")
    # The objective of monolith and student is the owner's choice.
    objective = content.objective if isinstance(content, ExpertContent) and layout.is_expert(job) else None
    check_allowed(policy, content.network, objective, based=bool(data.text and data.text.base), router=router)
    _check_network(contribution)
    tensor_bytes = sum(tensor.numel() * tensor.element_size() for tensor in contribution.tensors.values())
    # The tensors, and at most 1 kB of header for each.
    limit = tensor_bytes + 1024 * (len(contribution.tensors) + 64)
    for name, entry in contribution.manifest.files.items():
        if name != DENSITY_FILE and entry.size > limit:
            raise Refused(f"{name} has {entry.size:,} bytes; the declared network needs at most {limit:,}")
    if isinstance(content, RouterContent):
        sizes = tuple(SHARDS.parse(own, layout.SHARDS).rows["train"] for own in contribution.shards)
        # Logits are divided by the temperature; training fits it between 0.05 and 20.
        if content.cluster_sizes != sizes or not 0.05 <= content.temperature <= 20:
            raise Refused(
                f"it declares clusters of {content.cluster_sizes[:8]} images, temperature {content.temperature}"
            )


def check_allowed(
    policy: Policy, network: NetworkConfig, objective: Content | None, *, based: bool, router: bool = False
) -> None:
    """Refuse an objective or a network beyond the policy. Experts of a `based` run are adapters of its base model."""
    names = policy.objectives
    if objective and names is not None and objective not in [flow.objective(name).spec for name in names]:
        raise Refused(f"the policy of the run allows only the objectives {', '.join(names)}")
    kinds = ("Router",) if router else (BaseConfig.class_name,) if based else policy.networks
    if network.class_name not in kinds:
        raise Refused(f"the policy of the run allows only the networks {', '.join(kinds)}, not {network.class_name}")
    try:
        count = parameter_count(network)
    except _BUILD_ERRORS as error:
        raise Refused(f"its network cannot be built: {error}") from error
    if count > policy.max_parameters:
        raise Refused(f"the network has {count:,} parameters; the policy of the run allows {policy.max_parameters:,}")


def _check_listing(contribution: Contribution) -> None:
    files, needed = contribution.manifest.files, {CONFIG_FILE, WEIGHTS_FILE}
    if missing := sorted(needed - set(files)):
        raise Refused(f"{missing[0]} is missing")
    allowed = needed | ({DENSITY_FILE} if layout.is_expert(contribution.job) else set())
    for name in files:
        if name not in allowed and not re.fullmatch(r"ema-[^/]*\.safetensors", name):
            raise Refused(f"{name} is not a file of an expert; expected {CONFIG_FILE}, {WEIGHTS_FILE} and EMA weights")
    size = sum(entry.size for entry in files.values())
    if size > contribution.policy.max_bytes:
        raise Refused(f"its files have {size:,} bytes; the policy allows {contribution.policy.max_bytes:,}")


def _check_origin(contribution: Contribution) -> None:
    """Refuse an expert that was not trained on this cluster's shards, with the latents of this run."""
    content, data, clusters = contribution.content, contribution.data, contribution.clusters
    if (content.job, content.clusters) != (contribution.job, clusters):
        found = f"job {content.job!r} of clusters {content.clusters[:8]}"
        raise Refused(f"it declares {found}; expected {contribution.job!r} of {clusters[:8]}")
    for key in DataSpec.model_fields:
        if getattr(content, key) != getattr(data, key):
            raise Refused(f"its field {key!r} differs from that of cluster {clusters[0]} of this run")
    made_from = contribution.manifest.made_from
    if made_from.get("data") != [own.digest for own in contribution.shards]:
        raise Refused(f"it was not trained on the shards of cluster {', '.join(map(str, clusters[:8]))} of this run")
    if layout.is_expert(contribution.job):
        # The owner fitted it to the shards, whose digests the root lists, so its values need no check.
        own, expected = (made.files.get(DENSITY_FILE) for made in (contribution.manifest, contribution.shards[0]))
        if own != expected:
            raise Refused(f"its {DENSITY_FILE} is not the density in the shards of cluster {clusters[0]} of this run")
    start, declared = contribution.start, getattr(content, "start", None)
    if (declared, made_from.get("start")) != (start, start.manifest if start else None):
        raise Refused("it did not begin with the shared start of this run" if start else "it declares a shared start")


def _check_network(contribution: Contribution) -> None:
    """Refuse a network that does not fit the latents and the clusters of the run."""
    described, network = contribution.manifest.content["network"], contribution.content.network
    latents = contribution.data.latents
    longest = max(side for size in (latents.shape[1:], *(latents.sizes or ())) for side in size)
    side = described.get("size", described.get("sample_size", longest))
    channels = described.get("channels", described.get("in_channels"))
    if channels != latents.shape[0] or not isinstance(side, int) or not 1 <= side <= 4 * longest:
        raise Refused(f"its network is for {channels} channels and size {side}; the latents are {list(latents.shape)}")
    scale = network.normalization if isinstance(network, DiTConfig) else None
    if scale is not None and Statistics.of_scale(scale, channels) != Statistics.of(contribution.data.statistics):
        raise Refused(f"its network is for latents normalized as {scale}; this run normalizes them differently")
    if isinstance(network, RouterConfig) and network.experts != len(contribution.clusters):
        raise Refused(f"its network is for {network.experts} experts; this run has {len(contribution.clusters)}")


# Checks in quarantine


def check_files(contribution: Contribution, artifact: Artifact) -> str:
    """Refuse files that differ from the declared network in any tensor, or hold values that are not finite.

    Return the digest of its weights.
    """
    config = strict_json(artifact.path(CONFIG_FILE).read_bytes(), CONFIG_FILE, 1 << 16)
    if config != contribution.manifest.content["network"]:
        raise Refused(f"{CONFIG_FILE} is not the network that the manifest declares")
    expected = contribution.tensors
    for file in contribution.manifest.files:
        # The density has the hash of the one in the shards (`_check_origin`).
        if not file.endswith(".safetensors") or file == DENSITY_FILE:
            continue
        found = _read(artifact.path(file))
        if unknown := sorted(set(found) - set(expected)):
            raise Refused(f"{file} has a tensor {unknown[0][:80]!r} that the declared network lacks")
        if file == WEIGHTS_FILE and (missing := sorted(set(expected) - set(found))):
            raise Refused(f"{file} has no tensor {missing[0]!r}")
        for name, tensor in found.items():
            if (tensor.dtype, tensor.shape) != (expected[name].dtype, expected[name].shape):
                wanted = f"{expected[name].dtype} {list(expected[name].shape)}"
                raise Refused(f"{file}: {name} is {tensor.dtype} {list(tensor.shape)}; expected {wanted}")
            if not bool(tensor.isfinite().all()):
                raise Refused(f"{file}: {name} holds values that are not finite")
    return weights_digest(sorted(_read(artifact.path(WEIGHTS_FILE)).items()))


def _read(file: Path) -> dict[str, Tensor]:
    """Map the tensors of a file. The library refuses gaps, overlaps, other bytes and headers that are not plain."""
    try:
        return load_file(file)
    except SafetensorError as error:
        raise Refused(f"{file.name} is not a safetensors file: {error}") from error
