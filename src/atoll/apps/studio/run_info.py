"""Descriptions of the served run: its models, experts, clusters and training jobs."""

import time
from dataclasses import replace
from functools import lru_cache
from itertools import zip_longest
from math import isfinite
from pathlib import Path

import torch

from atoll.apps.report.charts import color
from atoll.apps.report.summary import read_clusters
from atoll.apps.share.status import status
from atoll.apps.share.store import Store
from atoll.apps.studio import schemas
from atoll.apps.studio.registry import ModelRegistry, has_nearest, has_router, trained
from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.manifests import EXPERT, ExpertContent
from atoll.core.metrics_file import read_lines
from atoll.data.stages import clusters as partition
from atoll.data.stages import ingest
from atoll.experts.expert import Declaration
from atoll.experts.network_folder import DECLARATION_FILE, read_declaration
from atoll.nets import build, count_parameters
from atoll.nets.conditioning import OF_PROMPTS

# Sizes of the lists on the web page: as many as fit into a card or under the prompt without scrolling.
CAPTIONS_PER_CLUSTER, LABELS_PER_CLUSTER, MAX_EXAMPLES = 12, 6, 12
# Example prompts of at most this many characters come first: several fit on a line of the form.
SHORT_CAPTION_CHARACTERS = 16
# Points of a loss curve. The curve is about 120 pixels wide, so more points would not be visible.
LOSS_POINTS = 60


def describe_run(models: ModelRegistry, queue: int, token_required: bool) -> schemas.RunResponse:
    """Return the description of the served run."""
    loaded = models.loaded()
    first = next(iter(loaded.values()), None)
    routed = loaded.get("experts")
    ensemble = None if routed is None else routed.ensemble
    accepted = frozenset[str]().union(*(model.ensemble.conditioning for model in loaded.values()))
    labels = first.ensemble.declarations[0].labels if first is not None else ()
    sizes = [] if first is None else [[size.height, size.width] for size in first.sizes]

    # Experts without a result; a trained one may still have to be loaded.
    missing = [] if routed is None else list(routed.sampler.missing)
    if routed is None and models.run is not None:
        jobs = [layout.expert_job(number) for number in range(configuration.load(models.run).clusters.count)]
        missing = [job for job in jobs if not trained(models.run, [job])]

    # Captions as example prompts: one of each cluster in turn, short captions first.
    captions = [
        sorted(cluster.captions, key=lambda caption: len(caption) > SHORT_CAPTION_CHARACTERS)
        for cluster in describe_clusters(models).clusters
    ]
    in_turn = [caption for turn in zip_longest(*captions) for caption in turn if caption is not None]
    return schemas.RunResponse(
        name=models.name,
        size=sizes[0] if sizes else None,
        sizes=sizes,
        models=list(loaded),
        conditioning=schemas.AcceptedConditions(
            text=bool(accepted & OF_PROMPTS), labels=list(labels) if "label" in accepted else []
        ),
        experts=[] if ensemble is None else [_summary(expert) for expert in ensemble.declarations],
        missing=missing,
        loading=models.loading,
        load_errors=dict(models.load_errors),
        router=ensemble is not None and has_router(ensemble),
        nearest=ensemble is not None and has_nearest(ensemble),
        routings=[] if routed is None else list(routed.routings),
        defaults=schemas.Defaults(
            routing=None if routed is None else routed.default_routing,
            steps=models.defaults.steps, guidance_scale=models.defaults.guidance_scale, num_images=1,
        ),
        limits=schemas.RequestLimits(
            num_images=schemas.MAX_IMAGES, steps=schemas.MAX_STEPS, guidance_scale=schemas.MAX_GUIDANCE_SCALE,
            prompt_characters=schemas.MAX_PROMPT_CHARACTERS, queue=queue,
        ),
        examples=list(dict.fromkeys(in_turn))[:MAX_EXAMPLES],
        token_required=token_required,
    )  # fmt: skip


def _summary(expert: Declaration) -> schemas.ExpertSummary:
    number = expert.clusters[0]
    return schemas.ExpertSummary(number=number, name=expert.name, color=color(number))


