"""Where evaluation keeps what it made: `RUN/evaluation/GROUP/LABEL-HASH`, one artifact for each set of settings.

The hash is of everything the artifact is made from, so figures under other settings stand beside each other, none is
ever stale, and the same command finds what is there and makes what is missing.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from atoll.core import layout
from atoll.core.artifacts import Artifact, Content, Kind, to_json

ROOM = layout.EVALUATION
FIGURES = "figures.json"
METRICS = Kind("figures", Content)
"""Metrics are in the file: they differ from evaluation to evaluation."""


def keyed(run: Path, group: str, label: str, *, made_from: Mapping[str, Any]) -> Artifact:
    """The artifact for these settings; `label` is for people."""
    name = re.sub(r"[^A-Za-z0-9.@]+", "-", label).strip("-")[:60]
    digest = hashlib.sha256(to_json(made_from)).hexdigest()[:10]
    return Artifact(run, f"{ROOM}/{group}/{name}-{digest}")


def figures(
    run: Path, group: str, label: str, *, made_from: Mapping[str, Any], compute: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Figures that are computed once and kept: `figures.json` of an artifact."""
    artifact = keyed(run, group, label, made_from=made_from)
    if artifact.begin(METRICS, made_from) is None:
        artifact.write(FIGURES, to_json(compute()))
        artifact.commit(Content())
    read: dict[str, Any] = artifact.read_json(FIGURES)
    return read
