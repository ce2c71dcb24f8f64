"""Sets of generated pictures, kept in the run so that any figure can be taken of them again.

evaluation/samples/experts-top-2-0123456789/
    000000.safetensors    pictures (N, H, W, 3) of eight bits; expert use by time; seconds it took
    prompts.json          prompt, class and cluster of each
    sheet.png             the first of them, for people
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
from atoll.ensemble import Sampler, Settings
from atoll.ensemble import Samples as Generated
from atoll.evaluate.cache import keyed
from atoll.evaluate.models import Subject
from atoll.evaluate.results import SampleProtocol, Split
from atoll.flow import rng


class SamplesContent(Content):
    """A set of generated images."""

    rows: int
    seconds: float


SAMPLES = Kind("evaluation samples", SamplesContent)
CHUNK = 256
SEED_STREAM = 31
SHEET = 64


@dataclass(frozen=True)
class Prompts:
    """What a set of samples is asked for: captions or classes of real samples, with their clusters."""

    captions: list[str] | None
    labels: list[int] | None
    clusters: list[int]

    def __len__(self) -> int:
        return len(self.clusters)

    def part(self, rows: slice) -> "Prompts":
        """Some of them."""
        captions = None if self.captions is None else self.captions[rows]
        return Prompts(captions, None if self.labels is None else self.labels[rows], self.clusters[rows])

    def repeated(self, prompts: int, times: int) -> "Prompts":
        """The first `prompts` of them, each `times` in a row."""
        rows = [row for row in range(min(prompts, len(self))) for _ in range(times)]
        captions = None if self.captions is None else [self.captions[row] for row in rows]
        labels = None if self.labels is None else [self.labels[row] for row in rows]
        return Prompts(captions, labels, [self.clusters[row] for row in rows])


def prompts_of(run: Path, clusters: int, count: int, *, seed: int = 0, split: Split = "held-out") -> Prompts:
    """Prompts of samples of a split, as many of each cluster as its share of the training data asks for.

    Where a cluster has fewer than that they are taken in turn again; noise differs from sample to sample. A cluster
    that has none at all is left out.
    """
    opened = [Shards.open(run, [cluster], split) for cluster in range(clusters)]
    empty = [cluster for cluster, shards in enumerate(opened) if not len(shards)]
    if len(empty) == clusters:
        raise AtollError(
            f"there is no {split} sample to take prompts from; raise data.val_fraction or say --prompts train"
        )
    if empty:
        print(f"no {split} sample, so no prompt, is of cluster {', '.join(map(str, empty))}", flush=True)
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
    order = shuffled(np.arange(count, dtype=np.uint64), count, seed, epoch=clusters).astype(np.int64)
    data = opened[0].content
    texts = [captions[i] for i in order] if data.text else None
    return Prompts(texts, [labels[i] for i in order] if data.labels else None, [owners[i] for i in order])


def shares(sizes: list[int], count: int) -> list[int]:
    """`count` divided in the proportions of `sizes`, in whole numbers, by largest remainders."""
    exact = [count * size / sum(sizes) for size in sizes]
    whole = [int(share) for share in exact]
    left = sorted(range(len(sizes)), key=lambda i: whole[i] - exact[i])
    for i in left[: count - sum(whole)]:
        whole[i] += 1
    return whole


@dataclass(frozen=True)
class Samples:
    """A finished set of generated pictures."""

    label: str
    artifact: Artifact
    prompts: Prompts

    def seconds(self) -> float:
        """Return how long it took to make all of them."""
        return self.artifact.read(SAMPLES).seconds

    def digest(self) -> str:
        """Fingerprint of the set."""
        return self.artifact.open(SAMPLES).digest

    def protocol(self) -> SampleProtocol:
        """Return how the images were made, to be written beside every metric."""
        made_from = self.artifact.open(SAMPLES).made_from
        return SampleProtocol(
            model=made_from["model"], samples=len(self), set=self.artifact.name, **made_from["settings"]
        )

    def __len__(self) -> int:
        return len(self.prompts)

    def chunks(self) -> Iterator[Pixels]:
        """The pictures (N, H, W, 3), `CHUNK` at a time."""
        for file in self._files():
            yield load_file(file)["pictures"].numpy()

    def use(self) -> dict[str, Tensor] | None:
        """Times, mean weight of each expert and share of samples led by it, (evaluations, experts); None if dense."""
        stored = [_read(file, ("t", "weights", "lead", "active")) for file in self._files()]
        if "t" not in stored[0]:
            return None
        sums = {
            key: torch.stack([part[key] for part in stored]).sum(0) / len(self) for key in ("weights", "lead", "active")
        }
        return {"t": stored[0]["t"], **sums}

    def _files(self) -> list[Path]:
        return [self.artifact.path(file) for file in sorted(self.artifact.open(SAMPLES).files) if file[0].isdecimal()]


def draw(
    subject: Subject,
    prompts: Prompts,
    settings: Settings,
    *,
    what: str,
    batch_size: int,
    max_loaded_experts: int | None,
) -> Samples:
    """Make a set of samples, or open it if it is there; interrupted, it continues with the next chunk."""
    plain = {key: value for key, value in asdict(settings).items() if key != "routing" or subject.routing}
    told = to_json(asdict(prompts))
    made_from = {"model": subject.model, "networks": subject.digests(), "settings": plain, "prompts": asdict(prompts)}
    artifact = keyed(subject.run, "samples", f"{subject.label} {what}", made_from=made_from)
    short = {**made_from, "prompts": f"{len(prompts)} in prompts.json"}
    if artifact.begin(SAMPLES, short) is None:
        artifact.write("prompts.json", told)
        chunks, model = Chunks(artifact, len(prompts), CHUNK), subject.open(max_loaded_experts)
        # One step first, so that opening networks is no part of the time that pictures take.
        for number in range(len(model.ensemble.references)) if max_loaded_experts is None else ():
            model.ensemble.cache.get(number)
        _generate(model, prompts.part(slice(0, 1)), replace(settings, steps=1), batch_size=batch_size)
        for chunk in chunks.missing():
            print(f"{subject.label}: {what}, from {chunk * CHUNK:,} of {len(prompts):,}", flush=True)
            artifact.write_tensors(
                chunks.file(chunk), _chunk(model, prompts, settings, chunk=chunk, batch_size=batch_size)
            )
        artifact.commit(_finish(artifact, chunks))
    return Samples(subject.label, artifact, prompts)


def _chunk(model: Sampler, prompts: Prompts, settings: Settings, *, chunk: int, batch_size: int) -> dict[str, Tensor]:
    """One chunk of pictures. Its noise is the same for every model and routing."""
    part = prompts.part(slice(chunk * CHUNK, (chunk + 1) * CHUNK))
    seed = rng.key(settings.seed, SEED_STREAM, chunk) >> 33
    made, seconds = _generate(model, part, replace(settings, seed=seed), batch_size=batch_size)
    pictures = torch.from_numpy(np.stack([np.asarray(image) for image in made.images]))
    return {"pictures": pictures, "seconds": torch.tensor(seconds, dtype=torch.float64), **_use(made)}


def _generate(model: Sampler, prompts: Prompts, settings: Settings, *, batch_size: int) -> tuple[Generated, float]:
    """Pictures, and the seconds they took."""
    labels = prompts.labels if "label" in model.ensemble.conditioning else None
    how = {"batch_size": batch_size, "trace": len(model.ensemble.experts) > 1, **asdict(settings)}
    start = time.perf_counter()
    made = model.generate(prompts.captions, labels, len(prompts), clusters=prompts.clusters, **how)
    return made, time.perf_counter() - start


def _use(made: Generated) -> dict[str, Tensor]:
    """Sums over samples: each expert's weight, how often it has the largest, and how many run, at every evaluation."""
    if made.trace is None:
        return {}
    weights = made.trace.weights.double()
    lead = torch.nn.functional.one_hot(weights.argmax(-1), weights.shape[-1]).double()
    return {
        "t": made.trace.t,
        "weights": weights.sum(1),
        "lead": lead.sum(1),
        "active": (weights > 0).double().sum((1, 2)),
    }


def _finish(artifact: Artifact, chunks: Chunks) -> SamplesContent:
    """A sheet of the first pictures, and the time all of them took."""
    files = [artifact.path(chunks.file(chunk)) for chunk in range(chunks.count)]
    first = load_file(files[0])["pictures"][:SHEET].numpy()
    with artifact.writing("sheet.png") as path:
        sheet([Image.fromarray(picture) for picture in first]).save(path, format="PNG")
    seconds = sum(float(_read(file, ("seconds",))["seconds"]) for file in files)
    return SamplesContent(rows=chunks.rows, seconds=seconds)


def _read(file: Path, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Some tensors of a file, if they are there, without reading the others."""
    with safe_open(file, framework="pt") as stored:
        return {name: stored.get_tensor(name) for name in names if name in stored.keys()}  # noqa: SIM118


__all__ = ["CHUNK", "Prompts", "Samples", "draw", "prompts_of", "shares"]
