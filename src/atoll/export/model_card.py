"""The model card of an export: what the model is, what it was trained on, what that cost, what it is good for."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.manifests import CLUSTERS, INGEST, ExpertContent, NetworkContent, RouterContent
from atoll.core.version import __version__
from atoll.nets import build, count_parameters

CARD_FILE = "README.md"


@dataclass(frozen=True)
class About:
    """All that a card tells."""

    run: Path
    name: str
    model: str
    """experts, monolith, student or expert:K."""
    experts: Sequence[ExpertContent]
    router: RouterContent | None
    license: str | None

    @property
    def told(self) -> str:
        """prompts, classes, both, or nothing."""
        told = {part for expert in self.experts for part in expert.conditioning}
        words = [word for word, parts in (("prompts", {"text", "pooled"}), ("classes", {"label"})) if told & parts]
        return " and ".join(words) or "nothing"


def card(about: About) -> str:
    """The text of README.md."""
    parts = [
        _front(about), f"# {about.name}", _summary(about), _use(about), _data(about), _clusters(about),
        _training(about), _figures(about), _limits(about), _license(about),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


def _front(about: About) -> str:
    task = "unconditional-image-generation" if about.told == "nothing" else "text-to-image"
    lines = ["library_name: diffusers", f"pipeline_tag: {task}", "tags: [atoll, decentralized-diffusion]"]
    return "\n".join(["---", *([f"license: {about.license}"] if about.license else []), *lines, "---"])


def _summary(about: About) -> str:
    first = about.experts[0]
    channels, height, width = first.latents.shape
    side = first.latents.resolution
    each = [_parameters(expert) for expert in about.experts]
    what = {
        "monolith": "A dense diffusion model",
        "student": "A dense diffusion model, distilled from experts that were trained in isolation",
    }.get(about.model, f"A decentralized diffusion model of {len(each)} experts, trained in isolation")
    lines = [f"{what}. It makes pictures{f' of {side}x{side} pixels' if side else ''} and is told {about.told}."]
    sizes = f"{sum(each) / 1e6:.1f} M parameters in {len(each)} network{'s' if len(each) > 1 else ''}"
    router = f", and a router of {_parameters(about.router) / 1e6:.1f} M" if about.router else ""
    lines.append(f"{sizes}{router}, on latents of {channels}x{height}x{width}. Made with Atoll {__version__}.")
    return "\n".join(lines)


def _use(about: About) -> str:
    labels = about.experts[0].labels or (0,)
    prompt = {"nothing": "", "classes": f"label={labels[0]!r}, "}.get(about.told, '"a red apple", ')
    routing = 'routing="top-2", ' if len(about.experts) > 1 else ""
    return f"""## Use

```python
from atoll import AtollPipeline

pipe = AtollPipeline.from_pretrained("{about.name}")  # this folder, or its name on the hub
image = pipe({prompt}{routing}guidance_scale=4.0, seed=0).images[0]
image.save("picture.png")
```

