"""`atoll report RUN`: one self-contained HTML page with the images, metrics and training curves of a run."""

from collections.abc import Sequence
from pathlib import Path

from atoll.apps.evaluate.models import EvaluatedModel, evaluated_models
from atoll.apps.report.gallery import Gallery, choose_examples
from atoll.apps.report.page import page
from atoll.apps.report.summary import ReportData
from atoll.core import layout
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.ensemble import SampleSettings, parse

__all__ = ["report"]

# The routings of an evaluation by default, so that the page shows what is measured.
ROUTINGS = ("top-1", "top-2", "full")
# Settings of the last evaluation that the images of the page have, too.
SETTINGS = (
    *("steps", "guidance_scale", "guidance", "guidance_weights", "guidance_interval", "rescale", "solver", "seed"),
    "shift",
)


def report(
    run: Path,
    config: Config,
    *,
    prompts: Sequence[str] = (),
    routings: Sequence[str] = (),
    steps: int | None = None,
    guidance_scale: float | None = None,
    seed: int | None = None,
    out: Path | None = None,
) -> Path:
    """Write the page of a run and return its path. Images that do not exist yet are sampled.

    Routings and sampling settings that are not given are those of the last evaluation.
    """
    data = ReportData.read(run, config)
    if not data.experts:
        raise AtollError(f"{run} has no finished expert to report on; train with: atoll train {run} --expert K")
    evaluation = data.evaluation

    # Models: the experts with each possible routing, each expert alone, dense models
    evaluated = list(dict.fromkeys(model.routing for model in evaluation.models if model.routing)) if evaluation else []
    possible = ["top-1"]  # one expert needs no router
    if len(data.experts) > 1:
        wanted = routings or evaluated or ROUTINGS
        possible = [name for name in wanted if data.job(layout.ROUTER) or not parse(name).needs_router]
    models = evaluated_models(run, ["experts"], possible) if possible else []
    models += evaluated_models(run, ["singles"], ()) if len(data.experts) > 1 else []
    models += [EvaluatedModel(run, name) for name in layout.DENSE if data.job(name)]

    # Settings
    protocol = evaluation and evaluation.protocol
    used = {name: getattr(protocol, name) for name in SETTINGS} if protocol else {}
    given = {"steps": steps, "guidance_scale": guidance_scale, "seed": seed}
    used |= {name: value for name, value in given.items() if value is not None}
    shown = [model.routing for model in models if model.routing]
    settings = SampleSettings(**used, routing=shown[0] if shown else "top-1")

    gallery = Gallery(choose_examples(run, config.clusters.count, prompts), settings)
    rows = [gallery.row(model) for model in models]
    target = out or run / layout.REPORT_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(data, settings, gallery.examples, rows=rows), encoding="utf-8")
    return target
