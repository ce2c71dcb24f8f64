"""The sections with pictures: what the models make, what the clusters are, and who worked when."""

from html import escape

from atoll.core import layout
from atoll.evaluate.models import Subject
from atoll.report import texts
from atoll.report.charts import colour, diagram, legend, ribbon
from atoll.report.data import Findings, Job
from atoll.report.gallery import Example, Strip
from atoll.report.html import missing, picture, prose, section, tag, word

ROUTINGS = {"top-1": "the most probable expert", "top-2": "the two most probable", "full": "all of them, weighted"}


def title(subject: Subject) -> str:
    """A model's name for the head of a row."""
    if subject.model == "experts":
        about = ROUTINGS.get(subject.routing or "", "")
        note = tag("small", escape(about)) if about else ""
        return f"All experts, {escape(subject.routing or '')}{note}"
    if subject.model.startswith("expert:"):
        return f"Expert {subject.model.removeprefix('expert:')} alone"
    note = {"monolith": "one network, all data", "student": "one network, taught by the experts"}[subject.model]
    return f"{word(subject.model, subject.model.capitalize())}{tag('small', note)}"


def hero(findings: Findings, examples: list[Example], strip: Strip) -> str:
    """The first thing a reader sees: pictures."""
    pairs = zip(examples, strip.pictures, strict=True)
    cards = [
        tag("figure", picture(made, example.told), tag("figcaption", escape(example.told))) for example, made in pairs
    ]
    experts, known = len(findings.experts), findings.pictures
    data = f"{known:,} pictures" if known else "the pictures"
    lead = prose(texts.LEAD, experts=experts, data=data, routing=strip.subject.routing)
    return tag("p", lead, class_="lead") + tag("div", *cards, class_="gallery")


def method(findings: Findings) -> str:
    """What the run did, in a paragraph and a diagram."""
    source = tag("a", "Decentralized Diffusion Models", href="https://arxiv.org/abs/2501.05450")
    mixed = tag("a", "experts of different kinds", href="https://arxiv.org/abs/2603.06741")
    where = f"The method is that of {source}, extended to {mixed}."
    return section(
        "method",
        "How it works",
        tag("p", prose(texts.METHOD)),
        diagram(len(findings.experts)),
        tag("p", where, class_="note"),
    )


def strategies(findings: Findings, examples: list[Example], strips: list[Strip]) -> str:
    """The same prompts and the same noise for every model."""
    heading, run = "The same words, different models", findings.run
    absent = []
    if not any(strip.subject.model == "experts" for strip in strips):
        absent.append(missing("Experts need a router to act as one model.", f"atoll train {run} --router"))
    if findings.job("monolith") is None:
        absent.append(missing("There is no monolith.", f"atoll train {run} --monolith --match-flops {run}"))
    if not strips:
        return section("pictures", heading, *absent)
    head = [_head(example) for example in examples]
    rows = []
    if any(example.real for example in examples):
        name = f"The real picture{tag('small', 'as the autoencoder shows it')}"
        rows.append(_row(name, [picture(e.real, f"real: {e.told}") if e.real else "" for e in examples], "real"))
    for strip in strips:
        cells = [
            picture(made, f"{strip.subject.label}: {e.told}") for e, made in zip(examples, strip.pictures, strict=True)
        ]
        rows.append(_row(title(strip.subject), cells))
    splits = {example.split for example in examples}
    seen = texts.SOME_UNSEEN if "held-out" in splits else texts.ALL_SEEN if splits == {"train"} else ""
    note = f"{texts.SAME_NOISE} {prose(seen)}"
    return section("pictures", heading, tag("p", note), _grid(head, rows), *absent)


def alone(examples: list[Example], strips: list[Strip], jobs: list[Job]) -> str:
    """Each expert by itself: it knows its own cluster and nothing else."""
    rows = []
    for strip, job in zip(strips, jobs, strict=True):
        assert job.expert is not None
        cells = []
        for example, made in zip(examples, strip.pictures, strict=True):
            own = example.cluster in job.content.clusters
            style = {"class_": "own", "style": f"outline-color:{colour(job.expert)}"} if own else {}
            cells.append(picture(made, f"expert {job.expert}: {example.told}", **style))
        name = f"{_chip(job.expert)}Expert {job.expert}{tag('small', escape(job.objective))}"
        rows.append(_row(name, cells))
    return section(
        "alone",
        "Each expert alone",
        tag("p", prose(texts.ALONE)),
        _grid([_head(example) for example in examples], rows),
    )


def _chip(expert: int) -> str:
    return tag("i", class_="chip", style=f"background:{colour(expert)}")


def _head(example: Example) -> str:
    return escape(example.told) + ("&#8239;*" if example.split == "held-out" else "")


def _row(name: str, cells: list[str], kind: str = "") -> str:
    return tag("tr", tag("th", name, scope="row"), *[tag("td", cell) for cell in cells], class_=kind)


def _grid(head: list[str], rows: list[str]) -> str:
    corner = tag("td", "", class_="corner")
    top = tag("thead", tag("tr", corner, *[tag("th", tag("span", name), scope="col") for name in head]))
    return tag("div", tag("table", top, tag("tbody", *rows), class_="pictures"), class_="wide", tabindex="0")


def clusters(findings: Findings) -> str:
    """Contact sheets of the parts of the data."""
    if not findings.clusters:
        return section(
            "clusters",
            "The parts of the data",
            missing("The preparation is not here.", f"atoll prepare {findings.run}"),
        )
    cards = []
    for cluster in findings.clusters:
        job = findings.job(layout.expert_job(cluster.number))
        trained = f"{escape(job.objective)}, {job.compute.seconds:.0f} s" if job else "not trained yet"
        mostly = f"<br>mostly {escape(cluster.mostly)}" if cluster.mostly else ""
        text = (
            f"{_chip(cluster.number)}<b>Cluster {cluster.number}</b>, {cluster.size:,} pictures{mostly}"
            f"<br>expert: {trained}"
        )
        about = f"some pictures of cluster {cluster.number}"
        cards.append(tag("figure", picture(cluster.sheet, about), tag("figcaption", text)))
    return section(
        "clusters",
        "The parts of the data",
        tag("p", prose(texts.CLUSTERS[findings.config.clusters.method])),
        tag("div", *cards, class_="sheets"),
    )


def routing(findings: Findings, examples: list[Example], strip: Strip | None) -> str:
    """Whom the router believed, from noise to picture."""
    heading = "Who drew what"
    router = findings.job("router")
    if strip is None or strip.probabilities is None:
        ask = f"atoll report {findings.run} --routings top-1" if router else f"atoll train {findings.run} --router"
        why = "No router was asked for these pictures." if router else "There is no router."
        return section("routing", heading, missing(why, ask))
    experts = [job.expert for job in findings.experts if job.expert is not None]
    reads = router is not None and bool(router.content.conditioning)
    colours = [colour(expert) for expert in experts]
    rows = []
    for place, (example, made) in enumerate(zip(examples, strip.pictures, strict=True)):
        shares = strip.probabilities[:, place].tolist()
        about = f"{example.told}: probability of each expert from noise to picture"
        text = tag("div", tag("span", escape(example.told)), ribbon(shares, colours, about))
        rows.append(tag("li", text, picture(made, example.told)))
    text = prose(texts.ROUTING) + " " + (texts.ROUTER_READS if reads else texts.ROUTER_LOOKS)
    key = legend([(f"expert {expert}", colour(expert), False) for expert in experts])
    return section("routing", heading, tag("p", text), key, tag("ul", *rows, class_="ribbons"))
