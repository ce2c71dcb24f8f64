"""The whole page, from its sections."""

import json
import shlex
from datetime import date
from html import escape
from importlib import resources

from atoll.core.layout import CONFIG_FILE
from atoll.ensemble import Settings
from atoll.evaluate.results import EvaluationResult, plain
from atoll.report import images, numbers
from atoll.report.data import Findings, machine
from atoll.report.gallery import Example, Strip
from atoll.report.html import section, tag
from atoll.report.texts import GLOSSARY

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""What a browser may load for the page: nothing that is not inside it."""
PARTS = {
    "pictures": "Pictures",
    "clusters": "Data",
    "routing": "Routing",
    "training": "Training",
    "figures": "Figures",
    "diagnostics": "Diagnostics",
    "measured": "How measured",
}


def page(findings: Findings, settings: Settings, examples: list[Example], *, strips: list[Strip]) -> str:
    """One self-contained document; pictures first."""
    mixed = [strip for strip in strips if strip.subject.model == "experts"]
    singles = [strip for strip in strips if strip.subject.model.startswith("expert:")]
    shared = [strip for strip in strips if strip not in singles]
    first = next((strip for strip in mixed if strip.subject.routing == settings.routing), None)
    jobs = [job for job in findings.experts if f"expert:{job.expert}" in {strip.subject.model for strip in singles}]
    body = [
        images.hero(findings, examples, first) if first else "",
        images.method(findings),
        images.strategies(findings, examples, shared),
        images.alone(examples, singles, jobs) if singles else "",
        images.clusters(findings),
        images.routing(findings, examples, next((strip for strip in mixed if strip.probabilities is not None), None)),
        numbers.losses(findings),
        numbers.figures(findings),
        numbers.diagnostics(findings),
        measured(findings, settings),
        glossary(),
    ]
    return document(findings.run.resolve().name, body, f"{len(findings.experts)} experts, one model")


def document(name: str, body: list[str], subtitle: str) -> str:
    """Head, style and body."""
    style = resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    present = [(anchor, title) for anchor, title in PARTS.items() if any(f'id="{anchor}"' in part for part in body)]
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


def measured(findings: Findings, settings: Settings) -> str:
    """On what machine, with which settings, and the commands that repeat it."""
    run = shlex.quote(str(findings.run))
    experts = len(findings.experts)
    commands = [
        f"atoll prepare {run}",
        f"atoll train {run} --expert 0      # … to --expert {experts - 1}, in any order, on any machine",
    ]
    commands += [f"atoll train {run} --router"] if findings.job("router") else []
    commands += [f"atoll train {run} --monolith --match-flops {run}"] if findings.job("monolith") else []
    commands += [f"atoll train {run} --student"] if findings.job("student") else []
    commands += [evaluate_command(findings.evaluation, run)] if findings.evaluation else []
    commands += [f"atoll report {run}"]
    when = (
        f"This page was made on {date.today().isoformat()} on {machine()}. "
        "Jobs may have run elsewhere; their times are their own."
    )
    how = (
        f"Pictures on this page: {settings.steps} steps of {settings.solver}, guidance {settings.guidance_scale:g}, "
        f"seed {settings.seed}, resolution {findings.config.data.resolution}, averaged weights."
    )
    makers = f"Training pictures: {'; '.join(findings.makers)}." if findings.makers else ""
    yaml = (findings.run / CONFIG_FILE).read_text(encoding="utf-8")
    return section(
        "measured",
        "What was measured, and how to repeat it",
        tag("p", escape(when)),
        tag("p", escape(f"{how} {makers}")),
        tag("pre", escape("\n".join(commands)), tabindex="0"),
        tag("details", tag("summary", f"Settings of the run ({CONFIG_FILE})"), tag("pre", escape(yaml), tabindex="0")),
        _raw(findings.evaluation) if findings.evaluation else "",
    )


def _raw(evaluation: EvaluationResult) -> str:
    text = json.dumps(plain(evaluation), indent=1, sort_keys=True)
    return tag("details", tag("summary", "All figures as JSON"), tag("pre", escape(text), tabindex="0"))


def evaluate_command(evaluation: EvaluationResult, run: str) -> str:
    """Return the command that gives the metrics of the page."""
    parts = [f"atoll evaluate {run}"]
    if evaluation.metrics:
        used = evaluation.metrics[0].protocol
        how = f"--steps {used.steps} --guidance-scale {used.guidance_scale:g} --seed {used.seed} --solver {used.solver}"
        how += f" --reference {used.reference.split} --num-real {used.reference.pictures}"
        parts.append(f"--num-images {used.samples} {how} --extractors {' '.join(evaluation.extractors)}")
    if spread := evaluation.diversity:
        seeds = spread.protocol.seeds_per_prompt
        parts.append(f"--diversity {spread.protocol.samples // seeds} {seeds}")
    parts.append(f"--models {' '.join(dict.fromkeys(model.model for model in evaluation.models))}")
    if routings := [model.routing for model in evaluation.models if model.routing]:
        parts.append(f"--routings {' '.join(routings)}")
    if evaluation.prompts == "train":
        parts.append("--prompts train")
    return " ".join([*parts, "--allow-small"])


def glossary() -> str:
    """The words, once more, for readers without a mouse."""
    rows = [tag("dt", escape(term)) + tag("dd", escape(text)) for term, text in GLOSSARY.items()]
    return tag("section", tag("details", tag("summary", "Glossary"), tag("dl", *rows)), id="glossary")
