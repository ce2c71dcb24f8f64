"""The sections with numbers: loss curves, the tables of metrics and costs, and diagnostics."""

from collections.abc import Mapping
from html import escape

from atoll.core.manifests import training_costs
from atoll.evaluate.models import EvaluatedModel
from atoll.evaluate.results import ErrorMatrix, EvaluationResult, RouterMetrics
from atoll.experts.validation import TIME_BINS, Summary
from atoll.report import texts
from atoll.report.charts import Line, color, lines
from atoll.report.data import Job, ReportData
from atoll.report.html import fixed, megabytes, metric, missing, power, prose, section, table, tag, term, wide
from atoll.report.images import title

# Mean square of the velocity eps - x0 for normalized latents, Var(eps) + Var(x0): the error of predicting zero.
ZERO_ERROR = 2.0
TIME_AXIS = "t: 0 is data, 1 is noise"
DENSE = {"monolith": "var(--ink)", "student": "var(--soft)", "merged": "var(--soft)"}


def losses(data: ReportData) -> str:
    """Return the section with the loss curves, one chart for each objective."""
    kinds: dict[str, list[Job]] = {}
    for job in data.jobs:
        if job.metrics:
            kinds.setdefault(job.objective, []).append(job)
    charts = []
    for kind, jobs in kinds.items():
        series = [Line(job.title, _curve(job), _shade(job)) for job in jobs]
        charts.append(
            tag("div", tag("h3", escape(_loss_name(kind))), lines(series, "images seen", "loss", alt=f"{kind} loss"))
        )
    return section("training", "Training", tag("p", prose(texts.LOSSES)), tag("div", *charts, class_="charts"))


def _curve(job: Job) -> list[tuple[float, float]]:
    return [(line.images, line.loss) for line in job.metrics]


def _shade(job: Job) -> str:
    if job.expert is not None:
        return color(job.expert)
    return DENSE.get(job.name, "var(--ink)")


def _loss_name(kind: str) -> str:
    names = {
        "flow matching": "Flow matching: squared error of the velocity",
        "DDPM": "DDPM: squared error of the noise",
        "classification": "Router: cross-entropy",
        "distillation": "Student: squared error to the teacher",
    }
    return names.get(kind, kind)


def metrics(data: ReportData) -> str:
    """Return the section with the metrics and costs of all evaluated models, with their protocol."""
    evaluation = data.evaluation
    if evaluation is None:
        return section("metrics", "Metrics", missing("This run was not evaluated yet.", f"atoll evaluate {data.run}"))
    models = [EvaluatedModel(data.run, model.model, model.routing) for model in evaluation.models]
    parts = [
        _quality(evaluation, models),
        tag("p", escape(_protocol(evaluation)), class_="note"),
        _costs(evaluation, models),
        tag("p", _flops_share(data) + prose(texts.COSTS), class_="note"),
    ]
    return section("metrics", "Metrics", *parts)


def _quality(evaluation: EvaluationResult, models: list[EvaluatedModel]) -> str:
    names = evaluation.extractors
    head = ["model"]
    for name in names:
        head += [_distance(name), f"{term('KID')} × 1000", term("precision"), term("recall")]
    head += [term("diversity"), term("held-out error")]
    rows = []
    for index, model in enumerate(models):
        row = [title(model)]
        for name in names:
            path = ("models", index, "metrics", name)
            error = metric(evaluation, (*path, "kid", "standard_error"), fixed(1, 1000))
            row += [
                metric(evaluation, (*path, "frechet", "value"), fixed(1)),
                f"{metric(evaluation, (*path, 'kid', 'value'), fixed(1, 1000))} ± {error}",
                metric(evaluation, (*path, "precision_recall", "precision"), fixed(2)),
                metric(evaluation, (*path, "precision_recall", "recall"), fixed(2)),
            ]
        row += [metric(evaluation, ("models", index, "diversity", "mean"), fixed(3)), _held_out(evaluation, model)]
        rows.append(row)
    if names:
        rows.append(_real_baseline(evaluation, names))
    return table(head, rows, class_="metrics")


