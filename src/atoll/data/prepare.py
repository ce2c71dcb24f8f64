"""From pictures to shards, stage by stage. Each stage makes one artifact; what is done is not done again.

ingest -> features -> clusters ─┐
   └────> latents, text ────────┴─> shards
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from atoll.core.artifacts import Artifact, Inputs, Kind
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.core.manifests import CLUSTERS, FEATURES, INGEST, LATENTS, SHARDS, TEXT
from atoll.data.chunks import Share
from atoll.data.sources.base import Source
from atoll.data.sources.open import find_kind
from atoll.data.stages import clusters, features, ingest, latents, shards, text

StageName = Literal["ingest", "features", "clusters", "latents", "text", "shards"]
STAGES: tuple[StageName, ...] = get_args(StageName)
KINDS: dict[StageName, Kind[Any]] = {
    "ingest": INGEST,
    "features": FEATURES,
    "clusters": CLUSTERS,
    "latents": LATENTS,
    "text": TEXT,
    "shards": SHARDS,
}
SHARED: tuple[StageName, ...] = ("features", "latents", "text")
"""Stages that several jobs can share."""
NEEDS: dict[StageName, tuple[StageName, ...]] = {
    "ingest": (),
    "features": ("ingest",),
    "clusters": ("features",),
    "latents": ("ingest",),
    "text": ("ingest",),
    "shards": ("clusters", "latents", "text"),
}


@dataclass(frozen=True)
class Preparation:
    """The data part of one run."""

    run: Path
    config: Config

    @cached_property
    def source(self) -> Source:
        """The source that the configuration names."""
        return ingest.open_configured(self.config.data)

    @cached_property
    def _ingest_inputs(self) -> Inputs:
        return ingest.made_from(self.config, self.source)

    @property
    def index(self) -> ingest.Index:
        """The index that the ingest stage made."""
        return ingest.Index.open(self.run)

    def artifacts(self, stage: StageName) -> list[tuple[Artifact, Kind[Any]]]:
        """The artifacts of a stage, each with its kind."""
        if stage == "shards":
            return [(Artifact(self.run, shards.name(cluster)), SHARDS) for cluster in range(self.config.clusters.count)]
        module = {"ingest": ingest, "features": features, "clusters": clusters, "latents": latents, "text": text}[stage]
        return [(Artifact(self.run, module.NAME), KINDS[stage])]

    def inputs(self, stage: StageName) -> list[Inputs]:
        """What each artifact of a stage is made from; the stages before it must be done."""
        config = self.config
        if stage == "ingest":
            return [self._ingest_inputs]
        if stage == "features":
            return [features.made_from(config, self.index.manifest)]
        if stage == "clusters":
            return [clusters.made_from(config, self.index, self.run)]
        if stage == "latents":
            return [latents.made_from(config, self.index.manifest)]
        if stage == "text":
            return [text.made_from(config, self.index.manifest)]
        common = shards.made_from(self.run, config)
        return [{**common, "cluster": cluster} for cluster in range(config.clusters.count)]

    def unneeded(self, stage: StageName) -> str | None:
        """Why this run can do without a stage, if it can. For features the index must be there."""
        if stage == "text" and self.config.text.encoder == "none":
            return "text.encoder is none"
        if stage == "text" and self.done("ingest") and not text.needed(self.config, self.index.manifest):
            return "no sample has a caption"
        if stage == "features" and not clusters.needs_features(self.config.clusters, self.index):
            return "the clusters need no features"
        return None

    def done(self, stage: StageName) -> bool:
        """Whether a stage is finished. Raises `AtollError` if what is there was made from something else."""
        if not all(self.done(earlier) for earlier in NEEDS[stage]):
            return False
        if self.unneeded(stage):
            return True
        checks = zip(self.artifacts(stage), self.inputs(stage), strict=True)
        found = [_is_made(artifact, kind, inputs) for (artifact, kind), inputs in checks]
        return all(found)

    def sweep(self, stage: StageName) -> None:
        """Remove what a job that was killed right after its commit left of a finished stage."""
        for artifact, _ in self.artifacts(stage):
            artifact.sweep()

    def make(self, stage: StageName, share: Share) -> bool:
        """Do a stage, or this job's share of it; whether it is finished now."""
        if stage == "ingest":
            ingest.ingest(self.run, self.config, self.source)
        elif stage == "features":
            return features.extract(self.run, self.config, self.source, share=share) is not None
        elif stage == "clusters":
            clusters.partition(self.run, self.config, self.source)
        elif stage == "latents":
            return latents.encode(self.run, self.config, self.source, share=share) is not None
        elif stage == "text":
            return text.encode(self.run, self.config, share) is not None
        else:
            shards.write(self.run, self.config)
        return True

    @property
    def caution(self) -> str | None:
        """What of these settings will disappoint, though it works."""
        data = self.config.data
        if self.config.latents.autoencoder != "emoji" or (data.kind or find_kind(data.source)) == "emoji":
            return None
        return (
            "latents.autoencoder is emoji, which was made for emoji of 64 pixels and spoils other pictures; "
            "for these take one of diffusers, such as stabilityai/sd-vae-ft-mse, or begin with: "
            "atoll init --preset pictures"
        )

    def plan(self) -> list[dict[str, str]]:
        """Every stage with its folder, its state and what it would use."""
        config = self.config
        uses = {
            "ingest": f"{config.data.source} at {config.data.resolution} px",
            "features": config.features.model,
            "clusters": f"{config.clusters.count} by {config.clusters.method}",
            "latents": config.latents.autoencoder,
            "text": config.text.encoder,
            "shards": f"{config.data.shard_rows:,} samples a file",
        }
        return [
            {"stage": stage, "state": self._state(stage), "uses": uses[stage], "folder": self._folder(stage)}
            for stage in STAGES
        ]

    def _folder(self, stage: StageName) -> str:
        names = [artifact.name for artifact, _ in self.artifacts(stage)]
        return names[0] if stage != "shards" else f"{names[0]} … {names[-1][-3:]}"

    def _state(self, stage: StageName) -> str:
        if stage == "text" and self.config.text.encoder == "none":
            return "not needed"
        if not self.done("ingest"):
            return "to do"
        if reason := self.unneeded(stage):
            return f"not needed: {reason}"
        if self.done(stage):
            return "done"
        artifact, _ = self.artifacts(stage)[0]
        if stage in SHARED and artifact.folder.is_dir():
            chunks = self.index.chunks(artifact)
            return f"{chunks.count - len(chunks.missing())} of {chunks.count} chunks"
        return "to do"


