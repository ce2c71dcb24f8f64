"""`atoll export`: write a model of a run as a complete diffusers folder with a model card.

DST/
    model_index.json       the components: AtollPipeline
    expert_0/ …, router/   networks with their declarations (atoll.experts.stored)
    vae/, text_encoder/, tokenizer/, scheduler/
    root/, snapshot/       of a shared run: its root and its signed snapshot (verify/trust.py), and
                           expert_0/manifest.json and so on: the manifest of each network, which the snapshot lists
    manifest.json          SHA-256 of every file above
    README.md              the model card; not hashed, because people edit it
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from atoll.apps.models.model_card import CARD_FILE, CardData, model_card
from atoll.core import layout
from atoll.core.artifacts import Artifact, Kind, Manifest
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT, PIPELINE, ROUTER, ExpertContent, NetworkContent, PipelineContent, RouterContent
from atoll.core.progress import progress
from atoll.encoders.autoencoder import Codec
from atoll.encoders.hub import public_name
from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.loading import load
from atoll.ensemble.sampler import Sampler
from atoll.experts import stored
from atoll.experts.density import DENSITY_FILE
from atoll.experts.folder import (
    COMPONENTS,
    EXPERT_CLASS,
    INDEX_FILE,
    PIPELINE_CLASS,
    ROUTER_CLASS,
    remove_source_paths,
)
from atoll.verify.local_trust import copy_trust, open_network
from atoll.verify.verified_files import VerifiedFiles


def export(run: Path, destination: Path, model: str = "experts", *, license: str | None = None) -> Manifest:
    """Write a model of a run. A finished export is left as it is; a folder with other content is an error."""
    sampler = load(run, model, device="cpu", strict=True)
    ensemble = sampler.ensemble
    trained = _trained(run, ensemble)
    destination = destination.resolve()
    artifact = Artifact(destination.parent, destination.name)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())) and not artifact.begun():
        raise AtollError(f"{destination} exists and is not an export of {run}; choose another folder")
    made_from = {"model": model, "networks": {job: manifest.digest for job, manifest in trained.items()}}
    if artifact.begin(PIPELINE, made_from) is None:
        _write(artifact, sampler, trained)
        _copy_origin(run, artifact, trained)
        artifact.commit(PipelineContent(experts=len(ensemble.references), model=model), exclude=[CARD_FILE])
    manifest = artifact.open(PIPELINE, verify=True)
    # An existing card may have been edited.
    if not (destination / CARD_FILE).exists():
        public = [_public(job, manifest) for job, manifest in trained.items()]
        experts = [content for content in public if isinstance(content, ExpertContent)]
        router = next((content for content in public if isinstance(content, RouterContent)), None)
        sizes = sampler.sizes if len(ensemble.sizes) > 1 else ()
        data = CardData(run, destination.name, model, experts, router, license, sizes)
        (destination / CARD_FILE).write_text(model_card(data), encoding="utf-8")
    return manifest


def _trained(run: Path, ensemble: Ensemble) -> dict[str, Manifest]:
    """Return the manifests of all networks, and verify their files."""
    # Without a router only `nearest` can combine experts, and it needs the density of every cluster. Testing from the
    # second expert on exempts a model of one network.
    if ensemble.router is None and any(reference.density is None for reference in ensemble.references[1:]):
        raise AtollError(f"{run} has several experts and no router; train one with: atoll train {run} --router")
    kinds: dict[str, Kind[Any]] = {expert.name: EXPERT for expert in ensemble.experts}
    if ensemble.router is not None:
        kinds[layout.ROUTER] = ROUTER
    artifacts = {job: Artifact(run, layout.final(job)) for job in kinds}
    return {job: open_network(artifacts[job], kind, verify=True)[0] for job, kind in kinds.items()}


def _copy_origin(run: Path, artifact: Artifact, trained: Mapping[str, Manifest]) -> None:
    """Write the root and snapshot of a shared run, and manifest and density of each network as they were signed.

    With them, whoever opens the export can compare every network with the snapshot.
    """
    if not copy_trust(run, artifact, {job: manifest.digest for job, manifest in trained.items()}):
        return
    for number, (job, manifest) in enumerate(trained.items()):
        name = "router" if job == layout.ROUTER else f"expert_{number}"
        artifact.write(f"{name}/{layout.MANIFEST_FILE}", manifest.to_json())
        if DENSITY_FILE in manifest.files:
            density = VerifiedFiles(Artifact(run, layout.final(job)), manifest).read(DENSITY_FILE)
            artifact.write(f"{name}/{DENSITY_FILE}", bytes(density))


def _public(job: str, manifest: Manifest) -> NetworkContent:
    """Return the content of a network's manifest for publication, without paths of this machine."""
    kind: Kind[Any] = ROUTER if job == layout.ROUTER else EXPERT
    content: NetworkContent = kind.parse(manifest, job)
    latents = content.latents.model_copy(update={"autoencoder": public_name(content.latents.autoencoder)})
    text = content.text and content.text.model_copy(update={"encoder": public_name(content.text.encoder)})
    return content.model_copy(update={"latents": latents, "text": text, "manifest": manifest.digest})


def _write(artifact: Artifact, sampler: Sampler, trained: Mapping[str, Manifest]) -> None:
    """Write all components, one after the other, so that one network is in memory at a time."""
    index: dict[str, list[str | None]] = {}
    # 5: router, vae, text_encoder, tokenizer and scheduler.
    with progress("exporting", len(sampler.ensemble.references) + 5, unit="components") as bar:
        for name, component in _components(sampler, trained, artifact.folder):
            index[name] = component
            bar.update(1)
    import diffusers

    fields = {"_class_name": PIPELINE_CLASS, "_diffusers_version": diffusers.__version__, **dict(sorted(index.items()))}
    artifact.write(INDEX_FILE, (json.dumps(fields, indent=2) + "\n").encode())
    remove_source_paths(artifact.folder)


def _components(
    sampler: Sampler, trained: Mapping[str, Manifest], folder: Path
) -> Iterator[tuple[str, list[str | None]]]:
    """Write every component; yield its name, and its library and class for model_index.json."""
    ensemble = sampler.ensemble
    for number, reference in enumerate(ensemble.references):
        content = _public(reference.declaration.name, trained[reference.declaration.name])
        stored.write(folder / f"expert_{number}", reference.open(), content, density=reference.density)
        yield f"expert_{number}", [COMPONENTS, EXPERT_CLASS]
    if ensemble.router is not None:
        stored.write(
            folder / "router", ensemble.router.network, _public(layout.ROUTER, trained[layout.ROUTER]), density=None
        )
    yield "router", [None, None] if ensemble.router is None else [COMPONENTS, ROUTER_CLASS]
    codec = sampler.encoders.autoencoder()
    if isinstance(codec, Codec):
        codec.network.save_pretrained(folder / "vae", safe_serialization=True)
    yield "vae", ["diffusers", type(codec.network).__name__] if isinstance(codec, Codec) else [None, None]
    encoder = sampler.encoders.text_encoder() if ensemble.conditioning & {"text", "pooled"} else None
    parts = (None, None) if encoder is None else (encoder.network, encoder.tokenizer)
    for name, part in zip(("text_encoder", "tokenizer"), parts, strict=True):
        if part is not None:
            part.save_pretrained(folder / name)
        yield name, [None, None] if part is None else ["transformers", type(part).__name__]
    from diffusers import FlowMatchEulerDiscreteScheduler

    FlowMatchEulerDiscreteScheduler().save_pretrained(folder / "scheduler")
    yield "scheduler", ["diffusers", "FlowMatchEulerDiscreteScheduler"]
