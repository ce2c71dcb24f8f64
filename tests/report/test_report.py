"""The report of a small run: self-contained, with the metrics of the evaluation and notes on missing parts."""

import base64
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal

import pytest
from PIL import Image

from atoll import cli
from atoll.apps.evaluate.generated import prompts_of
from atoll.apps.evaluate.table import power
from atoll.apps.report import report
from atoll.apps.report.charts import Chart, Line, ticks
from atoll.apps.report.gallery import choose_examples
from atoll.apps.report.page import SMALL, inline
from atoll.core.config import load
from atoll.core.errors import AtollError
from atoll.data.dataset import Shards

FEW = [
    "--num-images",
    "12",
    "--steps",
    "2",
    "--num-real",
    "24",
    "--extractors",
    "efficientnet-lite0",
    "--guidance-scale",
    "2",
]
FEW += [
    "--diversity",
    "2",
    "2",
    "--num-val",
    "6",
    "--without",
    "trajectories",
    "--routings",
    "top-1",
    "full",
    "--allow-small",
]
VOID = {"img", "meta", "link", "br"}


class Page(HTMLParser):
    """A parsed page: tables of numbers, images, anchors; elements must be nested correctly."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.numbers: dict[tuple[str, str, str], tuple[str, str]] = {}
        """Exact value and text of a number, by the title of its table, its row and its column."""
        self.images: list[dict[str, str | None]] = []
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.texts: list[str] = []
        self._value: str | None = None
        self._shown = ""
        self._title = ""
        self._columns: list[str] = []
        self._row = ""
        self._column = 0
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.ids |= {values["id"]} if values.get("id") else set()
        if tag == "img":
            self.images.append(values)
        if tag == "a":
            self.links.append(values["href"] or "")
        else:
            self.loads += [value or "" for key, value in attrs if key in ("src", "href", "srcset", "poster", "data")]
        self._value = values["value"] if tag == "data" else self._value
        self._columns = [] if tag == "thead" else self._columns
        self._column += tag == "td"
        if tag in ("h3", "th", "data"):
            self._shown = ""
        if tag == "tr":
            self._column = 0

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        shown = " ".join(self._shown.split())
        if tag == "h3":
            self._title = shown
        elif tag == "th" and "thead" in self.open:
            self._columns.append(shown)
        elif tag == "th":
            self._row = shown
        elif tag == "data":
            table = "table" in self.open
            key = (self._title, self._row, self._columns[self._column]) if table else (self._title, "", "")
            assert key not in self.numbers
            self.numbers[key] = (self._value or "", shown)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        self._shown += "" if "small" in self.open else data


@pytest.fixture(scope="module")
def result(trained: Path) -> dict[str, Any]:
    """Return the output of `atoll evaluate --json`."""
    assert cli.main(["evaluate", str(trained), *FEW, "--json"]) == 0
    found: dict[str, Any] = json.loads((trained / "evaluation" / "latest.json").read_text())
    return found


@pytest.fixture(scope="module")
def text(trained: Path, result: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    assert result
    file = tmp_path_factory.mktemp("report") / "page.html"
    return report(trained, load(trained), out=file).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def shown_value(text: str) -> tuple[float, float]:
    """Return the value of a shown number, and half a unit of its last digit."""
    raised = text.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    if found := re.fullmatch(r"([\d.]+) × 10(-?\d+)", raised):
        return float(found[1]) * 10 ** int(found[2]), 0.5 * 10.0 ** (int(found[2]) - 2)
    number = re.match(r"-?[\d,]+\.?(\d*)", text)
    assert number, text
    factor = next((factor for unit, factor in (("GB", 1e9), ("MB", 1e6), ("M", 1e6)) if text.endswith(unit)), 1.0)
    return factor * float(number[0].replace(",", "")), factor * 0.5 * 10.0 ** -len(number[1])


def expected_numbers(result: dict[str, Any]) -> dict[tuple[str, str, str], tuple[float, float | None]]:
    """Return value and standard error of every number, by the title of its table, its row and its column."""
    found: dict[tuple[str, str, str], tuple[float, float | None]] = {}
    quality = "Generated vs real images, efficientnet-lite0 features"
    errors = {**result["diagnostics"]["dense"], **result["diagnostics"]["experts"]["velocity_error"]}
    for model in result["models"]:
        row = f"Experts, {model['routing']}" if model["routing"] else model["model"].capitalize()
        metrics, training, image = model["metrics"]["efficientnet-lite0"], model["training"], model["sampling"]
        found[quality, row, "Frechet distance"] = (metrics["frechet"], None)
        found[quality, row, "KID × 1000"] = (metrics["kid"]["value"], metrics["kid"]["standard_error"])
        for name in ("precision", "recall", "density", "coverage"):
            found[quality, row, name] = (metrics["precision_recall"][name], None)
        real = metrics["real_baseline"]
        found[quality, "Real-vs-real baseline", "Frechet distance"] = (real["frechet"], None)
        found[quality, "Real-vs-real baseline", "KID × 1000"] = (real["kid"]["value"], real["kid"]["standard_error"])
        found["Sampling", row, "diversity"] = (model["diversity"]["mean"], model["diversity"]["standard_error"])
        found["Sampling", row, "validation error"] = (errors[model["routing"] or model["model"]]["mean"], None)
        if model.get("expert_use"):
            found["Sampling", row, "experts per step"] = (model["expert_use"]["mean_active"], None)
        costs = {"parameters": "parameters", "FLOPs": "flops", "time": "seconds", "longest job": "longest_job_seconds"}
        for name, key in {**costs, "memory": "memory_bytes"}.items():
            found["Cost of training", row, name] = (training[key], None)
        if training.get("teachers_flops"):
            both = training["flops"] + training["teachers_flops"]
            found["Cost of training", row, "with teachers"] = (both, None)
        for name, key in (
            ("FLOPs", "flops"),
            ("time", "seconds"),
            ("memory", "memory_bytes"),
            ("weights", "weights_bytes"),
        ):
            found["Cost of one image", row, name] = (image[key], None)
    found["Router", "", ""] = (result["diagnostics"]["experts"]["router"]["accuracy"]["mean"], None)
    matrix = result["diagnostics"]["experts"]["expert_on_cluster"]
    for cluster, row in enumerate(matrix["mean"]):
        for expert, error in zip(matrix["experts"], row, strict=True):
            found["Expert errors by cluster", f"cluster {cluster}", f"expert {expert}"] = (error, None)
    return found


def test_every_number_equals_the_one_of_the_evaluation(page: Page, result: dict[str, Any]) -> None:
    expected = expected_numbers(result)
    assert page.numbers.keys() == expected.keys()
    for key, (exact, text) in page.numbers.items():
        assert json.loads(exact) == expected[key][0]
        scale = 1000 if "KID" in key[2] else 100 if text.endswith("%") else 1
        for shown, value in zip(text.split(" ± "), expected[key], strict=False):
            read, half = shown_value(shown)
            assert value is not None
            assert read == pytest.approx(value * scale, abs=1.001 * half), (key, text)
        assert ("±" in text) == (expected[key][1] is not None)


def test_the_page_loads_nothing_from_outside(page: Page, text: str) -> None:
    assert page.loads
    assert all(address.startswith("data:") for address in page.loads)
    assert all(link.startswith(("#", "https://arxiv.org/")) for link in page.links)
    assert "<script" not in text
    assert "default-src 'none'; img-src data:;" in text  # browsers enforce it too
    assert "@import" not in text
    assert not re.search(r"url\((?!data:)", text)


def test_links_within_the_page_have_targets_and_images_have_alt_texts(page: Page) -> None:
    assert {link[1:] for link in page.links if link.startswith("#")} <= page.ids
    assert {"images", "alone", "clusters", "routing", "training", "metrics", "diagnostics", "reproduce"} <= page.ids
    assert all(image["alt"] for image in page.images)


def test_every_model_has_an_image_for_every_prompt_below_the_real_image(page: Page) -> None:
    alts = [image["alt"] or "" for image in page.images]
    prompts = [alt.removeprefix("real: ") for alt in alts if alt.startswith("real: ")]
    assert len(prompts) >= 3 * 2  # two of each cluster, and one held out where there is one
    for label in ("experts top-1", "experts full", "monolith", "student"):
        assert [alt for alt in alts if alt.startswith(f"{label}: ")] == [f"{label}: {prompt}" for prompt in prompts]
    for expert in range(3):
        assert sum(alt.startswith(f"expert {expert}: ") for alt in alts) == len(prompts)


def test_held_out_prompts_are_marked_wherever_they_stand(trained: Path, page: Page) -> None:
    splits = {example.prompt: example.split for example in choose_examples(trained, 3, ())}
    assert "validation" in splits.values()
    for prompt, split in splits.items():
        # With its first image, as a column of both tables, and with its band.
        marked = sum(text == f"{prompt}\u202f*" for text in page.texts)
        assert marked == (4 if split == "validation" else 0), prompt


def test_writing_the_same_report_again_samples_nothing(
    trained: Path, result: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert result
    again = report(trained, load(trained), out=tmp_path / "page.html")
    assert "sampling images of" not in capsys.readouterr().out
    assert again.read_text(encoding="utf-8") == text


def test_missing_parts_are_named_with_the_command_that_creates_them(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("evaluation", "router", "monolith", "student", "logs"))
    text = " ".join("".join(Page(report(run, load(run), steps=1).read_text(encoding="utf-8")).texts).split())
    for command in ("--router", "--monolith --match-flops"):
        assert f"atoll train {run} {command}" in text
    assert f"atoll evaluate {run}" in text
    assert "Each expert alone" in text


def test_one_expert_needs_no_router(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(
        trained, run, ignore=shutil.ignore_patterns("evaluation", "router", "monolith", "student", "00[12]")
    )
    page = Page(report(run, load(run), steps=1).read_text(encoding="utf-8"))
    assert any((image["alt"] or "").startswith("experts top-1: ") for image in page.images)
    assert "cannot be combined without a router" not in "".join(page.texts)


def test_the_routing_section_uses_the_first_routing_with_a_router(trained: Path, tmp_path: Path) -> None:
    for routings, expected in (
        (("nearest", "top-1"), "expert from noise to image"),
        (("nearest",), "sampled without the router"),
    ):
        file = report(trained, load(trained), routings=routings, steps=1, out=tmp_path / "page.html")
        assert expected in file.read_text(encoding="utf-8")


def test_the_error_matrix_has_the_experts_of_the_evaluation(
    trained: Path, result: dict[str, Any], tmp_path: Path
) -> None:
    """Even if experts were removed or added since then."""
    assert result["diagnostics"]["experts"]["expert_on_cluster"]["experts"] == [0, 1, 2]
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shutil.rmtree(run / "experts/001")
    text = report(run, load(run), steps=1).read_text(encoding="utf-8")
    heads = re.search(
        r'<thead><tr><th scope="col">validation images of</th>(.*?)</tr></thead><tbody>\s*'
        r'<tr><th scope="row">cluster 0',
        text,
    )
    assert heads is not None
    assert re.findall(r"expert (\d)", heads[1]) == ["0", "1", "2"]


def test_given_prompts(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    options = [
        "--prompts",
        "a <b>bold</b> & new thing",
        "--routings",
        "top-1",
        "--steps",
        "1",
        "--out",
        str(file),
        "--json",
    ]
    assert cli.main(["report", str(trained), *options]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(file)}
    page = Page(file.read_text(encoding="utf-8"))
    assert "experts top-1: a <b>bold</b> & new thing" in [image["alt"] for image in page.images]
    assert not any((image["alt"] or "").startswith("real") for image in page.images)


def test_prompts_come_from_the_chosen_split(trained: Path, result: dict[str, Any], text: str) -> None:
    splits: tuple[Literal["train", "validation"], ...] = ("train", "validation")
    for split in splits:
        captions = Shards.open(trained, [0, 1, 2], split).captions()
        assert set(prompts_of(trained, 3, 12, split=split).captions or []) <= set(captions)
    assert result["prompts"] == "validation"
    assert "for validation prompts vs" in text


def test_a_run_without_finished_experts_is_an_error(prepared: Path) -> None:
    with pytest.raises(AtollError, match="no finished expert"):
        report(prepared, load(prepared))


def test_charts_have_round_ticks() -> None:
    assert ticks(0, 1) == pytest.approx([0, 0.5, 1.0]) or ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(32, 160) == pytest.approx([50, 100, 150])
    zero = Chart([Line("nothing", [(0, 0.0), (1, 0.0)])], "images", "loss", "a loss of zero")
    assert (zero.x(0), zero.x(1)) == (Chart.LEFT, Chart.WIDTH - Chart.RIGHT)
    assert zero.y(0.0) == Chart.HEIGHT - Chart.BOTTOM
    assert power(1.234e14) == "1.23 × 10¹⁴"


@pytest.mark.parametrize(("side", "kind"), [(SMALL, "PNG"), (SMALL + 1, "WEBP")])
def test_the_media_type_of_an_inline_image_is_right(side: int, kind: str) -> None:
    found = re.fullmatch(r"data:image/(\w+);base64,(.+)", inline(Image.new("RGB", (side, 8))))
    assert found is not None
    assert found[1] == kind.lower()
    with Image.open(io.BytesIO(base64.b64decode(found[2]))) as image:
        assert (image.format, image.size) == (kind, (side, 8))
