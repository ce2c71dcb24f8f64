"""The sections with numbers: loss curves, the table of figures, and diagnostics."""

from collections.abc import Mapping
from html import escape

from atoll.evaluate.models import Subject
from atoll.evaluate.results import ErrorMatrix, EvaluationResult, RouterMetrics
from atoll.experts.validation import TIME_BINS, Summary
from atoll.report import texts
from atoll.report.charts import Line, colour, lines
from atoll.report.data import Findings, Job
from atoll.report.html import fixed, megabytes, missing, number, power, prose, section, table, tag, word
from atoll.report.images import title

NO_ANSWER = 2.0
"""Mean square of a velocity eps - x0 in normalised latents: the error of the answer 0."""
DENSE = {"monolith": "var(--ink)", "student": "var(--soft)"}


def losses(findings: Findings) -> str:
    """One chart for each kind of loss: losses of different objectives cannot be compared."""
    kinds: dict[str, list[Job]] = {}
    for job in findings.jobs:
        if job.metrics:
            kinds.setdefault(job.objective, []).append(job)
    charts = []
    for kind, jobs in kinds.items():
        series = [Line(job.title, _curve(job), _shade(job)) for job in jobs]
        charts.append(
            tag("div", tag("h3", escape(_loss_name(kind))), lines(series, "samples seen", "loss", about=f"{kind} loss"))
        )
    return section("training", "Training", tag("p", prose(texts.LOSSES)), tag("div", *charts, class_="charts"))


def _curve(job: Job) -> list[tuple[float, float]]:
    return [(line.images, line.loss) for line in job.metrics]


def _shade(job: Job) -> str:
    if job.expert is not None:
        return colour(job.expert)
    return DENSE.get(job.name, "var(--ink)")


def _loss_name(kind: str) -> str:
    names = {
        "flow matching": "Flow matching: error of the direction",
        "DDPM": "DDPM: error of the noise",
        "classification": "Router: cross-entropy",
        "distillation": "Student: distance to its teachers",
    }
    return names.get(kind, kind)


def figures(findings: Findings) -> str:
    """The table DDM / monolith / single experts / student, with protocol."""
    evaluation = findings.evaluation
    if evaluation is None:
        return section("figures", "Figures", missing("Nothing was measured yet.", f"atoll evaluate {findings.run}"))
    subjects = [Subject(findings.run, model.model, model.routing) for model in evaluation.models]
    parts = [_quality(evaluation, subjects), _protocol(evaluation), _costs(evaluation, subjects)]
    equal = _equal_flops(findings)
    return section("figures", "Figures", *parts, tag("p", equal + prose(texts.COSTS), class_="note"))


def _quality(evaluation: EvaluationResult, subjects: list[Subject]) -> str:
    names = evaluation.extractors
    head = [""]
    for name in names:
        head += [_distance(name), f"{word('KID')} × 1000", "precision", "recall"]
    head += [word("diversity"), "held-out error"]
    rows = []
    for place, subject in enumerate(subjects):
        row = [title(subject)]
        for name in names:
            at = ("models", place, "metrics", name)
            error = number(evaluation, (*at, "kid", "standard_error"), fixed(1, 1000))
            row += [
                number(evaluation, (*at, "frechet", "value"), fixed(1)),
                f"{number(evaluation, (*at, 'kid', 'value'), fixed(1, 1000))} ± {error}",
                number(evaluation, (*at, "precision_recall", "precision"), fixed(2)),
                number(evaluation, (*at, "precision_recall", "recall"), fixed(2)),
            ]
        row += [number(evaluation, ("models", place, "diversity", "mean"), fixed(3)), _held_out(evaluation, subject)]
        rows.append(row)
    if names:
        rows.append(_floor(evaluation, names))
    return table(head, rows, class_="figures")


