"""Shards whose autoencoder has a posterior with a width, as those of Stable Diffusion do."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from atoll.run import Artifact


def give_posterior(source: Path, target: Path, std: float = 0.5) -> None:
    """Copy the shards of a run and give every image a posterior of this standard deviation."""
    for folder in sorted((source / "data/shards").iterdir()):
        made = Artifact(source, f"data/shards/{folder.name}").open("shards")
        copy = Artifact(target, f"data/shards/{folder.name}")
        copy.begin("shards", dict(made.made_from))
        for file in made.files:
            if not file.endswith(".safetensors") or "mean" not in (tensors := load_file(folder / file)):
                shutil.copy(folder / file, copy.folder)
                continue
            copy.write(file, save({**tensors, "std": torch.full_like(tensors["mean"], std)}))
        copy.commit(made.facts)
