"""The report of a small run: self-contained, its numbers those of the evaluation, and honest about what is missing."""

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
from atoll.report.html import SMALL, lookup, picture, power

FEW = [
    "--samples",
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
    """A page taken apart: numbers with the figure they stand for, pictures, anchors; elements must be nested well."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.figures: list[tuple[list[str | int], str, str]] = []
        self.pictures: list[dict[str, str | None]] = []
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self._figure: tuple[list[str | int], str] | None = None
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.ids |= {told["id"]} if told.get("id") else set()
        if tag == "img":
            self.pictures.append(told)
        if tag == "a":
            self.links.append(told["href"] or "")
        else:
            self.loads += [value or "" for key, value in attrs if key in ("src", "href", "srcset", "poster", "data")]
        if tag == "data":
            self._figure = (json.loads(told["data-figure"] or ""), told["value"] or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._figure = None if tag == "data" else self._figure

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._figure is not None:
            self.figures.append((*self._figure, data))


@pytest.fixture(scope="module")
def answer(trained: Path) -> dict[str, Any]:
    """What `atoll evaluate --json` says."""
    assert cli.main(["evaluate", str(trained), *FEW, "--json"]) == 0
    found: dict[str, Any] = json.loads((trained / "evaluation" / "latest.json").read_text())
    return found


@pytest.fixture(scope="module")
def text(trained: Path, answer: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    assert answer
    file = tmp_path_factory.mktemp("report") / "page.html"
    return report(trained, load(trained), out=file).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def shown_value(text: str) -> tuple[float, float]:
    """What a reader reads, and half a unit of its last digit."""
    raised = text.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    if found := re.fullmatch(r"([\d.]+) × 10(-?\d+)", raised):
        return float(found[1]) * 10 ** int(found[2]), 0.5 * 10.0 ** (int(found[2]) - 2)
    number = re.match(r"-?[\d,]+\.?(\d*)", text)
    assert number, text
    return float(number[0].replace(",", "")), 0.5 * 10.0 ** -len(number[1])


def scale(path: list[str | int], text: str) -> float:
    """KID is shown times 1000, parameters in millions, bytes in megabytes, accuracy in per cent."""
    if "kid" in path or "kid_standard_error" in path:
        return 1000
    if path[-1] == "parameters" or text.endswith("MB"):
        return 1e-6
    return 100 if text.endswith("%") else 1


def test_every_number_is_that_of_the_evaluation(page: Page, answer: dict[str, Any]) -> None:
    for path, exact, text in page.figures:
        value = lookup(answer, path)
        assert value is not None
        assert json.loads(exact) == value
        read, half = shown_value(text)
        assert read == pytest.approx(value * scale(path, text), abs=1.001 * half), (path, text)
    told = {json.dumps(path) for path, _, _ in page.figures}
    for place in range(len(answer["models"])):
        for below in (
            ["metrics", "efficientnet-lite0", "kid", "value"],
            ["training", "flops"],
            ["sampling", "seconds"],
        ):
            assert json.dumps(["models", place, *below]) in told


def test_the_page_asks_for_nothing_outside(page: Page, text: str) -> None:
    assert page.loads
    assert all(address.startswith("data:") for address in page.loads)
    assert all(link.startswith(("#", "https://arxiv.org/")) for link in page.links)
    assert "<script" not in text
    assert "default-src &#x27;none&#x27;; img-src data:;" in text  # a browser would refuse to
    assert "@import" not in text
    assert not re.search(r"url\((?!data:)", text)


def test_links_within_the_page_lead_somewhere_and_pictures_have_words(page: Page) -> None:
    assert {link[1:] for link in page.links if link.startswith("#")} <= page.ids
    assert {"pictures", "alone", "clusters", "routing", "training", "figures", "diagnostics", "measured"} <= page.ids
    assert all(picture["alt"] for picture in page.pictures)


def test_every_model_draws_every_prompt_and_the_real_picture_stands_above(page: Page) -> None:
    about = [picture["alt"] or "" for picture in page.pictures]
    prompts = [words.removeprefix("real: ") for words in about if words.startswith("real: ")]
    assert len(prompts) >= 3 * 2  # two of each cluster, and one held out where there is one
    for label in ("experts top-1", "experts full", "monolith", "student"):
        assert [words for words in about if words.startswith(f"{label}: ")] == [f"{label}: {told}" for told in prompts]
    for expert in range(3):
        assert sum(words.startswith(f"expert {expert}: ") for words in about) == len(prompts)


def test_the_same_report_again_draws_nothing(
    trained: Path, answer: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer
    again = report(trained, load(trained), out=tmp_path / "page.html")
    assert "pictures of" not in capsys.readouterr().out
    assert again.read_text(encoding="utf-8") == text


def test_what_is_missing_is_said_with_its_command(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("evaluation", "router", "monolith", "student", "logs"))
    words = " ".join("".join(Page(report(run, load(run), Options(steps=1)).read_text(encoding="utf-8")).words).split())
    for command in ("--router", "--monolith --match-flops"):
        assert f"atoll train {run} {command}" in words
    assert f"atoll evaluate {run}" in words
    assert "Each expert alone" in words


def test_one_expert_needs_no_router(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(
        trained, run, ignore=shutil.ignore_patterns("evaluation", "router", "monolith", "student", "00[12]")
    )
    page = Page(report(run, load(run), Options(steps=1)).read_text(encoding="utf-8"))
    assert any((picture["alt"] or "").startswith("experts top-1: ") for picture in page.pictures)
    assert "Experts need a router" not in "".join(page.words)


def test_the_routing_is_that_of_a_router_whatever_comes_first(trained: Path, tmp_path: Path) -> None:
    for routings, said in (
        (("nearest", "top-1"), "expert from noise to picture"),
        (("nearest",), "No router was asked"),
    ):
        file = report(trained, load(trained), Options(routings=routings, steps=1), out=tmp_path / "page.html")
        assert said in file.read_text(encoding="utf-8")


def test_errors_stand_under_the_experts_of_the_evaluation(
    trained: Path, answer: dict[str, Any], tmp_path: Path
) -> None:
    """An expert has gone, or another was finished, since it was evaluated."""
    assert answer["diagnostics"]["experts"]["expert_on_cluster"]["experts"] == [0, 1, 2]
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shutil.rmtree(run / "experts/001")
    text = report(run, load(run), Options(steps=1)).read_text(encoding="utf-8")
    heads = re.search(r'<thead><tr><td></td>(.*?)</tr></thead><tbody><tr><th scope="row">cluster 0', text)
    assert heads is not None
    assert re.findall(r"expert (\d)", heads[1]) == ["0", "1", "2"]


def test_prompts_of_ones_own(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "experts top-1: a <b>bold</b> & new thing" in [picture["alt"] for picture in page.pictures]
    assert not any((picture["alt"] or "").startswith("real") for picture in page.pictures)


def test_an_evaluation_may_ask_for_what_was_seen(trained: Path, answer: dict[str, Any], text: str) -> None:
    splits: tuple[Literal["train", "held-out"], ...] = ("train", "held-out")
    for split in splits:
        known = Shards.open(trained, [0, 1, 2], split).captions()
        assert set(prompts_of(trained, 3, 12, split=split).captions or []) <= set(known)
    assert answer["prompts"] == "held-out"
    assert "prompts that no training saw" in text


def test_a_run_without_experts_is_refused(prepared: Path) -> None:
    with pytest.raises(AtollError, match="no finished expert"):
        report(prepared, load(prepared))


def test_charts_have_round_ticks() -> None:
    assert ticks(0, 1) == pytest.approx([0, 0.5, 1.0]) or ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(32, 160) == pytest.approx([50, 100, 150])
    assert "<svg" in lines([Line("nothing", [(0, 0.0), (1, 0.0)])], "samples", "loss", about="a loss of zero")
    assert power(1.234e14) == "1.23 × 10¹⁴"


@pytest.mark.parametrize(("side", "kind"), [(SMALL, "PNG"), (SMALL + 1, "WEBP")])
def test_a_picture_in_the_page_is_what_it_says_it_is(side: int, kind: str) -> None:
    found = re.search(r'src="data:image/(\w+);base64,([^"]+)"', picture(Image.new("RGB", (side, 8)), "a bar"))
    assert found is not None
    assert found[1] == kind.lower()
    with Image.open(io.BytesIO(base64.b64decode(found[2]))) as image:
        assert (image.format, image.size) == (kind, (side, 8))
