"""Where evaluation keeps what it made: `RUN/evaluation/GROUP/LABEL-HASH`, one artifact for each set of settings.

The hash is of everything the artifact is made from, so metrics under other settings stand beside each other, none is
ever stale, and the same command finds what is there and makes what is missing.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from atoll.core import layout
from atoll.core.artifacts import Artifact, Content, Kind, to_json
from atoll.evaluate.results import plain

ROOM = layout.EVALUATION
FIGURES = "figures.json"
METRICS = Kind("figures", Content)
"""Metrics are in the file: they differ from evaluation to evaluation."""
T = TypeVar("T")


def keyed(run: Path, group: str, label: str, *, made_from: Mapping[str, object]) -> Artifact:
    """The artifact for these settings; `label` is for people."""
    name = re.sub(r"[^A-Za-z0-9.@]+", "-", label).strip("-")[:60]
    digest = hashlib.sha256(to_json(made_from)).hexdigest()[:10]
    return Artifact(run, f"{ROOM}/{group}/{name}-{digest}")


def cached(
    run: Path, group: str, label: str, *, made_from: Mapping[str, object], result: type[T], compute: Callable[[], T]
) -> T:
    """Return metrics that are computed once and kept: `figures.json` of an artifact."""
    artifact, parser = keyed(run, group, label, made_from=made_from), TypeAdapter(result)
    if artifact.begin(METRICS, made_from) is not None:
        try:
            return parser.validate_python(artifact.read_json(FIGURES))
        except ValidationError:  # another version of Atoll stored it with other fields
            shutil.rmtree(artifact.folder)
            artifact.begin(METRICS, made_from)
    artifact.write(FIGURES, to_json(plain(compute())))
    artifact.commit(Content())
    # Not the computed value: JSON sorts its keys, and the first time shall give what every later one gives.
    return parser.validate_python(artifact.read_json(FIGURES))
