"""The network of a training job: what the configuration chooses, fitted to the data."""

import json
from pathlib import Path
from typing import Literal

import torch

from atoll.core.config import NetworkChoice
from atoll.core.errors import AtollError
from atoll.core.networks import (
    CLASS_NAME,
    DEFAULT_NAME,
    NAMES,
    DiffusersConfig,
    NetworkConfig,
    check_fits_data,
    read_network,
)
from atoll.nets import build

NeededFields = dict[str, int]
"""The fields of a network that the data decides, by name."""


def fitted_network(
    kind: Literal["DiT", "Router"], choice: NetworkChoice, needed: NeededFields, *, key: str
) -> NetworkConfig:
    """Return a network from a named size or its fields, fitted to the data; `key` is its name in the file."""
    parts = {"name": choice} if isinstance(choice, str) else dict(choice)
    try:
        if parts.get(CLASS_NAME, kind) != kind:
            # Where a diffusers model names its channels, they must be those of the latents.
            latents = {"in_channels": needed["channels"], "out_channels": needed["channels"]}
            check_fits_data(parts, latents)
            config = read_network(parts)
            with torch.device("meta"):
                build(config)
            return config
        check_fits_data(parts, needed)
        given = {name: value for name, value in parts.items() if name != "name"}
        return read_network({CLASS_NAME: kind, **NAMES[parts.get("name", DEFAULT_NAME)], **needed, **given})
    except AtollError as error:
        raise AtollError(f"{key}: {error}") from error


def check_classes(network: DiffusersConfig, classes: int) -> None:
    """Refuse a diffusers network whose class table is too small: its null class would be the last class of the data."""
    rows = {"UNetExpert": ("num_class_embeds", classes + 1), "DiTExpert": ("num_embeds_ada_norm", classes)}
    field, needed = rows.get(network.class_name, ("", 0))
    given = network.fields.get(field)
    if classes and isinstance(given, int) and given < needed:
        raise AtollError(
            f"{network.class_name}: {field} is {given}, but {classes} classes and the null class need {needed}"
        )


def takes_pooled(choice: NetworkChoice) -> bool:
    """Whether a network is told one vector of the caption besides its tokens, as the MMDiT of SD3 is."""
    return isinstance(choice, dict) and bool(choice.get("pooled_width") or choice.get("pooled_projection_dim"))


def read_initial_network(folder: str, needed: NeededFields) -> NetworkConfig:
    """Read the network to start from; at another resolution it resizes its positions by itself."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise AtollError(f"{folder} has no config.json; expected a network as atoll convert or atoll train write it")
    network = read_network(json.loads(file.read_text(encoding="utf-8")))
    given = network.to_dict()
    for key in ("channels", "text_width", "num_classes"):
        if key in given and given[key] != needed.get(key, 0):
            raise AtollError(f"{file}: {key} is {given[key]}, this run's data needs {needed.get(key, 0)}")
    return network
