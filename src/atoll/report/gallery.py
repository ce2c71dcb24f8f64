"""The pictures of the report: a few prompts, and what every model of the run makes of them from the same noise.

Each model's pictures are an artifact below `RUN/evaluation/showcase`, so the same report again draws nothing.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from atoll.core.artifacts import Content, Kind
from atoll.core.errors import AtollError
from atoll.data.dataset import Shards
from atoll.data.shuffle import shuffled
from atoll.data.stages.latents import open_codec
from atoll.ensemble import Settings, parse
from atoll.evaluate.cache import keyed
from atoll.evaluate.generated import Prompts
from atoll.evaluate.models import Subject
from atoll.evaluate.results import Split

GALLERY = Kind("showcase", Content)
FILE = "pictures.safetensors"
SPLITS: tuple[Split, ...] = ("train", "held-out")
_codec = cache(open_codec)
OF_EACH = {"train": 2, "held-out": 1}
"""Examples of each cluster, if nobody says which."""


@dataclass(frozen=True, eq=False)
class Example:
    """One column of the report: what is asked for, and the real picture with that caption, if there is one."""

    told: str
    cluster: int | None = None
    split: str | None = None
    real: Image.Image | None = None
    label: int | None = None


@dataclass(frozen=True, eq=False)
class Strip:
    """What one model makes of the examples."""

    subject: Subject
    pictures: list[Image.Image]
    t: Tensor | None = None
    probabilities: Tensor | None = None
    """The router's (evaluations, examples, experts); None for a model that does not route."""


def choose(run: Path, clusters: int, prompts: Sequence[str]) -> list[Example]:
    """Examples for the given prompts, or a few of every cluster, some of which no training has seen."""
    return [_wanted(run, clusters, prompt) for prompt in prompts] if prompts else _some(run, clusters)


def _wanted(run: Path, clusters: int, prompt: str) -> Example:
    """A given prompt, with its picture if it is the caption of one."""
    for split in SPLITS:
        for cluster in range(clusters):
            shards = Shards.open(run, [cluster], split)
            captions = shards.captions() if len(shards) else []
            if prompt in captions:
                return _example(shards, captions.index(prompt), cluster, split=split)
    classes = shards.content.labels
    return Example(prompt, label=classes.index(prompt) if prompt in classes else None)


def _some(run: Path, clusters: int) -> list[Example]:
    found = []
    for cluster in range(clusters):
        for split in SPLITS:
            shards = Shards.open(run, [cluster], split)
            count = min(OF_EACH[split], len(shards))
            if count:
                rows = shuffled(np.arange(count, dtype=np.uint64), len(shards), 0, epoch=cluster)
                found += [_example(shards, int(row), cluster, split=split) for row in rows]
    return found


def _example(shards: Shards, row: int, cluster: int, *, split: str) -> Example:
    batch = shards.read(np.array([row]))
    codec = _codec(shards.content.latents.autoencoder)
    real = Image.fromarray(codec.decode(batch.mean.float())[0])
    label, names = int(batch.label[0]), shards.content.labels
    told = shards.captions([row])[0] if shards.content.text else None
    return Example(told or (names[label] if names else "anything"), cluster, split, real, label if names else None)


@dataclass(frozen=True)
class Showcase:
    """Draws strips of the same examples, under the same settings, from the same noise."""

    examples: list[Example]
    settings: Settings

    @cached_property
    def prompts(self) -> Prompts:
        """The examples as prompts; the cluster is for the oracle's routing only."""
        captions = [example.told for example in self.examples]
        labels = [example.label for example in self.examples if example.label is not None]
        clusters = [example.cluster or 0 for example in self.examples]
        return Prompts(captions, labels if len(labels) == len(captions) else None, clusters)

    def strip(self, subject: Subject) -> Strip:
        """The pictures of one model, drawn now or before."""
        settings = replace(self.settings, routing=subject.routing or "top-1")
        made_from = {"networks": subject.digests(), "settings": asdict(settings), "prompts": asdict(self.prompts)}
        artifact = keyed(subject.run, "showcase", subject.label, made_from=made_from)
        if artifact.begin(GALLERY, made_from) is None:
            print(f"pictures of {subject.label}", flush=True)
            artifact.write_tensors(FILE, self._draw(subject, settings))
            artifact.commit(Content())
        stored = load_file(artifact.path(FILE))
        pictures = [Image.fromarray(picture) for picture in stored["pictures"].numpy()]
        return Strip(subject, pictures, stored.get("t"), stored.get("probabilities"))

    def _draw(self, subject: Subject, settings: Settings) -> dict[str, Tensor]:
        told, clusters = self.prompts, self.prompts.clusters
        if subject.model.startswith("expert:"):
            # All experts are open already: the oracle is told that every picture belongs to this one's cluster.
            number = int(subject.model.removeprefix("expert:"))
            subject, settings = Subject(subject.run, "experts", "oracle"), replace(settings, routing="oracle")
            clusters = [number] * len(told)
        model, rules = subject.open(), parse(settings.routing).rules
        told_by = model.ensemble.conditioning
        labels = told.labels if "label" in told_by else None
        captions = told.captions if told_by & {"text", "pooled"} else None
        if captions is None and labels is None and any(example.real is None for example in self.examples):
            told_of = "classes" if "label" in told_by else "nothing"
            raise AtollError(f"--prompts: the model is told {told_of}, and these are none; leave them out")
        routed = subject.model == "experts" and len(model.ensemble.experts) > 1
        made = model.generate(
            captions, labels, len(told), clusters=clusters if routed else None, trace=routed, **asdict(settings)
        )
        found = {"pictures": torch.from_numpy(np.stack([np.asarray(image) for image in made.images]))}
        if made.trace is not None and all(rule.source == "router" and rule.name != "drawn" for rule in rules):
            found |= {"t": made.trace.t, "probabilities": made.trace.probabilities.float()}
        return found
