"""What a run tells of itself: the model, its experts, their clusters, and the jobs that train them."""

from collections import Counter
from functools import lru_cache
from itertools import zip_longest
from math import isfinite
from pathlib import Path

import torch

from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.manifests import CLUSTERS, EXPERT, ExpertContent
from atoll.core.metrics_file import read_lines
from atoll.core.networks import NetworkConfig
from atoll.data.stages import clusters as partition
from atoll.data.stages import ingest
from atoll.data.stages.clusters import read_assignments
from atoll.data.stages.ingest import Index
from atoll.ensemble import Ensemble
from atoll.ensemble.images import COLORS
from atoll.experts.expert import Declaration
from atoll.experts.stored import DECLARATION_FILE, read_declaration
from atoll.islands.status import JobStatus, status
from atoll.islands.store import Store
from atoll.nets import build, count_parameters
from atoll.studio import schemas
from atoll.studio.registry import Models, has_nearest, has_router

CAPTIONS, LABELS, EXAMPLES, POINTS, SHORT = 12, 6, 12, 60, 16
CHUNKS = 16
"""Chunks of the data that are read to tell what clusters hold."""


def describe_run(models: Models, queue: int, token: bool) -> schemas.RunAnswer:
    """What is served."""
    editions = models.editions()
    first = next(iter(editions.values()), None)
    edition = editions.get("experts")
    experts = None if edition is None else edition.ensemble
    told = frozenset[str]().union(*(edition.ensemble.conditioning for edition in editions.values()))
    known = first.ensemble.experts[0].labels if first is not None else ()
    missing = _all_experts(models) if edition is None else list(edition.sampler.missing)
    return schemas.RunAnswer(
        name=models.name,
        size=None if first is None else list(first.size),
        models=list(editions),
        conditions=schemas.Conditions(
            text=bool(told & {"text", "pooled"}), labels=list(known) if "label" in told else []
        ),
        experts=[] if experts is None else [_named(expert) for expert in experts.experts],
        missing=missing,
        router=experts is not None and has_router(experts),
        nearest=experts is not None and has_nearest(experts),
        routings=list(editions["experts"].routings) if "experts" in editions else [],
        defaults=schemas.Defaults(
            routing=editions["experts"].routing if "experts" in editions else None,
            steps=models.usual.steps, guidance_scale=models.usual.guidance_scale, n=1,
        ),
        limits=schemas.Limits(
            n=schemas.PICTURES, steps=schemas.STEPS, guidance_scale=schemas.GUIDANCE, prompt=schemas.PROMPT, queue=queue
        ),
        examples=_examples(models),
        token_required=token,
    )  # fmt: skip


def _named(expert: Declaration) -> schemas.ExpertName:
    number = expert.clusters[0]
    return schemas.ExpertName(number=number, name=expert.name, colour=COLORS[number % len(COLORS)])


def _all_experts(models: Models) -> list[str]:
    if models.run is None:
        return []
    return [layout.expert_job(number) for number in range(configuration.load(models.run).clusters.count)]


def _examples(models: Models) -> list[str]:
    """Captions to try, some of every cluster, short ones first."""
    clusters = describe_clusters(models).clusters
    short = [sorted(cluster.captions, key=lambda caption: len(caption) > SHORT) for cluster in clusters]
    turns = [caption for turn in zip_longest(*short) for caption in turn if caption is not None]
    return list(dict.fromkeys(turns))[:EXAMPLES]


def describe_experts(models: Models) -> schemas.ExpertsAnswer:
    """The experts that are finished, with what they declare."""
    edition = models.editions().get("experts")
    sizes = {cluster.number: cluster for cluster in describe_clusters(models).clusters}
    experts = (
        []
        if edition is None
        else [
            _expert(models, edition.ensemble, number, clusters=sizes)
            for number in range(len(edition.ensemble.references))
        ]
    )
    return schemas.ExpertsAnswer(experts=experts)


def _expert(
    models: Models, ensemble: Ensemble, place: int, *, clusters: dict[int, schemas.Cluster]
) -> schemas.ExpertFacts:
    declared = ensemble.experts[place]
    content = _declared(models, declared.name, place)
    objective, spent = content and content.objective, content and content.compute
    with torch.device("meta"):
        parameters = count_parameters(build(declared.network))
    name = _named(declared)
    cluster = clusters.get(name.number)
    return schemas.ExpertFacts(
        **name.model_dump(),
        cluster=name.number,
        objective=objective and objective.prediction,
        schedule=objective and objective.schedule.name,
        network=_network(declared.network),
        parameters=parameters,
        samples_trained=spent and spent.images,
        seconds=spent and spent.seconds,
        flops=spent and spent.flops,
        pictures=None if cluster is None else cluster.pictures,
        share=None if cluster is None else cluster.share,
    )


