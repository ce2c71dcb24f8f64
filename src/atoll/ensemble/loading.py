"""Opening a run as one model."""

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.device import device as pick_device
from atoll.core.errors import AtollError, unknown
from atoll.core.layout import CONFIG_FILE
from atoll.core.manifests import EXPERT, ROUTER
from atoll.core.signing import open_trusted
from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.folder import is_folder, load_folder
from atoll.experts.density import FILE, Density
from atoll.experts.expert import Declaration
from atoll.experts.expert_cache import ExpertReference, DeviceOptions
from atoll.experts.router import OpenRouter
from atoll.nets import Router, load_network
from atoll.nets.io import WEIGHTS_FILE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    source: str | Path,
    model: str = "experts",
    *,
    resident: int | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    strict: bool = False,
    routing: str = "top-1",
    quantise: str | None = None,
    compile: bool = False,
    verify: bool = False,
) -> Ensemble:
    """Open a run as one model; or a folder that `atoll export` wrote, or the Paris release, here or by its hub name.

    `model` is all experts under the router (`experts`), one of them (`expert:3`), the `monolith` or the `student`.
    At most `resident` experts are in memory at once (all of them if None). Experts that are not there are listed in
    `.missing` and the others act without them; with `strict` that is an error. `verify` checks the hash of every file;
    in a run with a policy hashes and signatures are always checked.
    """
    run = Path(source)
    placement = DeviceOptions(torch.device(device) if device else pick_device(), _dtype(dtype), quantise, compile)
    if not (run / CONFIG_FILE).is_file():
        if is_folder(source):
            return load_folder(source, model, placement, resident=resident, routing=routing)
        raise AtollError(f"{run} is not a run: it has no {CONFIG_FILE}")
    if model != "experts":
        return Ensemble([open_member(run, layout.model_job(model), verify)], placement=placement)
    names, missing = _experts(run)
    if not names or (missing and strict):
        raise AtollError(f"{run} has no finished {', '.join(missing)}; train with: atoll train {run} --expert K")
    members = [open_member(run, name, verify) for name in names]
    router = open_router(run, placement, verify)
    return Ensemble(members, router, placement=placement, resident=resident, routing=routing, missing=missing)


def open_member(run: Path, name: str, verify: bool = False) -> ExpertReference:
    """A finished expert of a run; its network is read when it is needed."""
    artifact = Artifact(run, layout.final(name))
    if artifact.manifest() is None:
        flag = f"--expert {int(name[-3:])}" if layout.is_expert(name) else f"--{name}"
        state = "is not finished" if (run / name).is_dir() else "is not there"
        raise AtollError(f"{artifact.folder} {state}; make it with: atoll train {run} {flag}")
    manifest = open_trusted(artifact, EXPERT, verify)
    return ExpertReference(
        Declaration.of(EXPERT.parse(manifest, artifact.folder)),
        partial(load_network, artifact.folder),
        manifest.files[WEIGHTS_FILE].size,
        artifact.path(WEIGHTS_FILE),
        Density.from_tensors(load_file(artifact.path(FILE))) if FILE in manifest.files else None,
    )


def open_router(run: Path, placement: DeviceOptions, verify: bool = False) -> OpenRouter | None:
    """The run's router, if it is finished."""
    artifact = Artifact(run, layout.final(layout.ROUTER))
    if artifact.manifest() is None:
        return None
    declaration = Declaration.of(ROUTER.parse(open_trusted(artifact, ROUTER, verify), artifact.folder))
    network = load_network(artifact.folder)
    if not isinstance(network, Router):
        raise AtollError(f"{artifact.folder} holds a {type(network).__name__}, not a router")
    placed = DeviceOptions(placement.device, placement.dtype, None, placement.compile).put(network)
    assert isinstance(placed, Router)
    return OpenRouter(declaration, placed, placement.dtype)


def _experts(run: Path) -> tuple[list[str], list[str]]:
    """Names of the experts that are finished, and of those that are not."""
    from atoll.core.config import load as load_config

    expected = {layout.expert_job(number) for number in range(load_config(run).clusters.count)}
    folders = {job for job in layout.jobs(run) if layout.is_expert(job)}
    done = {name for name in expected | folders if Artifact(run, layout.final(name)).manifest() is not None}
    return sorted(done), sorted(expected - done)


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise AtollError(unknown("dtype", dtype, DTYPES))
    return DTYPES[dtype] if isinstance(dtype, str) else dtype or torch.float32
