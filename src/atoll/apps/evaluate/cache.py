"""The cache of an evaluation: one artifact `RUN/evaluation/GROUP/LABEL-HASH` for each set of settings.

The hash covers everything the artifact is made from. Results under other settings therefore get other folders, a cached
result is never stale, and running the same command again computes only what is missing.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from atoll.apps.evaluate.results import plain
from atoll.core import layout
from atoll.core.artifacts import Artifact, ArtifactKind, Content, to_json

METRICS_FILE = "metrics.json"
# The manifest declares no fields: each metric has different ones, and they are in METRICS_FILE.
METRICS = ArtifactKind("metrics", Content)
T = TypeVar("T")


def keyed(run: Path, group: str, label: str, *, made_from: Mapping[str, object]) -> Artifact:
    """Return the artifact for these settings; `label` only makes its folder name readable."""
    # 60 characters keep the folder name far below the 255 bytes of common file systems. Ten hexadecimal digits are 40
    # bits: among 10,000 cached results a collision has a probability of 5e-5, and `Artifact.begin` would report it,
    # because it compares `made_from` itself.
    name = re.sub(r"[^A-Za-z0-9.@]+", "-", label).strip("-")[:60]
    digest = hashlib.sha256(to_json(made_from)).hexdigest()[:10]
    return Artifact(run, f"{layout.EVALUATION}/{group}/{name}-{digest}")


def cached(
    run: Path, group: str, label: str, *, made_from: Mapping[str, object], result: type[T], compute: Callable[[], T]
) -> T:
    """Return a result from the cache, or compute and store it."""
    artifact, parser = keyed(run, group, label, made_from=made_from), TypeAdapter(result)
    if artifact.begin(METRICS, made_from) is not None:
        try:
            return parser.validate_python(artifact.read_json(METRICS_FILE))
        except ValidationError:  # another version of Atoll stored it with other fields
            shutil.rmtree(artifact.folder)
            artifact.begin(METRICS, made_from)
    artifact.write(METRICS_FILE, to_json(plain(compute())))
    artifact.commit(Content())
    # Read the file instead of returning the computed value: JSON sorts the keys, and the first call must return the
    # same as every later one.
    return parser.validate_python(artifact.read_json(METRICS_FILE))
