"""The model card of an export: usage, data, training cost, metrics and limitations."""

import html
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.manifests import CLUSTERS, INGEST, ExpertContent, NetworkContent, RouterContent, training_costs
from atoll.core.sizes import Size
from atoll.core.version import __version__
from atoll.experts.run import teachers_flops
from atoll.nets import build, count_parameters
from atoll.verify.local_trust import local_snapshot, local_trust

CARD_FILE = "README.md"
REQUIREMENTS = "torch diffusers transformers pydantic"
"""What the code of a folder imports; its other imports are requirements of these."""
PAPER = "https://arxiv.org/abs/2501.05450"
# Rows of the table of licenses. A dataset of many authors would otherwise make the card unreadable.
MAX_LICENSES = 50


@dataclass(frozen=True)
class CardData:
    """The data of a model card."""

    run: Path
    name: str
    model: str
    """experts, students, monolith, student, merged or expert:K."""
    experts: Sequence[ExpertContent]
    router: RouterContent | None
    license: str | None
    sizes: Sequence[Size] = ()
    """Sizes of the images in pixels if there are several, the default first."""
    code: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of every code file, in a folder that opens without Atoll."""
    dit_pipeline: bool = False
    """Whether the folder is a DiTPipeline of diffusers."""

    @property
    def conditioned_on(self) -> frozenset[str]:
        """The inputs of the model: any of text and label."""
        parts = {part for expert in self.experts for part in expert.conditioning}
        return frozenset({"label" if part == "label" else "text" for part in parts})


def model_card(data: CardData) -> str:
    """Return the text of README.md."""
    # The Hub has no task for class-conditional generation; text-to-image is the nearest that takes a prompt.
    task = "text-to-image" if data.conditioned_on else "unconditional-image-generation"
    license = [f"license: {data.license}"] if data.license else []
    front = ["library_name: diffusers", f"pipeline_tag: {task}", "tags: [atoll, decentralized-diffusion]"]
    front += _results(data, task)
    limitations = ["- The model reflects the content, gaps and biases of its training images and captions."]
    if len(data.experts) > 1:
        limitations += [
            "- Each expert was trained on one cluster, so prompts that combine several clusters may work less well.",
            "- Sampling needs all experts, because the routing selects experts for each image and step.",
        ]
    weights = f"Weights: {data.license}." if data.license else "No license was declared for the weights."
    others = "The training images, and the autoencoder and text encoder if any, have separate licenses."
    parts = [
        "\n".join(["---", *license, *front, "---"]),
        f"# {data.name}",
        _summary(data),
        _usage(data),
        _data(data),
        _clusters(data),
        _contributors(data),
        _training(data),
        _evaluation(data),
        "\n".join(["## Limitations", "", *limitations]),
        f"## License\n\n{weights} {others}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _summary(data: CardData) -> str:
    first, count = data.experts[0], len(data.experts)
    if data.model == "monolith":
        what = "This is a dense diffusion model."
    elif data.model == "student":
        what = "This is a dense diffusion model, distilled from independently trained experts."
    elif data.model == "merged":
        what = "This is a dense diffusion model: the average of the weights of independently trained experts."
    elif data.model == "experts":
        what = f"This is a decentralized diffusion model with {count} expert{'s' if count > 1 else ''}."
        what += " The experts were trained independently, each on one cluster of the data."
    elif data.model == layout.STUDENTS:
        what = f"These are {count} students of the experts of a decentralized diffusion model."
        what += " Each expert was trained, and its student distilled, independently of the others."
    else:
        what = "This is one expert of a decentralized diffusion model, trained on one cluster of the data."
    what += f" It samples in {first.steps} steps, without guidance." if first.steps else ""
    side = f" of {first.latents.resolution}x{first.latents.resolution} pixels" if first.latents.resolution else ""
    side = f" of {', '.join(map(str, data.sizes))} pixels (width x height)" if data.sizes else side
    inputs = {"text": "text prompts", "label": "class labels"}
    source = " and ".join(inputs[part] for part in ("text", "label") if part in data.conditioned_on)
    images = f"It generates images{side} from {source}." if source else f"It generates images{side} unconditionally."
    each = [_parameters(expert) for expert in data.experts]
    sizes = f"{sum(each) / 1e6:.1f} M" + (f" in {count} experts" if count > 1 else "")
    router = f", plus {_parameters(data.router) / 1e6:.1f} M in the router" if data.router else ""
    lines = [f"{what} {images}", "", f"- Parameters: {sizes}{router}"]
    default = " by default" if data.sizes else ""
    lines.append(f"- Latent shape: {'x'.join(map(str, first.latents.shape))} (channels, height, width){default}")
    if data.model != "monolith":
        lines.append(f"- Method: [Decentralized Diffusion Models]({PAPER})")
    return "\n".join([*lines, f"- Made with Atoll {__version__}"])


def _usage(data: CardData) -> str:
    labels = data.experts[0].labels or (0,)
    prompt = f"label={labels[0]!r}, " if data.conditioned_on else ""
    prompt = '"a red apple", ' if "text" in data.conditioned_on else prompt
    routing = 'routing="top-2", ' if len(data.experts) > 1 else ""
    few = f"""