def _floor(evaluation: EvaluationResult, names: list[str]) -> list[str]:
    place = next(i for i, model in enumerate(evaluation.models) if model.metrics)
    one = evaluation.models[place].metrics[names[0]].floor
    counts = f"{one.real_pictures:,} real against {one.against_real_pictures:,} real"
    row = [f"{word('floor', 'Floor')}{tag('small', counts)}"]
    for name in names:
        at = ("models", place, "metrics", name, "floor")
        error = number(evaluation, (*at, "kid_standard_error"), fixed(1, 1000))
        row += [number(evaluation, (*at, "frechet"), fixed(1))]
        row += [f"{number(evaluation, (*at, 'kid'), fixed(1, 1000))} ± {error}", "", ""]
    return [*row, "", ""]


def _held_out(evaluation: EvaluationResult, subject: Subject) -> str:
    if subject.routing:
        return number(evaluation, ("diagnostics", "experts", "velocity_error", subject.routing, "mean"), fixed(3))
    return number(evaluation, ("diagnostics", "dense", subject.model, "mean"), fixed(3))


def _distance(extractor: str) -> str:
    if extractor.startswith("inception"):
        return word("FID")
    return f"Frechet distance{tag('small', escape(extractor))}"


def _protocol(evaluation: EvaluationResult) -> str:
    """How the metrics of quality were taken, right under them."""
    parts = []
    asked = "prompts of the training data" if evaluation.prompts == "train" else "prompts that no training saw"
    for name in evaluation.extractors:
        used = next(model.metrics[name].protocol for model in evaluation.models if name in model.metrics)
        real = used.reference
        parts.append(
            f"{used.samples:,} pictures of each model for {asked}, seed {used.seed}, "
            f"{used.steps} steps of {used.solver}, guidance {used.guidance_scale:g}, against {real.pictures:,} "
            f"real pictures ({real.split}), seen through {name} (weights {used.weights_sha256[:12]}…). {texts.FEW}"
        )
    if evaluation.diversity:
        spread = evaluation.diversity.protocol
        parts.append(
            f"Diversity: {spread.samples // spread.seeds_per_prompt} prompts, {spread.seeds_per_prompt} "
            f"pictures of each, {spread.distance}."
        )
    if evaluation.diagnostics:
        held = evaluation.diagnostics.protocol.held_out_samples
        parts.append(
            f"Held-out error: of the velocity, on {held:,} pictures that no training saw, noised at ten times each."
        )
    return tag("p", escape(" ".join(parts)), class_="note")


def _costs(evaluation: EvaluationResult, subjects: list[Subject]) -> str:
    head = [
        "",
        "parameters",
        f"training {word('FLOPs')}",
        "training time",
        "memory",
        "FLOPs a picture",
        "time a picture",
        "weights",
    ]
    rows = []
    for place, subject in enumerate(subjects):
        spent, made = ("models", place, "training"), ("models", place, "sampling")
        longest = number(evaluation, (*spent, "longest_job_seconds"), fixed(0))
        rows.append(
            [
                title(subject),
                f"{number(evaluation, (*spent, 'parameters'), fixed(1, 1e-6))} M",
                number(evaluation, (*spent, "flops"), power),
                f"{number(evaluation, (*spent, 'seconds'), fixed(0))} s ({longest} s)",
                number(evaluation, (*spent, "estimated_bytes"), megabytes),
                number(evaluation, (*made, "flops"), power),
                f"{number(evaluation, (*made, 'seconds'), fixed(2))} s",
                number(evaluation, (*made, "weights_bytes"), megabytes),
            ]
        )
    return table(head, rows, class_="figures")


def _equal_flops(findings: Findings) -> str:
    monolith = findings.job("monolith")
    if monolith is None:
        return ""
    spent = sum(job.compute.flops for job in findings.experts)
    share = monolith.compute.flops / spent
    return f"The monolith was trained with {share:.1%} of the FLOPs of all experts together, the router not counted. "


