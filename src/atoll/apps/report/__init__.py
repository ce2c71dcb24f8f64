"""`atoll report RUN`: one self-contained HTML page with the images, metrics and training curves of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.apps.evaluate.models import EvaluatedModel, evaluated_models, finished_jobs
from atoll.apps.evaluate.results import EvaluationResult
from atoll.apps.report.data import ReportData
from atoll.apps.report.gallery import Gallery, choose_examples
from atoll.apps.report.page import page
from atoll.core import layout
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.ensemble import Settings, parse

__all__ = ["Options", "report"]

# The routings of an evaluation by default, so that the page shows what is measured.
ROUTINGS = ("top-1", "top-2", "full")


@dataclass(frozen=True)
class Options:
    """The options of the page. None means the value of the last evaluation."""

    prompts: tuple[str, ...] = ()
    routings: tuple[str, ...] | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    seed: int | None = None


def report(run: Path, config: Config, options: Options | None = None, *, out: Path | None = None) -> Path:
    """Write the page of a run and return its path. Images that do not exist yet are sampled."""
    options, data = options or Options(), ReportData.read(run, config)
    if not data.experts:
        raise AtollError(f"{run} has no finished expert to report on; train with: atoll train {run} --expert K")
    evaluation = data.evaluation
    settings = _settings(evaluation, options)
    evaluated = [model.routing for model in evaluation.models if model.routing] if evaluation else []
    models = _models(run, options.routings or evaluated or ROUTINGS)
    routings = [model.routing for model in models if model.routing]
    settings = replace(settings, routing=routings[0] if routings else "top-1")
    gallery = Gallery(choose_examples(run, config.clusters.count, options.prompts), settings)
    rows = [gallery.row(model) for model in models]
    target = out or run / layout.REPORT_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(data, settings, gallery.examples, rows=rows), encoding="utf-8")
    return target


def _models(run: Path, routings: Sequence[str]) -> list[EvaluatedModel]:
    """Return the models of the gallery: the experts with each possible routing, each expert alone, dense models."""
    jobs = finished_jobs(run)
    found: list[EvaluatedModel] = []
    experts = [name for name in jobs if layout.is_expert(name)]
    possible = [routing for routing in routings if "router" in jobs or not parse(routing).needs_router]
    possible = possible if len(experts) > 1 else ["top-1"]  # one expert needs no router
    if possible:
        found += evaluated_models(run, ["experts"], possible)
    found += evaluated_models(run, ["singles"], routings) if len(experts) > 1 else []
    return found + [EvaluatedModel(run, name) for name in layout.DENSE if name in jobs]


def _settings(evaluation: EvaluationResult | None, options: Options) -> Settings:
    """Return the settings of the last evaluation, with those of the options in their place."""
    protocol = evaluation and evaluation.protocol
    used = ("steps", "guidance_scale", "guidance_weights", "solver", "seed")
    last = {key: getattr(protocol, key) for key in used} if protocol else {}
    given = {"steps": options.steps, "guidance_scale": options.guidance_scale, "seed": options.seed}
    return Settings(**last | {key: value for key, value in given.items() if value is not None})
