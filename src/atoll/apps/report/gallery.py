"""The images of the report: a few prompts, and the images of every model for them, from the same noise.

The images of each model are an artifact below `RUN/evaluation/gallery`, so writing the report again samples nothing.
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

from atoll.apps.evaluate.cache import keyed
from atoll.apps.evaluate.generated import Prompts, sample_by_size, stored_images, stored_name
from atoll.apps.evaluate.models import EvaluatedModel
from atoll.core.artifacts import ArtifactKind, Content
from atoll.core.errors import AtollError
from atoll.core.names import Split
from atoll.core.options import LoadOptions
from atoll.core.sizes import Size
from atoll.data.dataset import Shards
from atoll.data.shuffle import shuffled
from atoll.encoders.encoders import Encoders
from atoll.ensemble import SampleSettings, parse
from atoll.nets.conditioning import OF_PROMPTS

GALLERY = ArtifactKind("gallery", Content)
FILE = "images.safetensors"
BATCH = 64
"""Images of one batch, as in `Sampler.generate`."""
SPLITS: tuple[Split, ...] = ("train", "validation")
# The autoencoder is opened once for all examples.
_codec = cache(lambda latents, run: Encoders.of(latents, None, run=run).autoencoder())
# Examples of each cluster if no prompts are given: with eight clusters 24 columns, which still fit a page.
EXAMPLES_PER_CLUSTER = {"train": 2, "validation": 1}


@dataclass(frozen=True, eq=False)
class Example:
    """One column of the gallery: a prompt, and the real image with this caption if there is one."""

    prompt: str
    cluster: int | None = None
    split: str | None = None
    real: Image.Image | None = None
    label: int | None = None
    size: str | None = None
    """Size of the latent of its real image (WIDTHxHEIGHT), or the default; None in a run with one size."""


@dataclass(frozen=True, eq=False)
class GalleryRow:
    """One row of the gallery: the images of one model for all examples."""

    model: EvaluatedModel
    images: list[Image.Image]
    t: Tensor | None = None
    probabilities: Tensor | None = None
    """The router's probabilities (evaluations, examples, experts); None for a model without a router."""


def choose_examples(run: Path, clusters: int, prompts: Sequence[str]) -> list[Example]:
    """Return examples for the given prompts, or a few of every cluster, some of them held out."""
    if prompts:
        return [_given(run, clusters, prompt) for prompt in prompts]
    found = []
    for cluster in range(clusters):
        for split in SPLITS:
            shards = Shards.open(run, [cluster], split)
            count = min(EXAMPLES_PER_CLUSTER[split], len(shards))
            if count:
                rows = shuffled(np.arange(count, dtype=np.uint64), len(shards), 0, epoch=cluster)
                found += [_example(shards, int(row), cluster, split=split) for row in rows]
    return found


def _given(run: Path, clusters: int, prompt: str) -> Example:
    """Return the example of a given prompt, with its real image if the prompt is a caption of the data."""
    for split in SPLITS:
        for cluster in range(clusters):
            shards = Shards.open(run, [cluster], split)
            captions = shards.captions() if len(shards) else []
            if prompt in captions:
                return _example(shards, captions.index(prompt), cluster, split=split)
    content = shards.content
    classes, size = content.labels, str(shards.sizes[0]) if content.latents.sizes else None
    return Example(prompt, label=classes.index(prompt) if prompt in classes else None, size=size)


def _example(shards: Shards, row: int, cluster: int, *, split: str) -> Example:
    # The shards hold latents, so the real image is a decoded latent. It has the losses of the autoencoder, which the
    # generated images share.
    batch = shards.read(np.array([row]))
    codec = _codec(shards.content.latents, shards.artifacts[0].run)
    real = Image.fromarray(codec.decode(batch.mean.float())[0].cpu().numpy())
    label, names = int(batch.label[0]), shards.content.labels
    caption = shards.captions([row])[0] if shards.content.text else None
    prompt = caption or (names[label] if names else "unconditional")
    size = str(Size(*batch.mean.shape[2:])) if shards.content.latents.sizes else None
    return Example(prompt, cluster, split, real, label if names else None, size)


@dataclass(frozen=True)
class Gallery:
    """Rows of images for the same examples, with the same settings and from the same noise."""

    examples: list[Example]
    settings: SampleSettings

    @cached_property
    def prompts(self) -> Prompts:
        """The examples as prompts."""
        captions = [example.prompt for example in self.examples]
        labels = [example.label for example in self.examples if example.label is not None]
        # Only the routing `oracle` uses the cluster, so 0 serves for an example without one.
        clusters = [example.cluster or 0 for example in self.examples]
        sizes = [example.size for example in self.examples if example.size is not None]
        return Prompts(captions, labels if len(labels) == len(captions) else None, clusters, sizes or None)

    def row(self, model: EvaluatedModel) -> GalleryRow:
        """Return the images of one model, sampled now or before."""
        settings = replace(self.settings, routing=model.routing or "top-1")
        made_from = {"networks": model.digests(), "settings": asdict(settings), "prompts": self.prompts.plain()}
        artifact = keyed(model.run, "gallery", model.label, made_from=made_from)
        if artifact.begin(GALLERY, made_from) is None:
            print(f"sampling images of {model.label}", flush=True)
            artifact.write_tensors(FILE, self._sample(model, settings))
            artifact.commit(Content())
        stored = load_file(artifact.path(FILE))
        images = [Image.fromarray(image) for image in stored_images(artifact.path(FILE), self.prompts)]
        return GalleryRow(model, images, stored.get("t"), stored.get("probabilities"))

    def _sample(self, model: EvaluatedModel, settings: SampleSettings) -> dict[str, Tensor]:
        prompts = self.prompts
        if model.model.startswith("expert:"):
            # The experts are in memory already. The oracle routing with the cluster of this expert for every image runs
            # this expert alone, without opening it again.
            number = int(model.model.removeprefix("expert:"))
            model, settings = EvaluatedModel(model.run, "experts", "oracle"), replace(settings, routing="oracle")
            prompts = replace(prompts, clusters=[number] * len(prompts))
        sampler, rules = model.open(LoadOptions()), parse(settings.routing).rules
        conditioning = sampler.ensemble.conditioning
        if not conditioning & OF_PROMPTS:
            prompts = replace(prompts, captions=None)
        known = prompts.captions or (prompts.labels if "label" in conditioning else None)
        if known is None and any(example.real is None for example in self.examples):
            if "label" in conditioning:
                raise AtollError("--prompts: the model is conditioned on classes, and not all of these are classes")
            raise AtollError("--prompts: the model is unconditional; leave --prompts out")
        # `nearest` and `oracle` have no router probabilities, and `drawn` and `once` only those of the first step.
        routed = all(rule.source == "router" and not rule.keeps for rule in rules)
        found, order = {}, []
        traces = []
        for size, samples in sample_by_size(sampler, prompts, settings, batch_size=BATCH):
            found[stored_name(size)] = torch.from_numpy(np.stack([np.asarray(image) for image in samples.images]))
            order += prompts.by_size()[size]
            traces += [samples.trace] if samples.trace is not None and routed else []
        if traces:
            probabilities = torch.cat([trace.probabilities.float() for trace in traces], dim=1)
            found |= {"t": traces[0].t, "probabilities": probabilities[:, torch.tensor(order).argsort()]}
        return found