def _declared(models: Models, name: str, place: int) -> ExpertContent | None:
    """Return what an expert's manifest, or an export's declaration, declares; None for a release that has neither."""
    if models.run is not None:
        return Artifact(models.run, layout.final(name)).read(EXPERT)
    file = Path(models.source) / f"expert_{place}" / DECLARATION_FILE
    content = read_declaration(file) if file.is_file() else None
    return content if isinstance(content, ExpertContent) else None


def _network(config: NetworkConfig) -> str:
    known = config.to_dict()
    parts = [f"{key} {known[key]}" for key in ("width", "depth", "heads", "patch") if key in known]
    return ", ".join([config.class_name, *parts])


def describe_clusters(models: Models) -> schemas.ClustersAnswer:
    """What the clusters hold, or why that cannot be told."""
    if models.run is None:
        return schemas.ClustersAnswer(
            clusters=[], why="an exported folder has no data; serve the run that it comes from"
        )
    manifest = Artifact(models.run, partition.NAME).manifest()
    if manifest is None or Artifact(models.run, ingest.NAME).manifest() is None:
        return schemas.ClustersAnswer(clusters=[], why="the data of this run is not here, or not yet prepared")
    return schemas.ClustersAnswer(clusters=_clusters(models.run, manifest.digest))


@lru_cache(maxsize=4)
def _clusters(run: Path, digest: str) -> list[schemas.Cluster]:  # noqa: ARG001 - read again when the partition changes
    artifact, index = Artifact(run, partition.NAME), Index.open(run)
    sizes = artifact.read(CLUSTERS).sizes["train"]
    captions: list[list[str]] = [[] for _ in sizes]
    labels: list[Counter[str]] = [Counter() for _ in sizes]
    for chunk in range(min(CHUNKS, index.chunks(artifact).count)):
        rows = index.read(chunk, ["caption", "label", "split"])
        groups = read_assignments(artifact, chunk)["coarse"].tolist()
        for caption, label, split, group in zip(rows["caption"], rows["label"], rows["split"], groups, strict=True):
            if split == "train":
                captions[group] += [caption] if caption else []
                labels[group].update([label] if label is not None else [])
    return [
        schemas.Cluster(
            number=number, pictures=size, share=size / max(1, sum(sizes)), captions=_spread(captions[number]),
            labels=_shares(labels[number]),
            sheet=f"/v1/clusters/{number}/sheet.png" if _sheet(run, number).is_file() else None,
        )
        for number, size in enumerate(sizes)
    ]  # fmt: skip


def _spread(captions: list[str]) -> list[str]:
    """Different ones, from all over the cluster."""
    distinct = list(dict.fromkeys(captions))
    return distinct[:: max(1, len(distinct) // CAPTIONS)][:CAPTIONS]


def _shares(counts: Counter[str]) -> list[schemas.LabelShare]:
    return [
        schemas.LabelShare(name=str(name), share=count / counts.total()) for name, count in counts.most_common(LABELS)
    ]


def _sheet(run: Path, number: int) -> Path:
    return Artifact(run, partition.NAME).path(f"cluster_{number:03d}.png")


def sheet_of(models: Models, number: int) -> Path | None:
    """The contact sheet of a cluster."""
    known = {cluster.number for cluster in describe_clusters(models).clusters if cluster.sheet}
    return _sheet(models.run, number) if models.run is not None and number in known else None


def describe_islands(models: Models) -> schemas.IslandsAnswer:
    """The jobs of the run, live."""
    if models.run is None:
        return schemas.IslandsAnswer(jobs=[], why="an exported folder is finished: nothing trains in it")
    run = models.run
    return schemas.IslandsAnswer(jobs=[_island(run, line) for line in status(Store.open(run))])


def _island(run: Path, line: JobStatus) -> schemas.Island:
    grid = newest_grid(run, line.job)
    losses = _losses(run / line.job / layout.METRICS_FILE)
    samples = line.images or (losses[-1][0] if losses else 0)
    return schemas.Island(
        job=line.job, state=line.state, where=line.where, samples=samples, total=line.total or samples,
        rate=line.rate if isfinite(line.rate) else 0.0, seconds_left=line.seconds_left,
        seen_seconds_ago=line.seen_seconds_ago, why=line.why,
        grid=None if grid is None else f"/v1/islands/{line.job}/grid.png?samples={int(grid.stem)}", loss=losses,
    )  # fmt: skip


def newest_grid(run: Path, job: str) -> Path | None:
    """The last grid of samples that a job has drawn."""
    return layout.newest_preview(run / job)


def _losses(file: Path) -> list[tuple[int, float]]:
    """Samples and loss along a job's journal, thinned out."""
    lines = read_lines(file)
    thin = lines[:: -(-len(lines) // POINTS)] if lines else []
    if lines and thin[-1] != lines[-1]:
        thin[-1] = lines[-1]
    return [(line.images, line.loss) for line in thin if isfinite(line.loss)]
