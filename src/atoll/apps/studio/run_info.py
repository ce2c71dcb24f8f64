"""Descriptions of the served run: its models, experts, clusters and training jobs."""

import time
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from itertools import zip_longest
from math import isfinite
from pathlib import Path

import torch

from atoll.apps.share.status import JobStatus, status
from atoll.apps.share.store import Store
from atoll.apps.studio import schemas
from atoll.apps.studio.registry import ModelRegistry, has_nearest, has_router
from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.manifests import CLUSTERS, EXPERT, ExpertContent
from atoll.core.metrics_file import read_lines
from atoll.core.networks import NetworkConfig
from atoll.core.sizes import Size
from atoll.data.index import Index
from atoll.data.stages import clusters as partition
from atoll.data.stages import ingest
from atoll.data.stages.clusters import read_assignments
from atoll.ensemble import Ensemble
from atoll.ensemble.images import COLORS
from atoll.experts.expert import Declaration
from atoll.experts.stored import DECLARATION_FILE, read_declaration
from atoll.nets import build, count_parameters

# Sizes of the lists on the web page: as many as fit into a card or under the prompt without scrolling.
CAPTIONS_PER_CLUSTER, LABELS_PER_CLUSTER, MAX_EXAMPLES = 12, 6, 12
# Example prompts of at most this many characters come first: several fit on a line of the form.
SHORT_CAPTION_CHARACTERS = 16
# Points of a loss curve. The curve is about 120 pixels wide, so more points would not be visible.
LOSS_POINTS = 60
# Chunks of the index that are read for captions and labels of clusters. This bounds the time of the first page view
# of a large dataset; captions and labels of later chunks are not shown.
CLUSTER_CHUNKS = 16


def describe_run(models: ModelRegistry, queue: int, token_required: bool) -> schemas.RunResponse:
    """Return the description of the served run."""
    loaded = models.loaded()
    first = next(iter(loaded.values()), None)
    routed = loaded.get("experts")
    ensemble = None if routed is None else routed.ensemble
    accepted = frozenset[str]().union(*(model.ensemble.conditioning for model in loaded.values()))
    labels = first.ensemble.experts[0].labels if first is not None else ()
    missing = _untrained(models) if routed is None else list(routed.sampler.missing)
    return schemas.RunResponse(
        name=models.name,
        size=None if first is None else _shape(first.sizes[0]),
        sizes=[] if first is None else [_shape(size) for size in first.sizes],
        models=list(loaded),
        conditioning=schemas.Conditioning(
            text=bool(accepted & {"text", "pooled"}), labels=list(labels) if "label" in accepted else []
        ),
        experts=[] if ensemble is None else [_summary(expert) for expert in ensemble.experts],
        missing=missing,
        loading=None if models.loading is None else schemas.Loading(**vars(models.loading)),
        load_errors=dict(models.load_errors),
        router=ensemble is not None and has_router(ensemble),
        nearest=ensemble is not None and has_nearest(ensemble),
        routings=[] if routed is None else list(routed.routings),
        defaults=schemas.Defaults(
            routing=None if routed is None else routed.default_routing,
            steps=models.defaults.steps, guidance_scale=models.defaults.guidance_scale, num_images=1,
        ),
        limits=schemas.Limits(
            num_images=schemas.MAX_IMAGES, steps=schemas.MAX_STEPS, guidance_scale=schemas.MAX_GUIDANCE_SCALE,
            prompt_characters=schemas.MAX_PROMPT_CHARACTERS, queue=queue,
        ),
        examples=_examples(models),
        token_required=token_required,
    )  # fmt: skip


def _shape(size: Size) -> list[int]:
    return [size.height, size.width]


def _summary(expert: Declaration) -> schemas.ExpertSummary:
    number = expert.clusters[0]
    return schemas.ExpertSummary(number=number, name=expert.name, color=COLORS[number % len(COLORS)])