`atoll.load("{about.name}", max_loaded_experts=1)` opens the same folder with few experts in memory at once.
Files are checked against the hashes in `manifest.json` when they are read; weights are safetensors."""


def _data(about: About) -> str:
    first = about.experts[0]
    lines = ["## Data", "", f"Source: {first.source}."]
    ingest = Artifact(about.run, layout.INGEST)
    if ingest.manifest() is not None:
        splits = ingest.read(INGEST).splits
        held_out = splits.get("held-out", 0)
        lines.append(f"{splits.get('train', 0):,} pictures for training, {held_out:,} that training never saw.")
        lines += ["", *_licenses(about.run)]
    lines += ["", f"Fingerprint of the data: `{first.fingerprint}`."]
    return "\n".join(lines)


def _licenses(run: Path) -> list[str]:
    """Licenses that the pictures carry, with whom to name."""
    import pyarrow.parquet as parquet

    texts = parquet.read_table(run / layout.INGEST / "images.parquet", columns=["attributes"])["attributes"].to_pylist()
    known = [json.loads(text) if text else {} for text in texts]
    counts = Counter((each.get("license", ""), each.get("attribution", "")) for each in known)
    if set(counts) == {("", "")}:
        return ["The source tells no licenses of the pictures."]
    rows = [(license or "not told", whom or "-", f"{count:,}") for (license, whom), count in counts.most_common(50)]
    return _table(("license of the pictures", "to name", "pictures"), rows)


def _clusters(about: About) -> str:
    artifact = Artifact(about.run, layout.CLUSTERS)
    if artifact.manifest() is None:
        return ""
    clusters = artifact.read(CLUSTERS)
    sizes = clusters.sizes
    held_out = sizes.get("held-out") or (0,) * len(sizes["train"])
    rows = [
        (str(number), f"{train:,}", f"{kept:,}")
        for number, (train, kept) in enumerate(zip(sizes["train"], held_out, strict=True))
    ]
    seen = "each expert was trained on its own alone" if about.model == "experts" else _seen(about.experts[0])
    head = f"{len(rows)} clusters, made by {clusters.method}; {seen}."
    table = _table(("cluster", "training pictures", "held out"), rows)
    return "\n".join(["## Clusters", "", head, "", *table])


def _seen(expert: ExpertContent) -> str:
    numbers = ", ".join(map(str, expert.clusters))
    return f"this model was trained on cluster{'s' if len(expert.clusters) > 1 else ''} {numbers}"


def _training(about: About) -> str:
    rows = []
    networks = [*about.experts, *([about.router] if about.router else [])]
    for content in networks:
        spent = content.compute
        numbers = [f"{spent.images:,}", f"{spent.flops:.3g}", f"{spent.seconds:,.0f}"] if spent else ["-"] * 3
        size = f"{_parameters(content) / 1e6:.1f} M"
        rows.append((content.job, _objective(content), size, *numbers, _number(content.held_out_loss, 4)))
    costs = [content.compute for content in networks if content.compute]
    total = sum(spent.flops for spent in costs), sum(spent.seconds for spent in costs)
    heads = ("network", "objective", "parameters", "samples", "FLOPs", "seconds", "held-out loss")
    sums = f"Together {total[0]:.3g} FLOPs of matrix products and {total[1]:,.0f} seconds of training jobs."
    if about.model == "student":
        sums += " The experts that it learnt from are not counted."
    return "\n".join(["## Training and compute", "", *_table(heads, rows), "", sums])


def _objective(content: NetworkContent) -> str:
    if not isinstance(content, ExpertContent):
        return "clusters"
    return f"{content.objective.prediction}, {content.objective.schedule.name} schedule"


def _figures(about: About) -> str:
    file = about.run / layout.LATEST_EVALUATION
    found = json.loads(file.read_text(encoding="utf-8"))["models"] if file.is_file() else []
    mine = [model for model in found if model.get("model") == about.model and model.get("metrics")]
    if not mine:
        return "## Figures\n\nThis model was not evaluated."
    rows, protocols = [], {}
    for model in mine:
        for extractor, figures in model["metrics"].items():
            kid, near = figures.get("kid", {}), figures.get("precision_recall", {})
            parts = [(figures.get("frechet", {}), "value", 2), (figures.get("floor", {}), "frechet", 2)]
            parts += [(kid, "value", 5), (near, "precision", 3), (near, "recall", 3)]
            numbers = [_number(part.get(key), digits) for part, key, digits in parts]
            label, protocol = model.get("label", about.model), figures.get("protocol", {})
            rows.append((label, extractor, str(protocol.get("samples", "-")), *numbers))
            protocols[f"{label}, {extractor}"] = protocol
    heads = (
        "model",
        "seen through",
        "pictures",
        "Frechet distance",
        "of as many real ones",
        "KID",
        "precision",
        "recall",
    )
    told = json.dumps(protocols, indent=1, ensure_ascii=False)
    return "\n".join(["## Figures", "", *_table(heads, rows), "", "Protocol:", "", "```json", told, "```"])


def _limits(about: About) -> str:
    lines = ["It knows what its training pictures and captions show, with their gaps and biases, and nothing else."]
    if len(about.experts) > 1:
        lines.append(
            "Each expert saw one cluster alone: what lies between clusters, or joins things of several, is weaker."
        )
        lines.append(
            "All experts together are needed for its pictures; which of them work is decided for each picture."
        )
    return "\n".join(["## Limits", "", *(f"- {line}" for line in lines)])


def _license(about: About) -> str:
    said = "Whoever trained this model has not said under which license its weights may be used"
    said = f"Weights: {about.license}" if about.license else said
    others = "The pictures it was trained on, its autoencoder and its text encoder have licenses of their own."
    return f"## License\n\n{said}. {others}"


def _parameters(content: NetworkContent) -> int:
    with torch.device("meta"):
        return count_parameters(build(content.network))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
