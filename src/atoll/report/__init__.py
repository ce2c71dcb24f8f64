"""`atoll report RUN`: one self-contained HTML page that tells what happened in a run, pictures first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.core import layout
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.ensemble import Settings, parse
from atoll.evaluate.models import Subject, finished, subjects
from atoll.evaluate.results import EvaluationResult
from atoll.report.data import Findings
from atoll.report.gallery import Showcase, choose
from atoll.report.page import page

__all__ = ["Options", "report"]

ROUTINGS = ("top-1", "top-2", "full")


@dataclass(frozen=True)
class Options:
    """What the page shows. None is as the last evaluation did it."""

    prompts: tuple[str, ...] = ()
    routings: tuple[str, ...] | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    seed: int | None = None


def report(run: Path, config: Config, options: Options | None = None, *, out: Path | None = None) -> Path:
    """Write the page of a run and return where it is; pictures that are not there yet are drawn."""
    options, findings = options or Options(), Findings.read(run, config)
    if not findings.experts:
        raise AtollError(f"{run} has no finished expert to report on; train with: atoll train {run} --expert K")
    evaluation = findings.evaluation
    settings = _settings(evaluation, options)
    measured = [model.routing for model in evaluation.models if model.routing] if evaluation else []
    shown = _subjects(run, options.routings or measured or ROUTINGS)
    routings = [subject.routing for subject in shown if subject.routing]
    settings = replace(settings, routing=routings[0] if routings else "top-1")
    showcase = Showcase(choose(run, config.clusters.count, options.prompts), settings)
    strips = [showcase.strip(subject) for subject in shown]
    target = out or run / layout.REPORT_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(findings, settings, showcase.examples, strips=strips), encoding="utf-8")
    return target


def _subjects(run: Path, routings: Sequence[str]) -> list[Subject]:
    """Whose pictures are shown: the experts together, as far as a router allows, each alone, and the dense models."""
    there = finished(run)
    found: list[Subject] = []
    experts = [name for name in there if layout.is_expert(name)]
    possible = [routing for routing in routings if "router" in there or not parse(routing).needs_router]
    possible = possible if len(experts) > 1 else ["top-1"]  # one expert needs no router
    if possible:
        found += subjects(run, ["experts"], possible)
    found += subjects(run, ["singles"], routings) if len(experts) > 1 else []
    return found + [Subject(run, name) for name in ("monolith", "student") if name in there]


def _settings(evaluation: EvaluationResult | None, options: Options) -> Settings:
    """Return the settings of the last evaluation, unless the options say otherwise."""
    protocol = evaluation and evaluation.protocol
    last = {key: getattr(protocol, key) for key in ("steps", "guidance_scale", "solver", "seed")} if protocol else {}
    wanted = {"steps": options.steps, "guidance_scale": options.guidance_scale, "seed": options.seed}
    return Settings(**last | {key: value for key, value in wanted.items() if value is not None})