def _untrained(models: ModelRegistry) -> list[str]:
    """Return the experts of a run without a result; a trained one may still have to be loaded."""
    if models.run is None:
        return []
    jobs = [layout.expert_job(number) for number in range(configuration.load(models.run).clusters.count)]
    return [job for job in jobs if not (models.run / layout.final(job) / layout.MANIFEST_FILE).is_file()]


def _examples(models: ModelRegistry) -> list[str]:
    """Return captions as example prompts: one of each cluster in turn, short captions first."""
    clusters = describe_clusters(models).clusters
    sorted_captions = [
        sorted(cluster.captions, key=lambda caption: len(caption) > SHORT_CAPTION_CHARACTERS) for cluster in clusters
    ]
    in_turn = [caption for turn in zip_longest(*sorted_captions) for caption in turn if caption is not None]
    return list(dict.fromkeys(in_turn))[:MAX_EXAMPLES]


def describe_experts(models: ModelRegistry) -> schemas.ExpertsResponse:
    """Return the trained experts with the values of their manifests."""
    model = models.loaded().get("experts")
    if model is None:
        return schemas.ExpertsResponse(experts=[])
    clusters = {cluster.number: cluster for cluster in describe_clusters(models).clusters}
    count = len(model.ensemble.references)
    return schemas.ExpertsResponse(
        experts=[_expert(models, model.ensemble, position, clusters=clusters) for position in range(count)]
    )


def _expert(
    models: ModelRegistry, ensemble: Ensemble, position: int, *, clusters: dict[int, schemas.Cluster]
) -> schemas.ExpertInfo:
    declaration = ensemble.experts[position]
    manifest = _manifest(models, declaration.name, position)
    objective, compute = manifest and manifest.objective, manifest and manifest.compute
    # The expert cache may have evicted the network, so parameters are counted on a network without memory.
    with torch.device("meta"):
        parameters = count_parameters(build(declaration.network))
    summary = _summary(declaration)
    cluster = clusters.get(summary.number)
    return schemas.ExpertInfo(
        **summary.model_dump(),
        cluster=summary.number,
        objective=objective and objective.prediction,
        schedule=objective and objective.schedule.name,
        network=_network(declaration.network),
        parameters=parameters,
        images_seen=compute and compute.images,
        seconds=compute and compute.seconds,
        flops=compute and compute.flops,
        images=None if cluster is None else cluster.images,
        share=None if cluster is None else cluster.share,
    )


def _manifest(models: ModelRegistry, name: str, position: int) -> ExpertContent | None:
    """Return the manifest of an expert in a run or an export; None for a foreign release, which has none."""
    if models.run is not None:
        return Artifact(models.run, layout.final(name)).read(EXPERT)
    file = Path(models.source) / f"expert_{position}" / DECLARATION_FILE
    content = read_declaration(file) if file.is_file() else None
    return content if isinstance(content, ExpertContent) else None


def _network(config: NetworkConfig) -> str:
    values = config.to_dict()
    parts = [f"{key} {values[key]}" for key in ("width", "depth", "heads", "patch") if key in values]
    return ", ".join([config.class_name, *parts])


def describe_clusters(models: ModelRegistry) -> schemas.ClustersResponse:
    """Return the clusters of the training data, or the reason why they are not available."""
    if models.run is None:
        return schemas.ClustersResponse(
            clusters=[], reason="an export contains no data; serve the run that it was exported from"
        )
    manifest = Artifact(models.run, partition.NAME).manifest()
    if manifest is None or Artifact(models.run, ingest.NAME).manifest() is None:
        return schemas.ClustersResponse(clusters=[], reason="this run has no prepared data; `atoll prepare` creates it")
    return schemas.ClustersResponse(clusters=_clusters(models.run, manifest.digest))


