"""Shards of an autoencoder with a posterior variance, such as that of Stable Diffusion."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from atoll.core.artifacts import Artifact
from atoll.core.manifests import SHARDS
from atoll.data.density import DENSITY_FILE, write_density


def give_posterior(source: Path, target: Path, std: float = 0.5) -> None:
    """Copy the shards of a run and give every image a posterior of this standard deviation."""
    for folder in sorted((source / "data/shards").iterdir()):
        made = Artifact(source, f"data/shards/{folder.name}").open(SHARDS)
        copy = Artifact(target, f"data/shards/{folder.name}")
        copy.begin(SHARDS, dict(made.made_from))
        for file in made.files.keys() - {DENSITY_FILE}:
            if not file.endswith(".safetensors") or "mean" not in (tensors := load_file(folder / file)):
                shutil.copy(folder / file, copy.folder)
                continue
            copy.write(file, save({**tensors, "std": torch.full_like(tensors["mean"], std)}))
        content = SHARDS.parse(made, folder)
        write_density(copy, content)
        copy.commit(content)