def _real_baseline(evaluation: EvaluationResult, names: list[str]) -> list[str]:
    # The baseline depends on the real images and the number of generated ones, so that of any model serves.
    index = next(i for i, model in enumerate(evaluation.models) if model.metrics)
    one = evaluation.models[index].metrics[names[0]].real_baseline
    counts = f"{one.num_images:,} vs {one.num_real:,} real images"
    row = [f"{term('real-vs-real baseline', 'Real-vs-real baseline')}{tag('small', counts)}"]
    for name in names:
        path = ("models", index, "metrics", name, "real_baseline")
        error = metric(evaluation, (*path, "kid_standard_error"), fixed(1, 1000))
        row += [metric(evaluation, (*path, "frechet"), fixed(1))]
        row += [f"{metric(evaluation, (*path, 'kid'), fixed(1, 1000))} ± {error}", "", ""]
    return [*row, "", ""]


def _held_out(evaluation: EvaluationResult, model: EvaluatedModel) -> str:
    if model.routing:
        return metric(evaluation, ("diagnostics", "experts", "velocity_error", model.routing, "mean"), fixed(3))
    return metric(evaluation, ("diagnostics", "dense", model.model, "mean"), fixed(3))


def _distance(extractor: str) -> str:
    # Only the Frechet distance in Inception features is called FID.
    if extractor.startswith("inception"):
        return term("FID")
    return f"Frechet distance{tag('small', escape(extractor))}"


def _protocol(evaluation: EvaluationResult) -> str:
    """Return how the metrics were measured."""
    parts = []
    prompts = "prompts of training images" if evaluation.prompts == "train" else "held-out prompts"
    for name in evaluation.extractors:
        used = next(model.metrics[name].protocol for model in evaluation.models if name in model.metrics)
        real = used.reference
        parts.append(
            f"Protocol ({name} features, weights {used.weights_sha256[:12]}…): {used.num_images:,} generated images "
            f"per model for {prompts} vs {real.num_images:,} real images of the {real.split} split; {used.steps} "
            f"{used.solver} steps, guidance scale {used.guidance_scale:g}, seed {used.seed}."
        )
    if parts:
        parts.append(" ".join(texts.SMALL_SETS.split()))
    if evaluation.diversity:
        spread = evaluation.diversity.protocol
        parts.append(
            f"Diversity: {spread.num_images // spread.seeds_per_prompt} prompts, {spread.seeds_per_prompt} images per "
            f"prompt; distance: {spread.distance}."
        )
    if evaluation.diagnostics:
        count = evaluation.diagnostics.protocol.num_images
        parts.append(f"Held-out error: {count:,} held-out images, each at {TIME_BINS} noise levels.")
    return " ".join(parts)


def _costs(evaluation: EvaluationResult, models: list[EvaluatedModel]) -> str:
    head = ["model", "parameters", f"training {term('FLOPs')}", "training time", "training memory"]
    head += ["FLOPs per image", "time per image", "weights"]
    rows = []
    for index, model in enumerate(models):
        training, sampling = ("models", index, "training"), ("models", index, "sampling")
        longest = metric(evaluation, (*training, "longest_job_seconds"), fixed(0))
        rows.append(
            [
                title(model),
                f"{metric(evaluation, (*training, 'parameters'), fixed(1, 1e-6))} M",
                metric(evaluation, (*training, "flops"), power),
                f"{metric(evaluation, (*training, 'seconds'), fixed(0))} s ({longest} s)",
                metric(evaluation, (*training, "memory_bytes"), megabytes),
                metric(evaluation, (*sampling, "flops"), power),
                f"{metric(evaluation, (*sampling, 'seconds'), fixed(2))} s",
                metric(evaluation, (*sampling, "weights_bytes"), megabytes),
            ]
        )
    return table(head, rows, class_="metrics")


def _flops_share(data: ReportData) -> str:
    monolith = data.job("monolith")
    if monolith is None:
        return ""
    share = monolith.compute.flops / sum(one.flops for one in training_costs(job.content for job in data.experts))
    start = "with their shared start, " if data.job("start") else ""
    return f"The monolith used {share:.1%} of the training FLOPs of all experts together ({start}without the router). "