@lru_cache(maxsize=4)
def _clusters(run: Path, digest: str) -> list[schemas.Cluster]:  # noqa: ARG001 - the digest makes the cache miss when the clusters change
    artifact, index = Artifact(run, partition.NAME), Index.open(run)
    sizes = artifact.read(CLUSTERS).sizes["train"]
    captions: list[list[str]] = [[] for _ in sizes]
    labels: list[Counter[str]] = [Counter() for _ in sizes]
    for chunk in range(min(CLUSTER_CHUNKS, index.chunks(artifact).count)):
        rows = index.read(chunk, ["captions", "label", "split"])
        groups = read_assignments(artifact, chunk)["coarse"].tolist()
        for own, label, split, group in zip(rows["captions"], rows["label"], rows["split"], groups, strict=True):
            if split == "train":
                captions[group] += own[:1]
                labels[group].update([label] if label is not None else [])
    return [
        schemas.Cluster(
            number=number, images=size, share=size / max(1, sum(sizes)), captions=_spread(captions[number]),
            labels=_shares(labels[number]),
            contact_sheet=f"/v1/clusters/{number}/contact_sheet.png" if _sheet(run, number).is_file() else None,
        )
        for number, size in enumerate(sizes)
    ]  # fmt: skip


def _spread(captions: list[str]) -> list[str]:
    """Return distinct captions at equal distances in the list."""
    distinct = list(dict.fromkeys(captions))
    return distinct[:: max(1, len(distinct) // CAPTIONS_PER_CLUSTER)][:CAPTIONS_PER_CLUSTER]


def _shares(counts: Counter[str]) -> list[schemas.LabelShare]:
    return [
        schemas.LabelShare(name=str(name), share=count / counts.total())
        for name, count in counts.most_common(LABELS_PER_CLUSTER)
    ]


def _sheet(run: Path, number: int) -> Path:
    return Artifact(run, partition.NAME).path(f"cluster_{number:03d}.png")


def contact_sheet(models: ModelRegistry, number: int) -> Path | None:
    """Return the file of a cluster's contact sheet; None if there is none."""
    known = {cluster.number for cluster in describe_clusters(models).clusters if cluster.contact_sheet}
    return _sheet(models.run, number) if models.run is not None and number in known else None


def describe_islands(models: ModelRegistry) -> schemas.IslandsResponse:
    """Return the current state of all training jobs."""
    if models.run is None:
        return schemas.IslandsResponse(jobs=[], reason="an export has no training jobs")
    run = models.run
    # A store measures its clock by writing an object, but a GET must not write. The run is a folder of this machine,
    # so the ages of its files are measured with the clock of the machine.
    store = replace(Store.open(run), _clock=time.time() - time.monotonic())
    return schemas.IslandsResponse(jobs=[_island(run, line) for line in status(store)])


def _island(run: Path, line: JobStatus) -> schemas.Island:
    grid = newest_grid(run, line.job)
    losses = _losses(run / line.job / layout.METRICS_FILE)
    # The status of a finished job has no number of images; its metrics have.
    images = line.images or (losses[-1][0] if losses else 0)
    # The address of a grid contains its number of images, so that a browser loads a newer grid.
    return schemas.Island(
        job=line.job, state=line.state, where=line.where, images=images, total_images=line.total or images,
        images_per_second=line.rate if isfinite(line.rate) else 0.0, seconds_left=line.seconds_left,
        last_seen_seconds_ago=line.seen_seconds_ago, reason=line.why,
        grid=None if grid is None else f"/v1/islands/{line.job}/grid.png?images={int(grid.stem)}", loss=losses,
    )  # fmt: skip


def newest_grid(run: Path, job: str) -> Path | None:
    """Return the newest grid of images that a job has sampled in training; None if there is none."""
    return layout.newest_preview(run / job)


def _losses(file: Path) -> list[tuple[int, float]]:
    """Return pairs of images seen and loss, thinned out; the last line of the metrics is always included."""
    lines = read_lines(file)
    thin = lines[:: -(-len(lines) // LOSS_POINTS)] if lines else []
    if lines and thin[-1] != lines[-1]:
        thin[-1] = lines[-1]
    # JSON has no NaN: a diverged loss is left out.
    return [(line.images, line.loss) for line in thin if isfinite(line.loss)]