To limit memory, `atoll.load("{data.name}", max_loaded_experts=1)` opens the same folder with one expert at a time."""
    if data.dit_pipeline:
        steps = data.experts[0].steps
        how = f"guidance_scale=1.0, num_inference_steps={steps}" if steps else "guidance_scale=4.0"
        return f"""## Usage

With `pip install torch diffusers`, version 0.39 or newer:

```python
from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained("{data.name}")  # this folder, or its name on the Hub
image = pipe(class_labels=[0], {how}).images[0]  # pipe.labels has the names of the classes
image.save("image.png")
```

The folder has no code, and all weights are safetensors. `manifest.json` has the SHA-256 of every file."""
    if data.code:
        table = _table(("file", "SHA-256"), [(name, digest) for name, digest in data.code.items()])
        return f"""## Usage

With `pip install {REQUIREMENTS}`, without Atoll:

```python
from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained("{data.name}", trust_remote_code=True)  # this folder, or its name on the Hub
image = pipe({prompt}{routing}guidance_scale=4.0, seed=0).images[0]
image.save("image.png")
```

This runs the code of this folder, and no other code than that of the installed libraries:

{chr(10).join(table)}

All weights are safetensors. `atoll.load("{data.name}")` of Atoll opens the folder too, and runs none of its code."""
    return f"""## Usage

```python
from atoll import AtollPipeline

pipe = AtollPipeline.from_pretrained("{data.name}")  # this folder, or its name on the Hub
image = pipe({prompt}{routing}guidance_scale=4.0, seed=0).images[0]
image.save("image.png")
```{few if len(data.experts) > 1 else ""}