def describe_experts(models: ModelRegistry) -> schemas.ExpertsResponse:
    """Return the trained experts with the values of their manifests."""
    model = models.loaded().get("experts")
    if model is None:
        return schemas.ExpertsResponse(experts=[])
    clusters = {cluster.number: cluster for cluster in describe_clusters(models).clusters}
    experts = []
    for position, declaration in enumerate(model.ensemble.declarations):
        # The manifest in a run or an export; a foreign release has none.
        manifest: ExpertContent | None = None
        file = Path(models.source) / f"expert_{position}" / DECLARATION_FILE
        if models.run is not None:
            manifest = Artifact(models.run, layout.final(declaration.name)).read(EXPERT)
        elif file.is_file() and isinstance(content := read_declaration(file), ExpertContent):
            manifest = content
        objective, compute = manifest and manifest.objective, manifest and manifest.compute
        # The expert cache may have evicted the network, so parameters are counted on a network without memory.
        with torch.device("meta"):
            parameters = count_parameters(build(declaration.network))
        values = declaration.network.to_dict()
        sizes = [f"{key} {values[key]}" for key in ("width", "depth", "heads", "patch") if key in values]
        summary = _summary(declaration)
        cluster = clusters.get(summary.number)
        info = schemas.ExpertInfo(
            **summary.model_dump(),
            cluster=summary.number,
            objective=objective and objective.prediction,
            schedule=objective and objective.schedule.name,
            network=", ".join([declaration.network.class_name, *sizes]),
            parameters=parameters,
            images_seen=compute and compute.images,
            seconds=compute and compute.seconds,
            flops=compute and compute.flops,
            images=cluster and cluster.images,
            share=cluster and cluster.share,
        )
        experts.append(info)
    return schemas.ExpertsResponse(experts=experts)


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
def _clusters(run: Path, digest: str) -> list[schemas.ClusterInfo]:  # noqa: ARG001 - the digest makes the cache miss when the clusters change
    clusters = read_clusters(run)
    total = max(1, sum(cluster.size for cluster in clusters))
    return [
        schemas.ClusterInfo(
            number=cluster.number,
            images=cluster.size,
            share=cluster.size / total,
            # Captions at equal distances in the list.
            captions=cluster.captions[:: max(1, len(cluster.captions) // CAPTIONS_PER_CLUSTER)][:CAPTIONS_PER_CLUSTER],
            labels=[schemas.LabelShare(name=name, share=share) for name, share in cluster.labels[:LABELS_PER_CLUSTER]],
            contact_sheet=f"/v1/clusters/{cluster.number}/contact_sheet.png" if cluster.sheet.is_file() else None,
        )
        for cluster in clusters
    ]


def contact_sheet(models: ModelRegistry, number: int) -> Path | None:
    """Return the file of a cluster's contact sheet; None if there is none."""
    known = {cluster.number for cluster in describe_clusters(models).clusters if cluster.contact_sheet}
    if models.run is None or number not in known:
        return None
    return Artifact(models.run, partition.NAME).path(f"cluster_{number:03d}.png")


def describe_islands(models: ModelRegistry) -> schemas.IslandsResponse:
    """Return the current state of all training jobs."""
    if models.run is None:
        return schemas.IslandsResponse(jobs=[], reason="an export has no training jobs")
    run, jobs = models.run, []
    # A store measures its clock by writing an object, but a GET must not write. The run is a folder of this machine,
    # so the ages of its files are measured with the clock of the machine.
    store = replace(Store.open(run), _clock=time.time() - time.monotonic())
    for line in status(store):
        # The loss curve, thinned out; the last line of the metrics is always included.
        lines = read_lines(run / line.job / layout.METRICS_FILE)
        thin = lines[:: -(-len(lines) // LOSS_POINTS)] if lines else []
        if lines and thin[-1] != lines[-1]:
            thin[-1] = lines[-1]
        # JSON has no NaN: a diverged loss is left out.
        losses = [(point.images, point.loss) for point in thin if isfinite(point.loss)]
        # The status of a finished job has no number of images; its metrics have.
        images = line.images or (losses[-1][0] if losses else 0)
        # The address of a grid contains its number of images, so that a browser loads a newer grid.
        grid = layout.newest_preview(run / line.job)
        job = schemas.JobInfo(
            job=line.job, state=line.state, where=line.where, images=images, total_images=line.total or images,
            images_per_second=line.rate if isfinite(line.rate) else 0.0, seconds_left=line.seconds_left,
            last_seen_seconds_ago=line.seen_seconds_ago, reason=line.why,
            grid=None if grid is None else f"/v1/islands/{line.job}/grid.png?images={int(grid.stem)}", loss=losses,
        )  # fmt: skip
        jobs.append(job)
    return schemas.IslandsResponse(jobs=jobs)
