"""The page of a report: `page.html`, filled with the data of a run. All of its text is in that template."""

import base64
import io
import json
import shlex
from datetime import date

from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image
from torch import Tensor

from atoll.apps.evaluate.results import Diagnostics, EvaluationResult, plain
from atoll.apps.evaluate.table import number, tables
from atoll.apps.report.charts import Chart, Line, color, ticks
from atoll.apps.report.gallery import Example, GalleryRow
from atoll.apps.report.summary import JobSummary, ReportData, machine
from atoll.core.layout import CONFIG_FILE
from atoll.ensemble import SampleSettings
from atoll.experts.validation import TIME_BINS, Summary

# Images up to this many pixels a side are stored as PNG, without loss. Larger ones would make the page heavy: WebP at
# quality 88 is a fraction of the size, without visible artifacts.
SMALL = 256
# Mean square of the velocity eps - x0 for normalized latents, Var(eps) + Var(x0): the error of predicting zero.
ZERO_ERROR = 2.0
TIME_AXIS = "t: 0 is data, 1 is noise"
DENSE = {"monolith": "var(--ink)", "student": "var(--soft)", "merged": "var(--soft)"}
LOSSES = {
    "flow matching": "Flow matching: squared error of the velocity",
    "DDPM": "DDPM: squared error of the noise",
    "classification": "Router: cross-entropy",
    "distillation": "Student: squared error to the teacher",
}


def page(data: ReportData, settings: SampleSettings, examples: list[Example], *, rows: list[GalleryRow]) -> str:
    """Return one self-contained HTML document, images first."""
    environment = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,  # prompts and class names come from the data
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    evaluation = data.evaluation
    diagnostics = evaluation and evaluation.diagnostics
    singles = [row for row in rows if row.model.model.startswith("expert:")]
    mixed = [row for row in rows if row.model.model == "experts"]
    return environment.get_template("page.html").render(
        # the run
        data=data,
        settings=settings,
        run=shlex.quote(str(data.run)),
        yaml=(data.run / CONFIG_FILE).read_text(encoding="utf-8"),
        today=date.today().isoformat(),
        machine=machine(),
        # images
        examples=examples,
        splits=list({example.split for example in examples}),
        compared=[row for row in rows if row not in singles],
        singles=[(row, job) for row in singles for job in data.experts if row.model.model == f"expert:{job.expert}"],
        first=next((row for row in mixed if row.model.routing == settings.routing), None),
        routed=next((row for row in mixed if row.probabilities is not None), None),
        inline=inline,
        open=Image.open,
        band=band,
        color=color,
        ticks=ticks,
        # numbers
        losses=losses(data),
        evaluation=evaluation,
        tables=tables(evaluation) if evaluation else [],
        steps_charts=steps_charts(evaluation) if evaluation else {},
        json=json.dumps(plain(evaluation), indent=1, sort_keys=True) if evaluation else "",
        diagnostics=diagnostics,
        charts=diagnostic_charts(data, diagnostics) if diagnostics else {},
        number=number,
        zero_error=ZERO_ERROR,
        time_bins=TIME_BINS,
    )


def inline(image: Image.Image) -> str:
    """Return an image as an address: small ones as PNG, large ones as WebP."""
    buffer, kind = io.BytesIO(), "PNG" if max(image.size) <= SMALL else "WEBP"
    image.convert("RGB").save(buffer, kind, quality=88, optimize=True)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def band(probabilities: Tensor, column: int) -> list[str]:
    """Return the polygons of a stacked area chart of 100 x 20; probabilities (steps, N, experts)."""
    shares = probabilities[:, column].tolist()
    step, below, found = 100 / max(1, len(shares) - 1), [0.0] * len(shares), []
    # A polygon is its upper edge from left to right, then its lower edge back.
    for expert in range(len(shares[0])):
        above = [low + row[expert] for low, row in zip(below, shares, strict=True)]
        edge, back = ([f"{i * step:.2f},{20 * (1 - y):.2f}" for i, y in enumerate(ys)] for ys in (above, below))
        found.append(" ".join(edge + back[::-1]))
        below = above
    return found


def losses(data: ReportData) -> dict[str, Chart]:
    """Return the loss curves by title, one chart for each objective."""
    kinds: dict[str, list[JobSummary]] = {}
    for job in data.jobs:
        if job.metrics:
            kinds.setdefault(job.objective, []).append(job)
    found = {}
    for kind, jobs in kinds.items():
        lines = []
        for job in jobs:
            shade = DENSE.get(job.name, "var(--ink)") if job.expert is None else color(job.expert)
            lines.append(Line(job.title, [(line.images, line.loss) for line in job.metrics], shade))
        found[LOSSES.get(kind, kind)] = Chart(lines, "images seen", "loss", f"{kind} loss")
    return found


def steps_charts(found: EvaluationResult) -> dict[str, Chart]:
    """Return KID over network evaluations by feature network, if several numbers of steps were compared.

    Models and routings have colors; solvers after the first one are dashed.
    """
    charts = {}
    solvers = list(dict.fromkeys(protocol.solver for protocol in found.protocols))
    for extractor in found.extractors:
        points: dict[tuple[str, str | None, str], list[tuple[float, float]]] = {}
        for row in found.models:
            metrics = row.metrics[extractor]
            if row.variant and row.sampling and metrics.kid:
                line = points.setdefault((row.model, row.routing, metrics.protocol.solver), [])
                line.append((row.sampling.network_evaluations, 1000 * metrics.kid.value))
        routings = list(dict.fromkeys(routing for _, routing, _ in points if routing))
        lines = []
        for (model, routing, solver), line in points.items():
            name = " ".join([model, *filter(None, [routing]), *([solver] if len(solvers) > 1 else [])])
            shade = color(routings.index(routing)) if routing else DENSE.get(model, "var(--soft)")
            lines.append(Line(name, sorted(line), shade, dashed=solver != solvers[0]))
        if lines:
            label = f"KID over network evaluations, {extractor} features"
            charts[label] = Chart(lines, "network evaluations per image", "KID × 1000", label, log_x=True)
    return charts


def diagnostic_charts(data: ReportData, found: Diagnostics) -> dict[str, Chart]:
    """Return the charts over time: of the router, and of the validation errors."""
    charts: dict[str, Chart] = {}
    if found.experts is None:
        return charts
    if router := found.experts.router:
        lines = [
            Line("accuracy", _over_time(router.accuracy), color(0)),
            Line("confidence", _over_time(router.confidence), color(1)),
        ]
        sizes = [cluster.validation for cluster in data.clusters]
        if sum(sizes):
            # A router without any information can still always choose the largest cluster.
            chance = max(sizes) / sum(sizes)
            name = f"always the largest cluster: {chance:.0%}"
            lines.append(Line(name, [(0, chance), (1, chance)], "var(--soft)", True))
        charts["router"] = Chart(lines, TIME_AXIS, "share", "router accuracy and confidence over time", top=1.0)
    routed = found.experts.velocity_error.items()
    lines = [Line(f"experts, {name}", _over_time(error), color(i)) for i, (name, error) in enumerate(routed)]
    for name, error in found.dense.items():
        lines.append(Line(name, _over_time(error), DENSE.get(name, "var(--ink)"), dashed=True))
    charts["errors"] = Chart(lines, TIME_AXIS, "error", "validation velocity error over time")
    return charts


def _over_time(summary: Summary) -> list[tuple[float, float]]:
    """Return (center of the time bin, value) for every bin with a value."""
    return [((i + 0.5) / TIME_BINS, value) for i, value in enumerate(summary.by_time or ()) if value is not None]
