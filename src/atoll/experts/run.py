"""The experts and the router of a run."""

from functools import partial
from pathlib import Path

from safetensors.torch import load_file

from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact, Manifest
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT, ROUTER
from atoll.core.signing import open_trusted
from atoll.data.encoders import Encoders
from atoll.experts.density import DENSITY_FILE, Density
from atoll.experts.expert import Declaration, ExpertReference
from atoll.experts.source import ModelReference
from atoll.nets import load_network
from atoll.nets.io import WEIGHTS_FILE


def open_run(run: Path, model: str, *, verify: bool = False, strict: bool = False) -> ModelReference:
    """Find the networks of a model: `experts` with the router, `expert:3`, `monolith` or `student`.

    `verify` checks the hash of every file; a run with a policy always checks hashes and signatures. Experts that are
    not finished are listed in `.missing`; with `strict` they are an error.
    """
    if model != "experts":
        experts = [expert_of_run(run, layout.model_job(model), verify=verify)]
        return ModelReference(experts, None, _encoders(experts[0]))
    # Experts of the configuration, and those that were added to the run beyond it.
    expected = {layout.expert_job(number) for number in range(configuration.load(run).clusters.count)}
    folders = {job for job in layout.jobs(run) if layout.is_expert(job)}
    done = {job for job in expected | folders if Artifact(run, layout.final(job)).manifest() is not None}
    missing = sorted(expected - done)
    if not done or (missing and strict):
        raise AtollError(f"{run} has no finished {', '.join(missing)}; train with: atoll train {run} --expert K")
    experts = [expert_of_run(run, job, verify=verify) for job in sorted(done)]
    return ModelReference(experts, router_of_run(run, verify=verify), _encoders(experts[0]), tuple(missing))


def expert_of_run(run: Path, job: str, *, verify: bool = False) -> ExpertReference:
    """Find a finished expert of a run (`experts/003`, `monolith`, `student`)."""
    artifact = Artifact(run, layout.final(job))
    if artifact.manifest() is None:
        flag = f"--expert {layout.expert_number(job)}" if layout.is_expert(job) else f"--{job}"
        state = "is not finished" if (run / job).is_dir() else "is missing"
        raise AtollError(f"{artifact.folder} {state}; train it with: atoll train {run} {flag}")
    return expert_of_artifact(artifact, open_trusted(artifact, EXPERT, verify))


def expert_of_artifact(artifact: Artifact, manifest: Manifest) -> ExpertReference:
    """Return a reference to the expert of an artifact whose manifest was checked."""
    return ExpertReference(
        Declaration.of(EXPERT.parse(manifest, artifact.folder)),
        partial(load_network, artifact.folder),
        manifest.files[WEIGHTS_FILE].size,
        artifact.path(WEIGHTS_FILE),
        Density.from_tensors(load_file(artifact.path(DENSITY_FILE))) if DENSITY_FILE in manifest.files else None,
    )


def router_of_run(run: Path, *, verify: bool = False) -> ExpertReference | None:
    """Find the router of a run, if it is finished."""
    artifact = Artifact(run, layout.final(layout.ROUTER))
    if artifact.manifest() is None:
        return None
    manifest = open_trusted(artifact, ROUTER, verify)
    declaration = Declaration.of(ROUTER.parse(manifest, artifact.folder))
    return ExpertReference(declaration, partial(load_network, artifact.folder), manifest.files[WEIGHTS_FILE].size)


def _encoders(expert: ExpertReference) -> Encoders:
    return Encoders.of(expert.declaration.latents, expert.declaration.text)
