"""Runs with networks of random weights: the files of a trained run, without the training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image
from torch import nn

from atoll import flow
from atoll.core import manifests
from atoll.core.artifacts import Artifact, ArtifactKind
from atoll.core.networks import read_network
from atoll.data.density import DENSITY_FILE, Density
from atoll.encoders.text import weights_of
from atoll.nets import build, save_network

SMALL = {
    "_class_name": "DiT",
    "width": 32,
    "depth": 2,
    "heads": 2,
    "patch": 2,
    "channels": 3,
    "out_channels": 3,
    "size": 8,
}
WIDE = {**SMALL, "width": 64, "depth": 3, "heads": 4, "modulation": "zero", "out_channels": 6}
ROUTER = {"_class_name": "Router", "width": 32, "depth": 2, "heads": 2, "patch": 2, "channels": 3, "size": 8}
TEXT = {"encoder": "minilm", "weights": weights_of("minilm"), "max_tokens": 12, "dimensions": 384, "pooled": 384}
SPACE = {"mean": [0.1, -0.2, 0.0], "std": [0.5, 0.6, 0.55]}
CLASSES = ["circle", "square", "triangle"]


def randomized(network: nn.Module, seed: int) -> nn.Module:
    """Fill a network with random weights: no part is zero, as some are at the start of training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            spread = 0.3 if parameter.ndim < 2 else 1.2 * parameter.shape[-1] ** -0.5
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
            if name.startswith("head.outer"):
                parameter.mul_(6)  # routers with confident probabilities
    return network


def declared_by(
    job: str, clusters: list[int], network: dict[str, Any], conditioning: list[str], space: dict[str, Any]
) -> dict[str, Any]:
    return {
        "job": job, "clusters": clusters, "network": network, "conditioning": conditioning, "statistics": space,
        "text": TEXT, "source": "made up", "fingerprint": "0" * 64, "labels": CLASSES,
        "latents": {"autoencoder": "pixels", "weights": None, "resolution": 8, "shape": [3, 8, 8]},
    }  # fmt: skip


def write_network(run: Path, job: str, declared: dict[str, Any], seed: int = 0) -> None:
    """Commit a network as a training job would."""
    artifact = Artifact(run, f"{job}/final")
    kind: ArtifactKind[Any] = manifests.ROUTER if job == "router" else manifests.EXPERT
    artifact.begin(kind, {"job": job})
    network = randomized(build(read_network(declared["network"])), seed)
    declared = {**declared, "network": network.config}
    save_network(network, artifact.folder)
    if kind is manifests.EXPERT:
        artifact.write_tensors(DENSITY_FILE, cluster_density(seed).tensors())
    artifact.commit(kind.content(**declared))


def cluster_density(seed: int) -> Density:
    """Return a made-up density of the latents, captions and classes of a cluster."""
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(200, 3, 8, 8, generator=generator) + 0.3 * seed
    captions = torch.randn(200, 384, generator=generator) + 0.3 * torch.randn(384, generator=generator)
    classes = torch.randint(0, 40, (len(CLASSES),), generator=generator).float()
    return replace(Density.fit(latents), caption=Density.fit(captions, count=1, rank=16), classes=classes)


def fitted(network: dict[str, Any], conditioning: list[str]) -> dict[str, Any]:
    """Return the fields of a network with those that its conditioning needs."""
    parts: dict[str, Any] = {"text_width": 384} if "text" in conditioning else {}
    return {**network, **parts, **({"num_classes": len(CLASSES)} if "label" in conditioning else {})}


def write_run(
    run: Path,
    objectives: tuple[str, ...] = ("flow-matching", "ddpm", "v-prediction"),
    networks: tuple[dict[str, Any], ...] = (SMALL, WIDE, SMALL),
    conditioning: tuple[str, ...] = ("text",),
    router_conditioning: tuple[str, ...] = (),
    spaces: dict[int, dict[str, Any]] | None = None,
) -> Path:
    """Write a run with one expert per objective, a router, a monolith and a student."""
    run.mkdir(parents=True)
    (run / "atoll.yaml").write_text(yaml.safe_dump({"clusters": {"count": len(objectives)}}))
    for number, objective in enumerate(objectives):
        job = f"experts/{number:03d}"
        network = fitted(networks[number % len(networks)], list(conditioning))
        declared = declared_by(job, [number], network, list(conditioning), (spaces or {}).get(number, SPACE))
        declared |= {"objective": flow.objective(objective).spec, "bridge": {"prediction_error": 0.05}}
        write_network(run, job, declared, seed=number + 1)
    everything = list(range(len(objectives)))
    for number, job in enumerate(("monolith", "student")):
        declared = declared_by(job, everything, fitted(SMALL, list(conditioning)), list(conditioning), SPACE)
        write_network(run, job, {**declared, "objective": flow.Objective().spec, "bridge": {}}, seed=20 + number)
    router = {
        **ROUTER,
        "experts": len(objectives),
        **({"pooled_width": 384} if "pooled" in router_conditioning else {}),
    }
    declared = declared_by("router", everything, router, list(router_conditioning), SPACE)
    sizes = {"cluster_sizes": [1] * len(objectives), "prior_entropy": 0.0, "temperature": 1.0}
    write_network(run, "router", {**declared, **sizes}, seed=30)
    return run


def read_settings(file: Path | str) -> dict[str, object]:
    """Return the settings with which an image was sampled."""
    with Image.open(file) as image:
        settings: dict[str, object] = json.loads(image.info["atoll"])
    return settings
