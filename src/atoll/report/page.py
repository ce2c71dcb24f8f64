"""The whole page, assembled from its sections."""

import json
import shlex
from datetime import date
from html import escape
from importlib import resources

from atoll.core.layout import CONFIG_FILE
from atoll.ensemble import Settings
from atoll.evaluate.results import EvaluationResult, plain
from atoll.report import images, numbers
from atoll.report.data import ReportData, machine
from atoll.report.gallery import Example, Row
from atoll.report.html import section, tag
from atoll.report.texts import GLOSSARY

# The browser may load nothing from outside: prompts come from the data, and a page may be passed on.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
NAVIGATION = {
    "images": "Images",
    "clusters": "Clusters",
    "routing": "Routing",
    "training": "Training",
    "metrics": "Metrics",
    "diagnostics": "Diagnostics",
    "reproduce": "Reproduce",
}


def page(data: ReportData, settings: Settings, examples: list[Example], *, rows: list[Row]) -> str:
    """Return one self-contained HTML document, images first."""
    mixed = [row for row in rows if row.model.model == "experts"]
    singles = [row for row in rows if row.model.model.startswith("expert:")]
    compared = [row for row in rows if row not in singles]
    first = next((row for row in mixed if row.model.routing == settings.routing), None)
    jobs = [job for job in data.experts if f"expert:{job.expert}" in {row.model.model for row in singles}]
    body = [
        images.hero(data, examples, first) if first else "",
        images.method(data),
        images.comparison(data, examples, compared),
        images.alone(examples, singles, jobs) if singles else "",
        images.clusters(data),
        images.routing(data, examples, next((row for row in mixed if row.probabilities is not None), None)),
        numbers.losses(data),
        numbers.metrics(data),
        numbers.diagnostics(data),
        reproduce(data, settings),
        glossary(),
    ]
    subtitle = f"{len(data.experts)} expert{'s' if len(data.experts) > 1 else ''}, one model"
    return document(data.run.resolve().name, body, subtitle)


def document(name: str, body: list[str], subtitle: str) -> str:
    """Return the document: head, style and body."""
    style = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    present = [
        (anchor, title) for anchor, title in NAVIGATION.items() if any(f'id="{anchor}"' in part for part in body)
    ]
    links = tag("nav", *[tag("a", title, href=f"#{anchor}") for anchor, title in present], aria_label="Sections")
    head = tag("header", tag("p", "Atoll report", class_="kicker"), tag("h1", escape(f"{name}: {subtitle}")), links)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        '<meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{escape(name)} – Atoll report</title><style>{style}</style></head>\n'
        f"<body>{head}<main>{''.join(body)}</main></body></html>\n"
    )


def reproduce(data: ReportData, settings: Settings) -> str:
    """Return the section with machine, settings, and the commands that reproduce the run."""
    run = shlex.quote(str(data.run))
    experts = len(data.experts)
    commands = [
        f"atoll prepare {run}",
        *([f"atoll train {run} --start"] if data.job("start") else []),
        f"atoll train {run} --expert K      # K = 0 to {experts - 1}, in any order, on any machine",
    ]
    commands += [f"atoll train {run} --router"] if data.job("router") else []
    commands += [f"atoll train {run} --monolith --match-flops {run}"] if data.job("monolith") else []
    commands += [f"atoll train {run} --student"] if data.job("student") else []
    commands += [f"atoll merge {run}"] if data.job("merged") else []
    commands += [evaluate_command(data.evaluation, run)] if data.evaluation else []
    commands += [f"atoll report {run}"]
    when = (
        f"This page was written on {date.today().isoformat()} on {machine()}. "
        "The training jobs may have run on other machines."
    )
    how = (
        f"Images on this page: {settings.steps} {settings.solver} steps, guidance scale {settings.guidance_scale:g}, "
        f"seed {settings.seed}, resolution {data.config.data.resolution}, EMA weights."
    )
    credit = f"Training images: {'; '.join(data.attributions)}." if data.attributions else ""
    yaml = (data.run / CONFIG_FILE).read_text(encoding="utf-8")
    return section(
        "reproduce",
        "How to reproduce this run",
        tag("p", escape(when)),
        tag("p", escape(f"{how} {credit}")),
        tag("pre", escape("\n".join(commands)), tabindex="0"),
        tag("details", tag("summary", f"Configuration ({CONFIG_FILE})"), tag("pre", escape(yaml), tabindex="0")),
        _json(data.evaluation) if data.evaluation else "",
    )


def _json(evaluation: EvaluationResult) -> str:
    text = json.dumps(plain(evaluation), indent=1, sort_keys=True)
    return tag("details", tag("summary", "All metrics as JSON"), tag("pre", escape(text), tabindex="0"))


def evaluate_command(evaluation: EvaluationResult, run: str) -> str:
    """Return the command that computes the metrics of the page."""
    parts = [f"atoll evaluate {run}"]
    if evaluation.metrics:
        used = evaluation.metrics[0].protocol
        parts.append(f"--num-images {used.num_images} --extractors {' '.join(evaluation.extractors)}")
        parts.append(f"--reference {used.reference.split} --num-real {used.reference.num_images}")
        settings = f"--steps {used.steps} --solver {used.solver} --guidance-scale {used.guidance_scale:g}"
        parts.append(f"{settings} --seed {used.seed}")
    if spread := evaluation.diversity:
        seeds = spread.protocol.seeds_per_prompt
        parts.append(f"--diversity {spread.protocol.num_images // seeds} {seeds}")
    parts.append(f"--models {' '.join(dict.fromkeys(model.model for model in evaluation.models))}")
    if routings := [model.routing for model in evaluation.models if model.routing]:
        parts.append(f"--routings {' '.join(routings)}")
    if evaluation.prompts == "train":
        parts.append("--prompts train")
    # Without this option the same command would fail on a small set.
    return " \\\n    ".join([*parts, "--allow-small"])


def glossary() -> str:
    """Return the glossary, for readers without a mouse."""
    rows = [tag("dt", escape(term)) + tag("dd", escape(text)) for term, text in GLOSSARY.items()]
    return tag("section", tag("details", tag("summary", "Glossary"), tag("dl", *rows)), id="glossary")