def diagnostics(findings: Findings) -> str:
    """Whether the router is right, and whether each expert knows its own cluster best."""
    found = findings.evaluation and findings.evaluation.diagnostics
    if not found:
        return ""
    charts, matrix = [], ""
    if experts := found.experts:
        charts += [_accuracy(findings, experts.router)] if experts.router else []
        charts.append(_errors(experts.velocity_error, found.dense))
        matrix = _matrix(findings, experts.expert_on_cluster) if len(experts.expert_on_cluster.experts) > 1 else ""
    return section("diagnostics", "Does it work as it should?", tag("div", *charts, class_="charts"), matrix)


def _over_time(metric: Summary) -> list[tuple[float, float]]:
    width = 1 / TIME_BINS
    return [((place + 0.5) * width, value) for place, value in enumerate(metric.by_time or ()) if value is not None]


def _accuracy(findings: Findings, router: RouterMetrics) -> str:
    sizes = [cluster.held_out for cluster in findings.clusters]
    series = [
        Line("router is right", _over_time(router.accuracy), colour(0)),
        Line("its own confidence", _over_time(router.confidence), colour(1)),
    ]
    if sum(sizes):
        chance = max(sizes) / sum(sizes)
        series.append(
            Line(f"always the largest cluster ({chance:.0%})", [(0, chance), (1, chance)], "var(--soft)", True)
        )
    mean = number(findings.evaluation, ("diagnostics", "experts", "router", "accuracy", "mean"), lambda v: f"{v:.0%}")
    text = prose(texts.ROUTER, accuracy=mean)
    chart = lines(series, "noise: 0 is the picture, 1 is noise", "share", about="router accuracy by time", top=1.0)
    return tag("div", tag("h3", "Router"), tag("p", text), chart)


def _errors(routed: Mapping[str, Summary], dense: Mapping[str, Summary]) -> str:
    series = [
        Line(f"experts, {routing}", _over_time(error), colour(place))
        for place, (routing, error) in enumerate(routed.items())
    ]
    for name, error in dense.items():
        series.append(Line(name, _over_time(error), DENSE.get(name, "var(--ink)"), dashed=True))
    text = prose(texts.HELD_OUT)
    if min(error.mean for error in (*routed.values(), *dense.values()) if error.mean is not None) > NO_ANSWER:
        text += " " + prose(texts.BY_HEART, nothing=NO_ANSWER)
    chart = lines(series, "noise: 0 is the picture, 1 is noise", "error", about="held-out error by time")
    return tag("div", tag("h3", "Held-out error"), tag("p", text), chart)


def _matrix(findings: Findings, matrix: ErrorMatrix) -> str:
    """Error of each expert (column) on each cluster (row); darker is worse."""
    rows = matrix.mean
    known = [value for row in rows for value in row if value is not None]
    low, high = min(known), max(known)
    names = matrix.experts  # those of the evaluation: others may be finished by now
    body = []
    for cluster, row in enumerate(rows):
        cells = []
        for place, value in enumerate(row):
            share = 0 if value is None or high == low else (value - low) / (high - low)
            at = ("diagnostics", "experts", "expert_on_cluster", "mean", cluster, place)
            own = " own" if names[place] == cluster else ""
            shown = number(findings.evaluation, at, fixed(2))
            cells.append(tag("td", shown, class_=f"heat{own}", style=f"--heat:{share:.2f}"))
        body.append(tag("tr", tag("th", f"cluster {cluster}", scope="row"), *cells))
    top = tag("tr", tag("td", ""), *[tag("th", f"expert {name}", scope="col") for name in names])
    text = prose(texts.MATRIX)
    if len({job.objective for job in findings.experts}) > 1:
        text += " " + prose(texts.MIXED)
    grid = tag(
        "div", tag("table", tag("thead", top), tag("tbody", *body), class_="matrix"), class_="wide", tabindex="0"
    )
    return tag("h3", "Experts at home and abroad") + tag("p", text) + grid
