"""`atoll merge`: average the experts of a common start into one dense network (Diffusion Soup, arXiv 2406.08431).

Networks that began with the same weights and did not go far from them can be averaged; networks of different random
initializations cannot. Each expert counts with the training images of its cluster: to first order in the distance from
the start, that is a network trained on all images, because the loss over all images is the mean of the clusters' losses
with these weights. The average costs no training, and it samples at the cost of one expert, without a router.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from atoll.core import layout
from atoll.core.artifacts import Artifact, Manifest
from atoll.core.config import Config
from atoll.core.device import device
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT, SHARDS, ComputeSpec, ExpertContent, training_costs
from atoll.core.progress import say
from atoll.nets import build, load_network, save_network
from atoll.train.job import build_task
from atoll.train.spec import resolve_job
from atoll.verify.local_trust import open_network
from atoll.verify.verified_files import VerifiedFiles


def merge(run: Path, config: Config) -> Manifest:
    """Average all experts of a run, validate the result on validation images and commit it; do nothing if it exists."""
    spec = resolve_job(run, config, "merged")
    shards = [Artifact(run, layout.shards(cluster)) for cluster in spec.clusters]
    sizes = [own.read(SHARDS).rows["train"] for own in shards]
    sources = [Artifact(run, layout.final(layout.expert_job(cluster))) for cluster in spec.clusters]
    if absent := [source.name for source in sources if source.manifest() is None]:
        raise AtollError(f"{run} has no finished {', '.join(absent)}; a merged network is the average of all experts")
    manifests = [open_network(source, EXPERT, verify=True)[0] for source in sources]
    contents = [EXPERT.parse(made, source.folder) for source, made in zip(sources, manifests, strict=True)]
    _check_mergeable(contents)
    first, digests = contents[0], tuple(manifest.digest for manifest in manifests)
    data, seed = [own.open(SHARDS).digest for own in shards], {"seed": spec.settings.seed}
    made_from = {"job": spec.job, "data": data, "sources": digests, "train": seed}
    if done := spec.result.begin(EXPERT, made_from):
        say(f"{spec.result.folder} exists already")
        return done
    conditioning = frozenset[str](first.conditioning)
    opened = (VerifiedFiles(source, made) for source, made in zip(sources, manifests, strict=True))
    network = build(first.network)
    network.load_state_dict(
        average((load_network(files.artifact.folder, files.read).state_dict() for files in opened), sizes)
    )
    # The configuration may have changed since the experts were trained.
    spec = replace(spec, network=first.network, init_from=None, objective=first.objective, conditioning=conditioning)
    task = replace(build_task(spec), network=network.to(device()).eval())
    # The cost of all experts, and of their start once; the merged network has the parameters of one.
    spent = training_costs(contents)
    compute = ComputeSpec(
        images=sum(one.images for one in spent),
        parameters=spent[0].parameters,
        flops=sum(one.flops for one in spent),
        seconds=sum(one.seconds for one in spent),
    )
    content = task.finish(compute).model_copy(update={"sources": digests})
    save_network(network, spec.result.folder)
    made = spec.result.commit(content)
    error = (
        "no validation images" if content.validation_loss is None else f"validation error {content.validation_loss:.4f}"
    )
    say(f"{spec.job}: done, {error}, {spec.result.folder}")
    return made


def average(networks: Iterable[dict[str, Tensor]], sizes: Sequence[int]) -> dict[str, Tensor]:
    """Return the mean of state dicts, weighted by `sizes`. One network at a time is in memory."""
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for network, size in zip(networks, sizes, strict=True):
        for name, tensor in network.items():
            # Float64 keeps the rounding of the sum far below that of the weights. Counters are not averaged.
            share = size / sum(sizes) * tensor.double()
            sums[name] = sums.get(name, 0) + share if tensor.is_floating_point() else tensor
            dtypes[name] = tensor.dtype
    return {name: tensor.to(dtypes[name]) for name, tensor in sums.items()}


def _check_mergeable(experts: Sequence[ExpertContent]) -> None:
    """Raise an error unless all experts have one start, objective, network and conditioning."""
    first = experts[0]
    for expert in experts:
        if expert.start is None or first.start is None or expert.start.manifest != first.start.manifest:
            raise AtollError(
                f"{expert.job} and {first.job} did not begin with the same shared start, so the average of their "
                "weights means nothing; train experts with shared_start.flops_share"
            )
        if expert.objective != first.objective:
            raise AtollError(
                f"{expert.job} and {first.job} have different objectives: their outputs have different meanings, and "
                "one network cannot have both"
            )
        if expert.network != first.network or expert.conditioning != first.conditioning:
            raise AtollError(f"{expert.job} and {first.job} have different networks or conditioning")
