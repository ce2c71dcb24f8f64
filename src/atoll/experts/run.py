"""The experts and the router of a run."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact, ArtifactKind, Manifest, sha256_of
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT, ROUTER, ExpertContent, NetworkContent, training_costs
from atoll.core.networks import BASE, OwnConfig
from atoll.data.density import DENSITY_FILE, Density
from atoll.encoders.base_pipeline import register_base
from atoll.encoders.encoders import Encoders
from atoll.encoders.hub import public_name
from atoll.experts.expert import Declaration, ModelReference, NetworkReference
from atoll.nets import load_network
from atoll.nets.io import WEAK_FILE, WEIGHTS_FILE, tensors_of
from atoll.nets.own import allow
from atoll.nets.student import CLUSTERS, for_cluster
from atoll.verify.local_trust import open_network
from atoll.verify.verified_files import VerifiedFiles

CLUSTERS_FILE = "told-clusters.safetensors"
"""The vectors of the clusters of a student that is told its cluster (`nets/student.py`)."""


def open_run(
    run: Path, model: str, *, verify: bool = False, strict: bool = False, find_base: bool = True
) -> ModelReference:
    """Find the networks of a model: `experts` or `students` with the router, `expert:3`, or a dense network.

    A student that is told its cluster is opened as one expert for each cluster, which share their weights.

    `verify` checks the hash of every file; a copy of a shared run is always checked against its snapshot. Experts that
    are not finished are listed in `.missing`; with `strict` they are an error. Without `find_base`, the base network
    of the experts need not be on this machine.
    """
    if model not in ("experts", layout.STUDENTS):
        jobs, missing = [layout.model_job(model)], []
        number, count = layout.expert_number(jobs[0]), configuration.load(run).clusters.count
        if number is not None and number >= count and not (run / jobs[0]).is_dir():
            raise AtollError(f"there is no {model} in {run}; it has {count} experts, expert:0 to expert:{count - 1}")
    else:
        # Experts of the configuration, and those that were added to the run beyond it.
        name = layout.student_job if model == layout.STUDENTS else layout.expert_job
        expected = {name(number) for number in range(configuration.load(run).clusters.count)}
        folders = {job for job in layout.jobs(run) if layout.is_expert(job) and model == "experts"}
        jobs = sorted(job for job in expected | folders if Artifact(run, layout.final(job)).manifest() is not None)
        missing = sorted(expected - set(jobs))
        if not jobs or (missing and strict):
            options = "--student --expert K" if model == layout.STUDENTS else "--expert K"
            raise AtollError(f"{run} has no finished {', '.join(missing)}; train with: atoll train {run} {options}")
    if find_base and (encoder := configuration.load(run).text.encoder).startswith(BASE):
        register_base(encoder)
    experts = [part for job in jobs for part in _by_cluster(run, expert_of_run(run, job, verify=verify), verify)]
    declared = experts[0].declaration
    encoders = Encoders.of(declared.latents, declared.text, run=run)
    router, artifact = None, Artifact(run, layout.final(layout.ROUTER))
    if (model in ("experts", layout.STUDENTS) or len(experts) > 1) and artifact.manifest() is not None:
        router = reference_of_artifact(artifact, ROUTER, *open_network(artifact, ROUTER, verify=verify))
    return ModelReference(experts, router, encoders, tuple(missing))


def teachers_flops(run: Path, students: Iterable[NetworkContent]) -> int | None:
    """Return the FLOPs of the training of students' teachers and of their shared start; None if one is not in the run.

    A model without students has no teachers, and 0.
    """
    named = {digest for student in students if isinstance(student, ExpertContent) for digest in student.teachers or ()}
    experts = [Artifact(run, layout.final(job)) for job in layout.jobs(run) if named and layout.is_expert(job)]
    finished = [expert for expert in experts if expert.manifest() is not None]
    found = {expert.open(EXPERT).digest: expert.read(EXPERT) for expert in finished}
    if named - found.keys():
        return None
    return sum(spent.flops for spent in training_costs(found[digest] for digest in named))


def expert_of_run(run: Path, job: str, *, verify: bool = False) -> NetworkReference:
    """Find a finished expert or dense network of a run by its job (`experts/003`, `monolith`)."""
    artifact = Artifact(run, layout.final(job))
    if artifact.manifest() is None:
        raise AtollError(missing_network(run, job))
    reference = reference_of_artifact(artifact, EXPERT, *open_network(artifact, EXPERT, verify=verify))
    if isinstance(reference.declaration.network, OwnConfig):
        allow(run, configuration.load(run))
    return reference


def _by_cluster(run: Path, reference: NetworkReference, verify: bool) -> list[NetworkReference]:
    """Return a network as an expert for each cluster, if it is told the cluster."""
    declared = reference.declaration
    artifact = Artifact(run, layout.final(declared.name))
    if CLUSTERS_FILE not in artifact.open(EXPERT).files:
        return [reference]
    manifest, files = open_network(artifact, EXPERT, verify=True)
    vectors = tensors_of((files or VerifiedFiles(artifact, manifest)).read(CLUSTERS_FILE))[CLUSTERS]
    network, densities = cache(reference.open), {}
    for job in map(layout.expert_job, declared.clusters):  # its teachers, which have the densities of the clusters
        found = Artifact(run, layout.final(job)).manifest() is not None
        densities[job] = expert_of_run(run, job, verify=verify).density if found else None
    return [
        replace(
            reference,
            density=densities[layout.expert_job(cluster)],
            weak=None,
            declaration=replace(declared, clusters=(cluster,)),
            open=lambda vector=vector: for_cluster(network(), vector),  # type: ignore[misc]
        )
        for cluster, vector in zip(declared.clusters, vectors, strict=True)
    ]


def missing_network(run: Path, job: str) -> str:
    """Return the message for a network that is not finished, with the command that trains it."""
    flag = f"--expert {layout.expert_number(job)}" if layout.is_expert(job) else f"--{job}"
    state = "is not finished" if (run / job).is_dir() else "is missing"
    verb = "merge" if job == layout.MERGED else "train"
    command = f"atoll merge {run}" if job == layout.MERGED else f"atoll train {run} {flag}"
    return f"{run / layout.final(job)} {state}; {verb} it with: {command}"


def reference_of_artifact(
    artifact: Artifact, kind: ArtifactKind[Any], manifest: Manifest, files: VerifiedFiles | None = None
) -> NetworkReference:
    """Return a reference to the expert or router of an artifact whose manifest was checked.

    With `files`, the reference reads its files through them each time that it is opened.
    """
    density = None
    if DENSITY_FILE in manifest.files:
        density = Density.from_tensors(
            tensors_of(files.read(DENSITY_FILE)) if files else load_file(artifact.path(DENSITY_FILE))
        )
    reference = NetworkReference(
        Declaration.of(kind.parse(manifest, artifact.folder)),
        partial(load_network, artifact.folder, files.read if files else None),
        manifest.files[WEIGHTS_FILE].size,
        artifact.path(WEIGHTS_FILE),
        density,
    )
    # Admission to a shared run measures the weights of the result only, so weak ones of others are not used.
    if files is None and WEAK_FILE in manifest.files:
        opened = partial(load_network, artifact.folder, ema=WEAK_FILE)
        return replace(reference, weak=replace(reference, open=opened, file=artifact.path(WEAK_FILE)))
    return reference


def known_densities(run: Path) -> dict[int, Density]:
    """Return the densities of the clusters that this machine has: beside the shards, or else of finished experts.

    Damaged ones count as absent: a job needs no data of others.
    """
    names = {layout.expert_number(job): layout.final(job) for job in layout.jobs(run) if layout.is_expert(job)}
    clusters = sorted((run / layout.shards(0)).parent.glob("cluster_[0-9]*"))
    names |= {number: layout.shards(number) for number in (int(path.name.rpartition("_")[2]) for path in clusters)}
    found = {}
    for number, name in names.items():
        artifact = Artifact(run, name)
        with suppress(AtollError):
            manifest = artifact.manifest()
            entry, file = manifest and manifest.files.get(DENSITY_FILE), artifact.path(DENSITY_FILE)
            if number is not None and entry and file.is_file() and sha256_of(file) == entry.sha256:
                found[number] = Density.from_tensors(load_file(file))
    return dict(sorted(found.items()))


def network_manifests(run: Path, experts: Sequence[str], *, router: bool) -> dict[str, Manifest]:
    """Read the manifests of all networks by their jobs, and verify their files."""
    kinds: dict[str, ArtifactKind[Any]] = {
        **dict.fromkeys(experts, EXPERT),
        **({layout.ROUTER: ROUTER} if router else {}),
    }
    return {job: open_network(Artifact(run, layout.final(job)), kind, verify=True)[0] for job, kind in kinds.items()}


def public_content(job: str, manifest: Manifest) -> NetworkContent:
    """Return the content of a network's manifest for publication, without paths of this machine."""
    kind: ArtifactKind[Any] = ROUTER if job == layout.ROUTER else EXPERT
    content: NetworkContent = kind.parse(manifest, job)
    latents = content.latents.model_copy(update={"autoencoder": public_name(content.latents.autoencoder)})
    text = content.text and content.text.model_copy(update={"encoder": public_name(content.text.encoder)})
    return content.model_copy(update={"latents": latents, "text": text, "manifest": manifest.digest})
