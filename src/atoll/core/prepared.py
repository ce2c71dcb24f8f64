"""The settings that the data of a run was prepared with, from the manifests of its artifacts."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact, to_json
from atoll.core.config import Config
from atoll.core.config_sections import ClustersSection, TextSection
from atoll.core.errors import AtollError

READING = ("kind", "image", "caption", "label", "id", "split", "val_fraction")
"""Settings of `data` that say how the source is read."""
_RECORDED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (layout.INGEST, "data", (*READING, "caption_lines", "resolution", "chunk", "buckets", "max_upscale")),
    (layout.FEATURES, "features", ("model", "resolution", "batch_size")),
    (layout.PATCHES, "features", ("patch_dimensions",)),
    (layout.CLUSTERS, "clusters", tuple(ClustersSection.model_fields)),
    (layout.LATENTS, "latents", ("autoencoder", "batch_size", "dtype")),
    (layout.TEXT, "text", tuple(TextSection.model_fields)),
    (layout.shards(0), "data", ("shard_rows", "flip")),
    (layout.shards(0), "latents", ("normalization",)),
)
"""The artifacts that record settings in their inputs, with section and names of the settings."""
_ABSENT = {"caption_lines": False, "patch_dimensions": 0}
"""Settings that are recorded only if they have another value."""


def check_overrides(run: Path, config: Config, overrides: Iterable[str]) -> None:
    """Raise an error if an override asks for other data than the prepared data: training would ignore it.

    `data.source` is not checked, because data may have moved since.
    """
    if not layout.shard_folders(run):
        return
    # Shards that were copied without the stages before them were made with the settings that came with them.
    copied = configuration.load(run) if Artifact(run, layout.INGEST).manifest() is None else None
    for key in overrides:
        for artifact, section, names in _RECORDED:
            name = key.removeprefix(f"{section}.").split(".")[0]
            if not key.startswith(f"{section}.") or name not in names:
                continue
            manifest, wanted = Artifact(run, artifact).manifest(), _plain(config, section, name)
            inputs: Any = manifest.made_from if manifest else {}
            if copied is not None:
                found = _plain(copied, section, name)
            else:
                inputs = inputs.get(section, {}) if section == "clusters" else inputs
                recorded = "dimensions" if name == "patch_dimensions" else name
                # Other settings that are not recorded have no effect, such as those of a stage that is not needed.
                found = inputs.get(recorded, _ABSENT.get(name, wanted))
            if found != wanted:
                raise AtollError(
                    f"--{key}: the data of {run} was prepared with {json.dumps(found)}, so training cannot use "
                    f"{json.dumps(wanted)}. Leave the option out, or prepare another run with it"
                )


def _plain(config: Config, section: str, name: str) -> object:
    """Return a setting as it is recorded: tuples are lists, for example."""
    return json.loads(to_json(getattr(getattr(config, section), name)))
