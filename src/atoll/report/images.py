"""The sections with images: the gallery, the clusters, and the routing over time."""

from html import escape

from atoll.core import layout
from atoll.evaluate.models import EvaluatedModel
from atoll.report import texts
from atoll.report.charts import band, color, diagram, legend
from atoll.report.data import Job, ReportData
from atoll.report.gallery import Example, Row
from atoll.report.html import img, missing, prose, section, tag, term, wide

ROUTINGS = {"top-1": "the most probable expert", "top-2": "the two most probable experts", "full": "all experts"}


def title(model: EvaluatedModel) -> str:
    """Return the name of a model for the head of a row."""
    if model.model == "experts":
        about = ROUTINGS.get(model.routing or "", "")
        note = tag("small", escape(about)) if about else ""
        return f"Experts, {escape(model.routing or '')}{note}"
    if model.model.startswith("expert:"):
        return f"Expert {model.model.removeprefix('expert:')} alone"
    notes = {"monolith": "one network, all data", "student": "distilled from the experts"}
    note = {**notes, "merged": "average of the experts"}[model.model]
    return f"{term(model.model, model.model.capitalize())}{tag('small', note)}"


def hero(data: ReportData, examples: list[Example], row: Row) -> str:
    """Return the top of the page: one paragraph and the images of the ensemble."""
    cards = [
        tag("figure", img(image, example.prompt), tag("figcaption", escape(example.prompt)))
        for example, image in zip(examples, row.images, strict=True)
    ]
    experts = f"{len(data.experts)} expert{'s' if len(data.experts) > 1 else ''}"
    images = f"{data.num_images:,} images" if data.num_images else "the training images"
    lead = prose(texts.LEAD, experts=experts, data=images, routing=row.model.routing)
    return tag("p", lead, class_="lead") + tag("div", *cards, class_="gallery")


def method(data: ReportData) -> str:
    """Return the section that explains the method."""
    ddm = tag("a", "Decentralized Diffusion Models", href="https://arxiv.org/abs/2501.05450")
    hddm = tag("a", "Heterogeneous Decentralized Diffusion Models", href="https://arxiv.org/abs/2603.06741")
    return section(
        "method",
        "Method",
        tag("p", prose(texts.METHOD)),
        tag("p", escape(texts.EQUATION), class_="equation"),
        wide(diagram(len(data.experts))),
        tag("p", prose(texts.BASELINE)),
        tag("p", f"Papers: {ddm} and {hddm}.", class_="note"),
    )


def comparison(data: ReportData, examples: list[Example], rows: list[Row]) -> str:
    """Return the section with the same prompts and the same noise for every model."""
    heading, run = "Same prompts, different models", data.run
    absent = []
    if not any(row.model.model == "experts" for row in rows):
        absent.append(missing("The experts cannot be combined without a router.", f"atoll train {run} --router"))
    if data.job("monolith") is None:
        absent.append(missing("This run has no monolith.", f"atoll train {run} --monolith --match-flops {run}"))
    if not rows:
        return section("images", heading, *absent)
    body = []
    if any(example.real for example in examples):
        name = f"Real image{tag('small', 'decoded from its latent')}"
        body.append(_row(name, [img(e.real, f"real: {e.prompt}") if e.real else "" for e in examples], "real"))
    for row in rows:
        cells = [img(image, f"{row.model.label}: {e.prompt}") for e, image in zip(examples, row.images, strict=True)]
        body.append(_row(title(row.model), cells))
    splits = {example.split for example in examples}
    seen = texts.SOME_HELD_OUT if "held-out" in splits else texts.ALL_TRAINED if splits == {"train"} else ""
    note = f"{texts.SAME_NOISE} {prose(seen)}"
    return section("images", heading, tag("p", note), _grid(examples, body), *absent)


