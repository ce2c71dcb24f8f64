"""Sets of generated images, stored in the run so that any metric can be computed from them later.

evaluation/generated/experts-top-2-metrics-0123456789/
    000000.safetensors    images (N, H, W, 3) of 8 bits, in runs with several sizes images.WxH of each; expert use by
                          time; seconds
    prompts.json          prompt, class and cluster of each image
    sheet.png             contact sheet of the first images
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor

from atoll.apps.evaluate.cache import keyed
from atoll.apps.evaluate.models import EvaluatedModel
from atoll.apps.evaluate.results import ExpertUse, Protocol
from atoll.core.artifacts import Artifact, ArtifactKind, Content, to_json
from atoll.core.distributed import DistContext
from atoll.core.errors import AtollError
from atoll.core.names import Split
from atoll.core.options import LoadOptions
from atoll.core.progress import say
from atoll.core.sizes import Size
from atoll.data.chunks import Chunks
from atoll.data.dataset import Shards
from atoll.data.images import sheet
from atoll.data.shuffle import shuffled
from atoll.encoders.pretrained import Pixels
from atoll.ensemble import Sampler, Samples, SampleSettings
from atoll.flow import rng


class GeneratedContent(Content):
    """The manifest of a set of generated images."""

    rows: int
    seconds: float


Value = TypeVar("Value")
GENERATED = ArtifactKind("generated images", GeneratedContent)
# Images per file, the unit that is stored and resumed. It is part of the results: every chunk has its own noise seed.
CHUNK = 256
# An 8 x 8 contact sheet.
SHEET = 64


@dataclass(frozen=True)
class Prompts:
    """The prompts of a set: captions or classes of real images, with the clusters of these images."""

    captions: list[str] | None
    labels: list[int] | None
    clusters: list[int]
    sizes: list[str] | None = None
    """Size of the latents of each of these images (WIDTHxHEIGHT); None in a run with one size."""

    def __len__(self) -> int:
        return len(self.clusters)

    def plain(self) -> dict[str, object]:
        """Return plain values for JSON; sizes are omitted if there is one."""
        return {key: value for key, value in asdict(self).items() if key != "sizes" or value is not None}

    def part(self, rows: Sequence[int]) -> "Prompts":
        """Return some of the prompts."""

        def some(values: list[Value] | None) -> list[Value] | None:
            return None if values is None else [values[row] for row in rows]

        return Prompts(some(self.captions), some(self.labels), some(self.clusters) or [], some(self.sizes))

    def repeated(self, times: int) -> "Prompts":
        """Return the prompts, each `times` times in a row."""
        return self.part([row for row in range(len(self)) for _ in range(times)])

    def by_size(self) -> dict[Size | None, list[int]]:
        """Return the rows of each size of the latents; None is the only size of a run."""
        if self.sizes is None:
            return {None: list(range(len(self)))}
        found: dict[Size | None, list[int]] = {Size.parse(size): [] for size in sorted(set(self.sizes))}
        for row, size in enumerate(self.sizes):
            found[Size.parse(size)].append(row)
        return found


def prompts_of(run: Path, clusters: int, count: int, *, seed: int = 0, split: Split = "validation") -> Prompts:
    """Return `count` prompts from a split, divided over the clusters in proportion to their training images.

    Clusters with too few images repeat prompts, with different noise. Clusters without images are left out.
    """
    opened = [Shards.open(run, [cluster], split) for cluster in range(clusters)]
    empty = [cluster for cluster, shards in enumerate(opened) if not len(shards)]
    if len(empty) == clusters:
        raise AtollError(
            f"the {split} split has no images to take prompts from; raise data.val_fraction or use --prompts train"
        )
    if empty:
        say(f"no prompts for cluster {', '.join(map(str, empty))}: it has no {split} images")
    trained = Shards.open(run, list(range(clusters))).cluster_sizes()
    wanted = shares([0 if cluster in empty else size for cluster, size in enumerate(trained)], count)
    found: list[tuple[str, int, int, str]] = []  # caption, label, cluster and size
    for cluster, (shards, many) in enumerate(zip(opened, wanted, strict=True)):
        if not many:
            continue
        numbers = np.arange(many, dtype=np.uint64) % np.uint64(len(shards))
        rows = shuffled(numbers, len(shards), seed, epoch=cluster).astype(np.int64)
        captions, about = shards.captions(rows.tolist()), [(0, "")] * many
        # A batch of the reader has one size, so the rows are read size by size and put back into their order.
        for size, own in shards.by_size(rows).items():
            for row, label in zip(own, shards.read(rows[own]).label.tolist(), strict=True):
                about[row] = (label, str(size))
        found += [(captions[i] or "", label, cluster, size) for i, (label, size) in enumerate(about)]
    # Shuffle over the clusters, so that any first part of the set (a chunk, the contact sheet) has all of them.
    order = shuffled(np.arange(count, dtype=np.uint64), count, seed, epoch=clusters).astype(np.int64)
    data = opened[0].content
    captions, labels, owners, sizes = (list(column) for column in zip(*(found[i] for i in order), strict=True))
    return Prompts(
        captions if data.text else None, labels if data.labels else None, owners, sizes if data.latents.sizes else None
    )


def shares(sizes: list[int], count: int) -> list[int]:
    """Divide `count` in the proportions of `sizes` into whole numbers, by the largest-remainder method."""
    exact = [count * size / sum(sizes) for size in sizes]
    whole = [int(share) for share in exact]
    left = sorted(range(len(sizes)), key=lambda i: whole[i] - exact[i])
    for i in left[: count - sum(whole)]:
        whole[i] += 1
    return whole


@dataclass(frozen=True)
class GeneratedSet:
    """A finished set of generated images."""

    label: str
    artifact: Artifact
    prompts: Prompts

    def seconds(self) -> float:
        """Return how long it took to generate all images."""
        return self.artifact.read(GENERATED).seconds

    def digest(self) -> str:
        """Return the digest of the set."""
        return self.artifact.open(GENERATED).digest

    def protocol(self, **measured: Any) -> Protocol:
        """Return how the images were generated and, in `measured`, compared: the protocol of a metric."""
        made_from = self.artifact.open(GENERATED).made_from
        how = {**made_from["settings"], **measured}
        return Protocol(model=made_from["model"], num_images=len(self), set=self.artifact.name, **how)

    def __len__(self) -> int:
        return len(self.prompts)

    def chunks(self) -> Iterator[list[Pixels]]:
        """Yield the images (H, W, 3), `CHUNK` at a time."""
        for chunk, file in enumerate(self._files()):
            yield stored_images(file, self.prompts.part(_rows(self.prompts, chunk)))

    def use(self) -> ExpertUse | None:
        """Return the use of the experts, averaged over the images; None for a dense model."""
        stored = [_read(file, ("t", "weights", "lead", "active")) for file in self._files()]
        if "t" not in stored[0]:
            return None
        weights, lead, active = (
            torch.stack([part[key] for part in stored]).sum(0) / len(self) for key in ("weights", "lead", "active")
        )
        return ExpertUse(
            t=stored[0]["t"].tolist(),
            weight=weights.tolist(),
            lead_share=lead.tolist(),
            active=active.tolist(),
            mean_lead_share=lead.mean(0).tolist(),
            mean_active=active.mean().item(),
        )

    def _files(self) -> list[Path]:
        # Chunk files have numbers as names; prompts.json and sheet.png do not.
        return [self.artifact.path(file) for file in sorted(self.artifact.open(GENERATED).files) if file[0].isdecimal()]


def generate(
    model: EvaluatedModel,
    prompts: Prompts,
    settings: SampleSettings,
    *,
    purpose: str,
    batch_size: int,
    load: LoadOptions,
    processes: DistContext,
) -> GeneratedSet:
    """Generate a set of images, or open it if it exists. If interrupted, it resumes with the next missing chunks.

    Several processes share the chunks. A chunk has its own noise, so its images do not depend on the process.
    """
    plain = {key: value for key, value in asdict(settings).items() if key != "routing" or model.routing}
    # Classifier-free guidance is left out: the name of a set does not depend on a setting that it does not use.
    plain = {key: value for key, value in plain.items() if (key, value) != ("guidance", "classifier-free")}
    plain["dtype"] = load.precision
    made_from = {"model": model.model, "networks": model.digests(), "settings": plain, "prompts": prompts.plain()}
    artifact = keyed(model.run, "generated", f"{model.label} {purpose}", made_from=made_from)
    # The manifest names the file instead of repeating thousands of prompts. The folder name has the hash of all.
    short = {**made_from, "prompts": f"{len(prompts)} in prompts.json"}
    chunks = Chunks(artifact, len(prompts), CHUNK)

    def begin() -> list[int]:
        if artifact.begin(GENERATED, short) is not None:
            return []
        artifact.write("prompts.json", to_json(prompts.plain()))
        return chunks.missing()

    def generate_share() -> None:
        mine = missing[processes.rank :: processes.size]
        sampler = model.open(load)
        # Load the experts and run one step before timing, so that `seconds` excludes opening and warming up.
        for number in range(len(sampler.ensemble.references)) if load.max_loaded_experts is None else ():
            sampler.ensemble.cache.get(number)
        for _ in sample_by_size(sampler, prompts.part([0]), replace(settings, steps=1), batch_size=batch_size):
            pass
        for chunk in mine:
            say(f"{model.label}: generating images for {purpose}, {chunk * CHUNK:,} of {len(prompts):,}")
            part = prompts.part(_rows(prompts, chunk))
            # The seed depends on the chunk and on no model, so every model and routing starts from the same noise.
            # The shift by 33 leaves 31 of the 64 bits: a positive seed for any generator.
            own = replace(settings, seed=rng.key(settings.seed, rng.Stream.EVALUATION_SEED, chunk) >> 33)
            found: dict[str, Tensor] = {}
            start = time.perf_counter()
            for size, samples in sample_by_size(sampler, part, own, batch_size=batch_size):
                found[stored_name(size)] = torch.from_numpy(np.stack([np.asarray(image) for image in samples.images]))
                if samples.trace is None:
                    continue
                # Sums over the images at every evaluation: weights, largest weights and running experts
                weights = samples.trace.weights.double()  # (evaluations, images, experts)
                lead = torch.nn.functional.one_hot(weights.argmax(-1), weights.shape[-1]).double()
                sums = {"weights": weights.sum(1), "lead": lead.sum(1), "active": (weights > 0).double().sum((1, 2))}
                found["t"] = samples.trace.t
                found |= {name: found[name] + value if name in found else value for name, value in sums.items()}
            found["seconds"] = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            artifact.write_tensors(chunks.file(chunk), found)

    def commit() -> None:
        if artifact.manifest() is not None:
            return
        files = [artifact.path(chunks.file(chunk)) for chunk in range(chunks.count)]
        first = stored_images(files[0], prompts.part(_rows(prompts, 0)))[:SHEET]
        with artifact.writing("sheet.png") as path:
            sheet([Image.fromarray(image) for image in first]).save(path, format="PNG")
        seconds = sum(float(_read(file, ("seconds",))["seconds"]) for file in files)
        artifact.commit(GeneratedContent(rows=chunks.rows, seconds=seconds))

    if missing := processes.on_main(begin):
        processes.on_all(generate_share)
    processes.on_main(commit)
    return GeneratedSet(model.label, artifact, prompts)


def sample_by_size(
    sampler: Sampler, prompts: Prompts, settings: SampleSettings, *, batch_size: int
) -> Iterator[tuple[Size | None, Samples]]:
    """Yield the images of each size of the latents (None is the only one), in the order of `Prompts.by_size`."""
    factor, first = sampler.encoders.autoencoder().factor, 0
    conditioning = sampler.ensemble.conditioning
    trace = len(sampler.ensemble.references) > 1
    for size, rows in prompts.by_size().items():
        own = prompts.part(rows)
        labels = own.labels if "label" in conditioning else None
        pixels = None if size is None else Size(factor * size.height, factor * size.width)
        # Each image has its own position, and so its own noise, whatever its size.
        samples = sampler.generate(
            own.captions, label=labels, cluster=own.clusters, num_images=len(own), first=first,
            batch_size=batch_size, trace=trace, settings=settings, **({} if pixels is None else vars(pixels)),
        )  # fmt: skip
        yield size, samples
        first += len(own)


def _rows(prompts: Prompts, chunk: int) -> range:
    return range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(prompts)))


def stored_name(size: Size | None) -> str:
    """Return the name of the tensor of the images of one size."""
    return "images" if size is None else f"images.{size}"


def stored_images(file: Path, prompts: Prompts) -> list[Pixels]:
    """Read the images of a chunk, in the order of its prompts."""
    found: dict[int, Pixels] = {}
    for size, rows in prompts.by_size().items():
        found |= dict(zip(rows, _read(file, (stored_name(size),))[stored_name(size)].numpy(), strict=True))
    return [found[row] for row in sorted(found)]


def rows_by_size(compute: Callable[[Pixels, list[int]], Tensor], images: Sequence[Pixels]) -> Tensor:
    """Compute rows (N, …) of images that may have several sizes; images of one size are computed together.

    `compute` gets images (n, H, W, 3) and their indices.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, image in enumerate(images):
        groups.setdefault(image.shape, []).append(index)
    parts = [compute(np.stack([images[index] for index in own]), own) for own in groups.values()]
    return torch.cat(parts)[torch.tensor([index for own in groups.values() for index in own]).argsort()]


def _read(file: Path, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Read those of the named tensors that a file has, and no others."""
    with safe_open(file, framework="pt") as stored:
        return {name: stored.get_tensor(name) for name in names if name in stored.keys()}  # noqa: SIM118
