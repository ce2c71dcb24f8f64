"""The shared settings of a run: the part of atoll.yaml that is written to a store and accepted from one.

`atoll join` and `atoll pull` read settings that somebody else wrote. So only the keys in `SHARED` are exchanged: those
that determine the trained networks. Settings of a machine (location of the data, `island`, trackers, threads) stay
local. Settings from a store are refused if they have other keys, a path, or a number so large that building or training
the described network would exhaust the machine.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from atoll.core import config as configuration
from atoll.core.config import Config, PlainLoader
from atoll.core.config_sections import StudentSection, TrainSection
from atoll.core.errors import AtollError
from atoll.core.networks import BASE, CLASS, LOCAL
from atoll.encoders.hub import public_name
from atoll.verify.untrusted import LIMITS, Refused, check_bounded

SHARED: Mapping[str, frozenset[str] | None] = {
    "preset": None,
    "data": frozenset(
        {"kind", "split", "val_fraction", "resolution", "buckets", "max_upscale", "flip", "chunk", "shard_rows"}
    ),
    "features": None,
    "clusters": None,
    "latents": None,
    "text": None,
    "experts": None,
    "networks": None,
    "train": frozenset(TrainSection.model_fields) - {"init_from", "trackers", "workers"},
    "shared_start": None,
    "router": None,
    "monolith": None,
    "student": frozenset(StudentSection.model_fields) - {"init_from"},
}
"""The shared sections, each with its shared keys; None stands for all keys."""
NAMES = (("features", "model"), ("latents", "autoencoder"), ("text", "encoder"))
"""Keys that hold the name of a model on the hub, or a folder. A local folder is written to the store as `local`."""
_NAME = re.compile(r"(base:)?[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

MAX_BYTES = 1 << 16
"""Maximum size of the settings, in bytes. With 512 experts and one objective each they take 20 kB."""
# The limits are orders of magnitude above the largest published run (DDM with 24 B parameters: 10^9 images seen, batch
# size 2,048, 8 experts), and below values that would exhaust a machine before anybody notices.
_LIMITS = {
    **LIMITS,
    **dict.fromkeys(
        ("total_images", "warmup_images", "save_every", "log_every", "validate_every", "sample_every", "sample_rows"),
        10**12,
    ),
    **dict.fromkeys(("batch_size", "chunk", "shard_rows", "block"), 1 << 20),
    "seed": 2**63,
    "count": 4096,
    "sample_count": 1024,
}
"""Maximum values of numbers, by key, besides those of networks."""
MAX_FACTOR = 4
"""Images and batch size that a contributor may choose, divided by those of the run. A choice: room for experiments, but
whoever takes over an expert does not train for years, or with more memory than they have."""
_MAX_EMAS = 8  # each EMA is one more copy of the weights in memory


def shared_part(config: Config) -> bytes:
    """Return the shared settings of a run as YAML; equal configurations give equal bytes.

    Raise an error if `train.init_from` is set: other machines cannot read that folder and would silently start from
    other weights.
    """
    if config.train.init_from is not None:
        raise AtollError(
            f"train.init_from is {config.train.init_from}, a folder of this machine, and contributors would start from "
            "other weights; share a run without it, or share the finished model with atoll export"
        )
    included = {section: True if keys is None else set(keys) for section, keys in SHARED.items()}
    values = config.model_dump(mode="json", include=included)
    for section, key in NAMES:
        values[section][key] = public_name(values[section][key])
    for network in values["networks"].values():
        if isinstance(network, dict) and CLASS in network:
            raise AtollError(f"networks: {network[CLASS]} is code outside Atoll, which a shared run cannot have")
        if isinstance(network, dict) and "base" in network:
            network["base"] = public_name(network["base"])
    return yaml.safe_dump(values, sort_keys=True).encode()


def not_shared(config: Config) -> list[str]:
    """Return the settings that differ from their defaults and stay on this machine."""
    shared = yaml.safe_load(shared_part(config))
    changed = config.model_dump(mode="json", exclude_defaults=True)
    names: list[str] = []
    for section, values in changed.items():
        if section not in SHARED:
            names.append(section)
        elif section == "networks":
            names += [f"networks.{key}.base" for key, value in values.items() if shared[section][key] != value]
        elif isinstance(values, dict) and section != "experts":
            own = {key: value for key, value in values.items() if not str(value).startswith(BASE)}
            names += [f"{section}.{key}" for key, value in own.items() if shared[section].get(key) != value]
    return names


def read_shared(data: bytes, source: str) -> Config:
    """Parse and check the settings of a run that somebody else wrote."""
    if len(data) > MAX_BYTES:
        raise Refused(f"{source} has {len(data):,} bytes; the limit is {MAX_BYTES:,}")
    try:
        values = yaml.load(data.decode("utf-8"), PlainLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise Refused(f"{source} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise Refused(f"{source} is not a mapping of settings")
    for section, content in values.items():
        _check_section(section, content, source)
    return configuration.resolve(values, source=source)


def check_choice(config: Config, run: Config) -> None:
    """Refuse settings of a contributor beyond the limits of shared settings, or far beyond those of the run."""
    read_shared(shared_part(config), "the choice of a contributor")
    for key in ("total_images", "batch_size"):
        value, limit = getattr(config.train, key), MAX_FACTOR * getattr(run.train, key)
        if value > limit:
            raise Refused(f"train.{key} is {value:,}; a contributor may choose {MAX_FACTOR} times that of the run")


def _check_section(section: object, content: Any, source: str) -> None:
    """Refuse keys that are not shared, paths, and numbers above their limits."""
    if not isinstance(section, str) or section not in SHARED:
        raise Refused(f"{source} sets {str(section)[:40]!r}, which belongs to a machine and not to a shared run")
    allowed = SHARED[section]
    for key, value in content.items() if isinstance(content, dict) else ():
        where = f"{section}.{str(key)[:40]}"
        if allowed is not None and key not in allowed:
            raise Refused(f"{source} sets {where}, which belongs to a machine and not to a shared run")
        if (section, key) in NAMES and not (isinstance(value, str) and _NAME.fullmatch(value)):
            raise Refused(f"{source}: {where} is {str(value)[:80]!r}; expected a name, not a path")
        base = value.get("base", LOCAL) if section == "networks" and isinstance(value, dict) else LOCAL
        if not (isinstance(base, str) and _NAME.fullmatch(base)):
            raise Refused(f"{source}: {where}.base is {str(base)[:80]!r}; expected a name, not a path")
        if isinstance(value, dict) and CLASS in value:
            raise Refused(f"{source}: {where} names a class outside Atoll, which a shared run cannot have")
        if key == "ema" and isinstance(value, dict):
            if len(value) > _MAX_EMAS:
                raise Refused(f"{source}: {where} has {len(value)} entries; the limit for a shared run is {_MAX_EMAS}")
            for half_life in value.values():
                check_bounded(half_life, "total_images", _LIMITS)
        else:
            check_bounded(value, where, _LIMITS)