All weights are safetensors. Loading checks every file against its SHA-256 in `manifest.json`."""


def _data(data: CardData) -> str:
    first, ingest = data.experts[0], Artifact(data.run, layout.INGEST)
    lines = ["## Training data", "", f"- Source: {first.source}"]
    fingerprint = f"- Fingerprint: `{first.fingerprint}`"
    if ingest.manifest() is None:
        return "\n".join([*lines, fingerprint])
    splits = ingest.read(INGEST).splits
    lines.append(f"- Training images: {splits.get('train', 0):,}")
    lines.append(f"- Validation images: {splits.get('validation', 0):,}")
    lines += [fingerprint, ""]
    # The licenses and attributions of the training images.
    import pyarrow.parquet as parquet

    column = parquet.read_table(ingest.folder / "images.parquet", columns=["attributes"])["attributes"]
    known = [json.loads(text) if text else {} for text in column.to_pylist()]
    counts = Counter((each.get("license", ""), each.get("attribution", "")) for each in known)
    if set(counts) == {("", "")}:
        return "\n".join([*lines, "The source does not state the licenses of the images."])
    common = counts.most_common(MAX_LICENSES)
    rows = [(license or "not stated", author or "-", f"{count:,}") for (license, author), count in common]
    return "\n".join([*lines, *_table(("license of the images", "attribution", "images"), rows)])


def _clusters(data: CardData) -> str:
    artifact = Artifact(data.run, layout.CLUSTERS)
    if artifact.manifest() is None:
        return ""
    clusters = artifact.read(CLUSTERS)
    sizes = clusters.sizes
    validation = sizes.get("validation") or (0,) * len(sizes["train"])
    rows = [
        (str(number), f"{train:,}", f"{kept:,}")
        for number, (train, kept) in enumerate(zip(sizes["train"], validation, strict=True))
    ]
    trained = data.experts[0].clusters
    numbers = f"cluster{'s' if len(trained) > 1 else ''} {', '.join(map(str, trained))}"
    use = (
        "Each expert was trained on one cluster."
        if data.model in ("experts", layout.STUDENTS)
        else f"This model was trained on {numbers}."
    )
    text = f"The training images are divided into {len(rows)} clusters (method: {clusters.method}). {use}"
    return "\n".join(["## Clusters", "", text, "", *_table(("cluster", "training images", "validation images"), rows)])


def _contributors(data: CardData) -> str:
    """Return who signed the networks of a shared run; nothing for any other run."""
    trust = local_trust(data.run)
    signed = local_snapshot(data.run, trust) if trust else None
    if trust is None or signed is None:
        return ""
    rows = []
    for content in [*data.experts, *([data.router] if data.router else [])]:
        if network := signed.content.networks.get(content.job):
            name = trust.current.signer_name(network.publisher, "publish", content.job)
            rows.append((content.job, name or "not listed any more", network.publisher))
    heads = ("network", "trained by", "public key")
    about = "Each network is signed by whoever trained it."
    return "\n".join(["## Contributors", "", about, "", *_table(heads, rows)]) if rows else ""


def _training(data: CardData) -> str:
    rows = []
    networks = [*data.experts, *([data.router] if data.router else [])]
    for content in networks:
        spent = content.compute
        numbers = [f"{spent.images:,}", f"{spent.flops:.3g}", f"{spent.seconds:,.0f}"] if spent else ["-"] * 3
        size, objective = f"{_parameters(content) / 1e6:.1f} M", "cluster classification"
        if isinstance(content, ExpertContent):
            objective = f"{content.objective.prediction}, {content.objective.schedule.name} schedule"
        rows.append((content.job, objective, size, *numbers, _number(content.validation_loss, 4)))
    costs = training_costs(networks)
    flops, seconds = sum(spent.flops for spent in costs), sum(spent.seconds for spent in costs)
    heads = ("network", "objective", "parameters", "images seen", "FLOPs", "seconds", "validation loss")
    total = f"In total: {flops:.3g} FLOPs (matrix products) and {seconds:,.0f} seconds of training."
    if data.model in (layout.STUDENT, layout.STUDENTS):
        teachers = teachers_flops(data.run, data.experts)
        total += " The experts that it was distilled from are not included"
        total += f"; with them, it is {flops + teachers:.3g} FLOPs." if teachers else "."
    if any(expert.start for expert in data.experts):
        total += " The total includes the shared start of the experts, once."
    return "\n".join(["## Training", "", *_table(heads, rows), "", total])


def _evaluated(data: CardData) -> list[dict[str, Any]]:
    """Return the results of this model in the last evaluation, one for each row."""
    # Read as plain JSON: a card can be written even if another version of Atoll evaluated the run.
    file = data.run / layout.LATEST_EVALUATION
    models = json.loads(file.read_text(encoding="utf-8"))["models"] if file.is_file() else []
    return [model for model in models if model.get("model") == data.model and model.get("metrics")]


def _results(data: CardData, task: str) -> list[str]:
    """Return the metrics as `model-index` of the front matter, from which the hub makes its table."""
    results = []
    for model in _evaluated(data):
        for extractor, metrics in model["metrics"].items():
            reference = metrics.get("protocol", {}).get("reference") or {}
            kid, inception = metrics.get("kid"), extractor == "inception"
            found = [{"type": "fid" if inception else "frechet_distance", "value": round(metrics["frechet"], 2)}]
            found += [{"type": "kid", "value": round(kid["value"], 5)}] if kid else []
            dataset = {"name": f"{data.experts[0].source}, {reference.get('source', 'train')} images", "type": "images"}
            named = [
                {**each, "name": f"{each['type']} ({extractor}, {model.get('label', data.model)})"} for each in found
            ]
            results.append({"task": {"type": task}, "dataset": dataset, "metrics": named})
    if not results:
        return []
    index = [{"name": data.name, "results": results}]
    return yaml.safe_dump({"model-index": index}, sort_keys=False, allow_unicode=True).splitlines()


def _evaluation(data: CardData) -> str:
    evaluated = _evaluated(data)
    if not evaluated:
        return "## Evaluation\n\nThis model has not been evaluated."
    rows, protocols = [], {}
    for model in evaluated:
        for extractor, metrics in model["metrics"].items():
            kid, near = metrics.get("kid", {}), metrics.get("precision_recall", {})
            parts = [(metrics, "frechet", 2), (metrics.get("real_baseline", {}), "frechet", 2)]
            parts += [(kid, "value", 5), (near, "precision", 3), (near, "recall", 3)]
            numbers = [_number(part.get(key), digits) for part, key, digits in parts]
            label, protocol = model.get("label", data.model), metrics.get("protocol", {})
            rows.append((label, extractor, str(protocol.get("num_images", "-")), *numbers))
            protocols[f"{label}, {extractor}"] = protocol
    heads = ("model", "features", "images", "Frechet distance", "real vs real", "KID", "precision", "recall")
    note = "*Real vs real* is the Frechet distance between two sets of real images: the bias of these set sizes."
    text = json.dumps(protocols, indent=1, ensure_ascii=False)
    details = ["<details><summary>Protocol</summary>", "", "```json", text, "```", "", "</details>"]
    return "\n".join(["## Evaluation", "", *_table(heads, rows), "", note, "", *details])


def _parameters(content: NetworkContent) -> int:
    # The meta device builds the network without memory for its weights.
    with torch.device("meta"):
        return count_parameters(build(content.network))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return lines + [f"| {' | '.join(map(_plain, row))} |" for row in rows]


def _plain(cell: str) -> str:
    """Return the text of a cell, which may come from the data: no line, HTML, link or end of the cell in it."""
    text = html.escape(" ".join(cell.split()), quote=False).replace("|", "/")
    return re.sub(r"([\[\]`])", r"\\\1", text)