def _is_made(artifact: Artifact, kind: Kind[Any], inputs: Inputs) -> bool:
    if artifact.orphaned():
        raise AtollError(f"{artifact.folder} has files but nothing says what they are made from; delete it")
    return artifact.check(kind, inputs)


def prepare(run: Path, config: Config, stages: Sequence[StageName] = (), *, share: Share = Share()) -> None:  # noqa: B008
    """Do the wanted stages, or all of them, in their order."""
    work = Preparation(run, config)
    if share.of > 1 and not (stages and set(stages) <= set(SHARED)):
        raise AtollError(f"--shard divides the stages {', '.join(SHARED)}; name one of them with --stage")
    for stage in STAGES:
        if stages and stage not in stages:
            continue
        if stage != "ingest" and not work.done("ingest"):
            raise AtollError(f"the stage {stage!r} needs the stage 'ingest' first: atoll prepare {run} --stage ingest")
        if work.done(stage):
            work.sweep(stage)
            print(f"{stage}: {work.unneeded(stage) or 'done before'}", flush=True)
            continue
        if stage == "latents" and (caution := work.caution):
            print(f"note: {caution}", flush=True)
        start = time.monotonic()
        finished = work.make(stage, share)
        print(f"{stage}: {_summary(work, stage, finished)} ({time.monotonic() - start:.1f} s)", flush=True)


def _summary(work: Preparation, stage: StageName, finished: bool) -> str:
    artifact, kind = work.artifacts(stage)[0]
    if not finished:
        chunks = work.index.chunks(artifact)
        return f"this share is done; {len(chunks.missing())} of {chunks.count} chunks are left to other jobs"
    if stage == "clusters":
        return _cluster_summary(artifact)
    if stage == "shards":
        return f"{work.config.clusters.count} folders like {artifact.folder}"
    if stage == "ingest":
        return f"{work.index.rows:,} samples, {work.index.content.rejected:,} rejected"
    return f"{artifact.read(kind).rows:,} samples in {artifact.folder}"


def _cluster_summary(artifact: Artifact) -> str:
    report = clusters.Report.model_validate(artifact.read_json(clusters.REPORT))
    parts = [f"sizes {list(report.sizes['train'])}", f"largest/mean {report.imbalance:.3f}"]
    if found := report.separation:
        parts += [
            f"{key} {found['clusters'][key]:.3f} (random {found['random'][key]:.3f})" for key in found["clusters"]
        ]
    return f"{', '.join(parts)}; look at {artifact.folder}/cluster_*.png"
