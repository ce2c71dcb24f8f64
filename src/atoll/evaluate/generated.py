"""Sets of generated images, stored in the run so that any metric can be computed from them later.

evaluation/generated/experts-top-2-metrics-0123456789/
    000000.safetensors    images (N, H, W, 3) of 8 bits; expert use by time; seconds
    prompts.json          prompt, class and cluster of each image
    sheet.png             contact sheet of the first images
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from atoll.core.artifacts import Artifact, Content, Kind, to_json
from atoll.core.errors import AtollError
from atoll.data.chunks import Chunks
from atoll.data.contact_sheet import sheet
from atoll.data.dataset import Shards
from atoll.data.shuffle import shuffled
from atoll.data.stages.ingest import Pixels
from atoll.ensemble import Sampler, Samples, Settings
from atoll.evaluate.cache import keyed
from atoll.evaluate.models import EvaluatedModel, LoadOptions
from atoll.evaluate.results import SampleProtocol, Split
from atoll.flow import rng
from atoll.train.distributed import DistContext


class GeneratedContent(Content):
    """The manifest of a set of generated images."""

    rows: int
    seconds: float


GENERATED = Kind("generated images", GeneratedContent)
# Images per file, the unit that is stored and resumed. It is part of the results: every chunk has its own noise seed.
CHUNK = 256
# An arbitrary number that no other random stream uses. Changing it changes all generated images.
SEED_STREAM = 31
# An 8 x 8 contact sheet.
SHEET = 64


@dataclass(frozen=True)
class Prompts:
    """The prompts of a set: captions or classes of real images, with the clusters of these images."""

    captions: list[str] | None
    labels: list[int] | None
    clusters: list[int]

    def __len__(self) -> int:
        return len(self.clusters)

    def part(self, rows: slice) -> "Prompts":
        """Return some of the prompts."""
        captions = None if self.captions is None else self.captions[rows]
        return Prompts(captions, None if self.labels is None else self.labels[rows], self.clusters[rows])

    def repeated(self, prompts: int, times: int) -> "Prompts":
        """Return the first `prompts` prompts, each `times` times in a row."""
        rows = [row for row in range(min(prompts, len(self))) for _ in range(times)]
        captions = None if self.captions is None else [self.captions[row] for row in rows]
        labels = None if self.labels is None else [self.labels[row] for row in rows]
        return Prompts(captions, labels, [self.clusters[row] for row in rows])


def prompts_of(run: Path, clusters: int, count: int, *, seed: int = 0, split: Split = "held-out") -> Prompts:
    """Return `count` prompts from a split, divided over the clusters in proportion to their training images.

    A cluster with fewer images than that repeats its prompts; the noise of repeated prompts differs. A cluster without
    images in the split is left out.
    """
    opened = [Shards.open(run, [cluster], split) for cluster in range(clusters)]
    empty = [cluster for cluster, shards in enumerate(opened) if not len(shards)]
    if len(empty) == clusters:
        raise AtollError(
            f"the {split} split has no images to take prompts from; raise data.val_fraction or use --prompts train"
        )
    if empty:
        print(f"no prompts for cluster {', '.join(map(str, empty))}: it has no {split} images", flush=True)
    trained = Shards.open(run, list(range(clusters))).cluster_sizes()
    wanted = shares([0 if cluster in empty else size for cluster, size in enumerate(trained)], count)
    captions: list[str] = []
    labels: list[int] = []
    owners: list[int] = []
    for cluster, (shards, many) in enumerate(zip(opened, wanted, strict=True)):
        rows = [
            int(shuffled(np.array([i % len(shards)], np.uint64), len(shards), seed, epoch=cluster)[0])
            for i in range(many)
        ]
        captions += [caption or "" for caption in shards.captions(rows)] if rows else []
        labels += shards.read(np.array(rows)).label.tolist() if rows else []
        owners += [cluster] * many
    # Shuffle over the clusters, so that any first part of the set (a chunk, the contact sheet) has all of them.
    order = shuffled(np.arange(count, dtype=np.uint64), count, seed, epoch=clusters).astype(np.int64)
    data = opened[0].content
    texts = [captions[i] for i in order] if data.text else None
    return Prompts(texts, [labels[i] for i in order] if data.labels else None, [owners[i] for i in order])


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

    def protocol(self) -> SampleProtocol:
        """Return how the images were generated, to be stored beside every metric."""
        made_from = self.artifact.open(GENERATED).made_from
        return SampleProtocol(
            model=made_from["model"], num_images=len(self), set=self.artifact.name, **made_from["settings"]
        )

    def __len__(self) -> int:
        return len(self.prompts)

    def chunks(self) -> Iterator[Pixels]:
        """Yield the images (N, H, W, 3), `CHUNK` at a time."""
        for file in self._files():
            yield load_file(file)["images"].numpy()

    def use(self) -> dict[str, Tensor] | None:
        """Return the times, the mean weight and lead share of each expert (evaluations, experts); None if dense."""
        stored = [_read(file, ("t", "weights", "lead", "active")) for file in self._files()]
        if "t" not in stored[0]:
            return None
        sums = {
            key: torch.stack([part[key] for part in stored]).sum(0) / len(self) for key in ("weights", "lead", "active")
        }
        return {"t": stored[0]["t"], **sums}

    def _files(self) -> list[Path]:
        # Chunk files have numbers as names; prompts.json and sheet.png do not.
        return [self.artifact.path(file) for file in sorted(self.artifact.open(GENERATED).files) if file[0].isdecimal()]


def generate(
    model: EvaluatedModel,
    prompts: Prompts,
    settings: Settings,
    *,
    purpose: str,
    batch_size: int,
    load: LoadOptions,
    context: DistContext,
) -> GeneratedSet:
    """Generate a set of images, or open it if it exists. If interrupted, it resumes with the next missing chunks.

    Several processes share the chunks. A chunk has its own noise, so its images do not depend on the process.
    """
    plain = {key: value for key, value in asdict(settings).items() if key != "routing" or model.routing}
    plain["dtype"] = load.precision
    made_from = {"model": model.model, "networks": model.digests(), "settings": plain, "prompts": asdict(prompts)}
    artifact = keyed(model.run, "generated", f"{model.label} {purpose}", made_from=made_from)
    # The manifest names the file instead of repeating thousands of prompts. The folder name has the hash of all.
    short = {**made_from, "prompts": f"{len(prompts)} in prompts.json"}
    chunks = Chunks(artifact, len(prompts), CHUNK)

    def begin() -> list[int]:
        if artifact.begin(GENERATED, short) is not None:
            return []
        artifact.write("prompts.json", to_json(asdict(prompts)))
        return chunks.missing()

    def generate_share() -> None:
        mine = missing[context.rank :: context.size]
        sampler = model.open(load)
        # Load the experts and run one step before timing, so that `seconds` excludes opening and warming up.
        for number in range(len(sampler.ensemble.references)) if load.max_loaded_experts is None else ():
            sampler.ensemble.cache.get(number)
        _sample(sampler, prompts.part(slice(0, 1)), replace(settings, steps=1), batch_size=batch_size)
        for chunk in mine:
            print(f"{model.label}: generating images for {purpose}, {chunk * CHUNK:,} of {len(prompts):,}", flush=True)
            artifact.write_tensors(
                chunks.file(chunk), _chunk(sampler, prompts, settings, chunk=chunk, batch_size=batch_size)
            )

    def commit() -> None:
        if artifact.manifest() is None:
            artifact.commit(_finish(artifact, chunks))

    if missing := context.on_main(begin):
        context.on_all(generate_share)
    context.on_main(commit)
    return GeneratedSet(model.label, artifact, prompts)


def _chunk(sampler: Sampler, prompts: Prompts, settings: Settings, *, chunk: int, batch_size: int) -> dict[str, Tensor]:
    """Generate one chunk of images."""
    part = prompts.part(slice(chunk * CHUNK, (chunk + 1) * CHUNK))
    # The seed depends on the chunk and on no model, so every model and routing starts from the same noise.
    # The shift by 33 leaves 31 of the 64 bits: a positive seed for any generator.
    seed = rng.key(settings.seed, SEED_STREAM, chunk) >> 33
    samples, seconds = _sample(sampler, part, replace(settings, seed=seed), batch_size=batch_size)
    images = torch.from_numpy(np.stack([np.asarray(image) for image in samples.images]))
    return {"images": images, "seconds": torch.tensor(seconds, dtype=torch.float64), **_use(samples)}


def _sample(sampler: Sampler, prompts: Prompts, settings: Settings, *, batch_size: int) -> tuple[Samples, float]:
    """Generate images; return them and the seconds it took."""
    labels = prompts.labels if "label" in sampler.ensemble.conditioning else None
    how = {"batch_size": batch_size, "trace": len(sampler.ensemble.experts) > 1, **asdict(settings)}
    start = time.perf_counter()
    samples = sampler.generate(prompts.captions, labels, len(prompts), clusters=prompts.clusters, **how)
    return samples, time.perf_counter() - start


def _use(samples: Samples) -> dict[str, Tensor]:
    """Return, at every evaluation, sums over the images: weights, largest weights and running experts."""
    if samples.trace is None:
        return {}
    weights = samples.trace.weights.double()  # (evaluations, images, experts)
    lead = torch.nn.functional.one_hot(weights.argmax(-1), weights.shape[-1]).double()
    return {
        "t": samples.trace.t,
        "weights": weights.sum(1),
        "lead": lead.sum(1),
        "active": (weights > 0).double().sum((1, 2)),
    }


def _finish(artifact: Artifact, chunks: Chunks) -> GeneratedContent:
    """Write the contact sheet, and sum the seconds."""
    files = [artifact.path(chunks.file(chunk)) for chunk in range(chunks.count)]
    first = load_file(files[0])["images"][:SHEET].numpy()
    with artifact.writing("sheet.png") as path:
        sheet([Image.fromarray(image) for image in first]).save(path, format="PNG")
    seconds = sum(float(_read(file, ("seconds",))["seconds"]) for file in files)
    return GeneratedContent(rows=chunks.rows, seconds=seconds)


def _read(file: Path, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Read those of the named tensors that a file has, and no others."""
    with safe_open(file, framework="pt") as stored:
        return {name: stored.get_tensor(name) for name in names if name in stored.keys()}  # noqa: SIM118