def diagnostics(data: ReportData) -> str:
    """Return the section about router accuracy, held-out errors and expert specialization."""
    found = data.evaluation and data.evaluation.diagnostics
    if not found:
        return ""
    charts, matrix = [], ""
    if experts := found.experts:
        charts += [_accuracy(data, experts.router)] if experts.router else []
        charts.append(_errors(experts.velocity_error, found.dense))
        matrix = _matrix(data, experts.expert_on_cluster) if len(experts.expert_on_cluster.experts) > 1 else ""
    return section("diagnostics", "Diagnostics", tag("div", *charts, class_="charts"), matrix)


def _over_time(summary: Summary) -> list[tuple[float, float]]:
    """Return (center of the time bin, value) for every bin with a value."""
    width = 1 / TIME_BINS
    return [((i + 0.5) * width, value) for i, value in enumerate(summary.by_time or ()) if value is not None]


def _accuracy(data: ReportData, router: RouterMetrics) -> str:
    sizes = [cluster.held_out for cluster in data.clusters]
    series = [
        Line("accuracy", _over_time(router.accuracy), color(0)),
        Line("confidence", _over_time(router.confidence), color(1)),
    ]
    if sum(sizes):
        # A router without any information can still always choose the largest cluster.
        chance = max(sizes) / sum(sizes)
        series.append(
            Line(f"always the largest cluster: {chance:.0%}", [(0, chance), (1, chance)], "var(--soft)", True)
        )
    mean = metric(data.evaluation, ("diagnostics", "experts", "router", "accuracy", "mean"), lambda v: f"{v:.0%}")
    text = prose(texts.ROUTER, accuracy=mean)
    chart = lines(series, TIME_AXIS, "share", alt="router accuracy and confidence over time", top=1.0)
    return tag("div", tag("h3", "Router"), tag("p", text), chart)


def _errors(routed: Mapping[str, Summary], dense: Mapping[str, Summary]) -> str:
    series = [
        Line(f"experts, {routing}", _over_time(error), color(index))
        for index, (routing, error) in enumerate(routed.items())
    ]
    for name, error in dense.items():
        series.append(Line(name, _over_time(error), DENSE.get(name, "var(--ink)"), dashed=True))
    text = prose(texts.HELD_OUT)
    if min(error.mean for error in (*routed.values(), *dense.values()) if error.mean is not None) > ZERO_ERROR:
        text += " " + prose(texts.MEMORIZED, zero=ZERO_ERROR)
    chart = lines(series, TIME_AXIS, "error", alt="held-out velocity error over time")
    return tag("div", tag("h3", "Held-out velocity error"), tag("p", text), chart)


def _matrix(data: ReportData, matrix: ErrorMatrix) -> str:
    """Return the error of each expert (column) on each cluster (row) as a heat map; darker is worse."""
    rows = matrix.mean
    known = [value for row in rows for value in row if value is not None]
    low, high = min(known), max(known)
    names = matrix.experts  # of the evaluation: since then experts may have been added or removed
    body = []
    for cluster, row in enumerate(rows):
        cells = []
        for column, value in enumerate(row):
            share = 0 if value is None or high == low else (value - low) / (high - low)
            path = ("diagnostics", "experts", "expert_on_cluster", "mean", cluster, column)
            own = " own" if names[column] == cluster else ""
            shown = metric(data.evaluation, path, fixed(2))
            cells.append(tag("td", shown, class_=f"heat{own}", style=f"--heat:{share:.2f}"))
        body.append(tag("tr", tag("th", f"cluster {cluster}", scope="row"), *cells))
    top = tag(
        "tr",
        tag("th", "held-out images of", scope="col"),
        *[tag("th", f"expert {name}", scope="col") for name in names],
    )
    text = prose(texts.MATRIX)
    if len({job.objective for job in data.experts}) > 1:
        text += " " + prose(texts.MIXED_OBJECTIVES)
    grid = wide(tag("table", tag("thead", top), tag("tbody", *body), class_="matrix"))
    return tag("h3", "Expert errors by cluster") + tag("p", text) + grid
