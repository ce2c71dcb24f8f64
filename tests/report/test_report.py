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
from atoll.core.config import load
from atoll.core.errors import AtollError
from atoll.data.dataset import Shards
from atoll.evaluate.generated import prompts_of
from atoll.report import Options, report
from atoll.report.charts import Line, lines, ticks
from atoll.report.html import SMALL, img, lookup, power

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
    """A parsed page: metrics with their paths, images, anchors; elements must be nested correctly."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.metrics: list[tuple[list[str | int], str, str]] = []
        self.images: list[dict[str, str | None]] = []
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.texts: list[str] = []
        self._metric: tuple[list[str | int], str] | None = None
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
        if tag == "data":
            self._metric = (json.loads(values["data-metric"] or ""), values["value"] or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._metric = None if tag == "data" else self._metric

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._metric is not None:
            self.metrics.append((*self._metric, data))


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
    return float(number[0].replace(",", "")), 0.5 * 10.0 ** -len(number[1])


def scale(path: list[str | int], text: str) -> float:
    """Return the factor of a shown number: KID × 1000, parameters in millions, bytes in megabytes, percentages."""
    if "kid" in path or "kid_standard_error" in path:
        return 1000
    if path[-1] == "parameters" or text.endswith("MB"):
        return 1e-6
    return 100 if text.endswith("%") else 1


def test_every_metric_equals_the_one_of_the_evaluation(page: Page, result: dict[str, Any]) -> None:
    for path, exact, text in page.metrics:
        value = lookup(result, path)
        assert value is not None
        assert json.loads(exact) == value
        read, half = shown_value(text)
        assert read == pytest.approx(value * scale(path, text), abs=1.001 * half), (path, text)
    shown = {json.dumps(path) for path, _, _ in page.metrics}
    for index in range(len(result["models"])):
        for below in (
            ["metrics", "efficientnet-lite0", "kid", "value"],
            ["training", "flops"],
            ["sampling", "seconds"],
        ):
            assert json.dumps(["models", index, *below]) in shown


def test_the_page_loads_nothing_from_outside(page: Page, text: str) -> None:
    assert page.loads
    assert all(address.startswith("data:") for address in page.loads)
    assert all(link.startswith(("#", "https://arxiv.org/")) for link in page.links)
    assert "<script" not in text
    assert "default-src &#x27;none&#x27;; img-src data:;" in text  # browsers enforce it too
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
    text = " ".join("".join(Page(report(run, load(run), Options(steps=1)).read_text(encoding="utf-8")).texts).split())
    for command in ("--router", "--monolith --match-flops"):
        assert f"atoll train {run} {command}" in text
    assert f"atoll evaluate {run}" in text
    assert "Each expert alone" in text


def test_one_expert_needs_no_router(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(
        trained, run, ignore=shutil.ignore_patterns("evaluation", "router", "monolith", "student", "00[12]")
    )
    page = Page(report(run, load(run), Options(steps=1)).read_text(encoding="utf-8"))
    assert any((image["alt"] or "").startswith("experts top-1: ") for image in page.images)
    assert "cannot be combined without a router" not in "".join(page.texts)


def test_the_routing_section_uses_the_first_routing_with_a_router(trained: Path, tmp_path: Path) -> None:
    for routings, expected in (
        (("nearest", "top-1"), "expert from noise to image"),
        (("nearest",), "sampled without the router"),
    ):
        file = report(trained, load(trained), Options(routings=routings, steps=1), out=tmp_path / "page.html")
        assert expected in file.read_text(encoding="utf-8")


def test_the_error_matrix_has_the_experts_of_the_evaluation(
    trained: Path, result: dict[str, Any], tmp_path: Path
) -> None:
    """Even if experts were removed or added since then."""
    assert result["diagnostics"]["experts"]["expert_on_cluster"]["experts"] == [0, 1, 2]
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shutil.rmtree(run / "experts/001")
    text = report(run, load(run), Options(steps=1)).read_text(encoding="utf-8")
    heads = re.search(
        r'<thead><tr><th scope="col">held-out images of</th>(.*?)</tr></thead><tbody><tr><th scope="row">cluster 0',
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
    splits: tuple[Literal["train", "held-out"], ...] = ("train", "held-out")
    for split in splits:
        captions = Shards.open(trained, [0, 1, 2], split).captions()
        assert set(prompts_of(trained, 3, 12, split=split).captions or []) <= set(captions)
    assert result["prompts"] == "held-out"
    assert "for held-out prompts vs" in text


def test_a_run_without_finished_experts_is_an_error(prepared: Path) -> None:
    with pytest.raises(AtollError, match="no finished expert"):
        report(prepared, load(prepared))


def test_charts_have_round_ticks() -> None:
    assert ticks(0, 1) == pytest.approx([0, 0.5, 1.0]) or ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(32, 160) == pytest.approx([50, 100, 150])
    assert "<svg" in lines([Line("nothing", [(0, 0.0), (1, 0.0)])], "images", "loss", alt="a loss of zero")
    assert power(1.234e14) == "1.23 × 10¹⁴"


@pytest.mark.parametrize(("side", "kind"), [(SMALL, "PNG"), (SMALL + 1, "WEBP")])
def test_the_media_type_of_an_inline_image_is_right(side: int, kind: str) -> None:
    found = re.search(r'src="data:image/(\w+);base64,([^"]+)"', img(Image.new("RGB", (side, 8)), "a bar"))
    assert found is not None
    assert found[1] == kind.lower()
    with Image.open(io.BytesIO(base64.b64decode(found[2]))) as image:
        assert (image.format, image.size) == (kind, (side, 8))