def alone(examples: list[Example], rows: list[Row], jobs: list[Job]) -> str:
    """Return the section with the images of each expert alone."""
    body = []
    for row, job in zip(rows, jobs, strict=True):
        assert job.expert is not None
        cells = []
        for example, image in zip(examples, row.images, strict=True):
            own = example.cluster in job.content.clusters
            style = {"class_": "own", "style": f"outline-color:{color(job.expert)}"} if own else {}
            cells.append(img(image, f"expert {job.expert}: {example.prompt}", **style))
        name = f"{_chip(job.expert)}Expert {job.expert}{tag('small', escape(job.objective))}"
        body.append(_row(name, cells))
    return section("alone", "Each expert alone", tag("p", prose(texts.ALONE)), _grid(examples, body))


def _chip(expert: int) -> str:
    return tag("i", class_="chip", style=f"background:{color(expert)}")


def _row(name: str, cells: list[str], kind: str = "") -> str:
    return tag("tr", tag("th", name, scope="row"), *[tag("td", cell) for cell in cells], class_=kind)


def _grid(examples: list[Example], rows: list[str]) -> str:
    """Return a table of images with a column for each example; * marks held-out prompts."""
    # A narrow no-break space keeps the * on the line of the last word.
    prompts = [escape(e.prompt) + ("&#8239;*" if e.split == "held-out" else "") for e in examples]
    corner = tag("th", "model", class_="corner", scope="col")
    top = tag("thead", tag("tr", corner, *[tag("th", tag("span", prompt), scope="col") for prompt in prompts]))
    return wide(tag("table", top, tag("tbody", *rows), class_="images"))


def clusters(data: ReportData) -> str:
    """Return the section with the contact sheets of the clusters."""
    heading = "Clusters of the training data"
    if not data.clusters:
        return section("clusters", heading, missing("The prepared data is not here.", f"atoll prepare {data.run}"))
    cards = []
    for cluster in data.clusters:
        job = data.job(layout.expert_job(cluster.number))
        trained = f"{escape(job.objective)}, trained in {job.compute.seconds:,.0f} s" if job else "not trained yet"
        classes = f"<br>most frequent: {escape(cluster.common_classes)}" if cluster.common_classes else ""
        text = (
            f"{_chip(cluster.number)}<b>Cluster {cluster.number}</b>: {cluster.size:,} images{classes}"
            f"<br>expert: {trained}"
        )
        alt = f"some images of cluster {cluster.number}"
        cards.append(tag("figure", img(cluster.sheet, alt), tag("figcaption", text)))
    text = prose(texts.CLUSTERS[data.config.clusters.method])
    return section("clusters", heading, tag("p", text), tag("div", *cards, class_="sheets"))


def routing(data: ReportData, examples: list[Example], row: Row | None) -> str:
    """Return the section with the router's probabilities over time."""
    heading = "Routing over time"
    router = data.job("router")
    if row is None or row.probabilities is None:
        if router:
            note = missing("The images were sampled without the router.", f"atoll report {data.run} --routings top-1")
        else:
            note = missing("This run has no router.", f"atoll train {data.run} --router")
        return section("routing", heading, note)
    experts = [job.expert for job in data.experts if job.expert is not None]
    conditioned = router is not None and bool(router.content.conditioning)
    colors = [color(expert) for expert in experts]
    items = []
    for column, (example, image) in enumerate(zip(examples, row.images, strict=True)):
        shares = row.probabilities[:, column].tolist()
        alt = f"{example.prompt}: router probability of each expert from noise to image"
        text = tag("div", tag("span", escape(example.prompt)), band(shares, colors, alt))
        items.append(tag("li", text, img(image, example.prompt)))
    text = prose(texts.ROUTING) + " " + (texts.ROUTER_CONDITIONED if conditioned else texts.ROUTER_UNCONDITIONED)
    key = legend([(f"expert {expert}", color(expert), False) for expert in experts])
    return section("routing", heading, tag("p", text), key, tag("ul", *items, class_="bands"))
