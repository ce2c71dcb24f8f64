"""The documentation: whole tables, links that lead somewhere, and a reference that misses nothing."""

import dataclasses
import re
import sys
import tomllib
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts"))

import docs_hook  # noqa: E402
import reference  # noqa: E402
from atoll.cli import VERBS  # noqa: E402
from atoll.core.config import Config, keys_at  # noqa: E402

GUIDES = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*GUIDES, ROOT / "README.md", *(ROOT / name for name in docs_hook.outside_files() if name.endswith(".md"))]


@pytest.fixture(scope="module")
def cli_page() -> str:
    return reference.cli_page()


@pytest.fixture(scope="module")
def configuration_page() -> str:
    return reference.configuration_page()


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    """Return a page without fenced and indented code blocks and comments."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"(?:^|\n)\n(?:(?: {4}|\t).*\n)+", "\n\n", text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_have_whole_headers(page: Path) -> None:
    lines = without_code(page.read_text(encoding="utf-8")).splitlines()
    for header, rule in pairwise(lines):
        if re.fullmatch(r"\s*\|(\s*:?-+:?\s*\|)+\s*", rule):
            cells = re.split(r"(?<!\\)\|", header.strip().strip("|"))
            assert all(cell.strip() for cell in cells), header
            assert len(cells) == rule.strip().strip("|").count("|") + 1, header


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_to_a_file(page: Path) -> None:
    generated = {(ROOT / "docs" / name).resolve() for name in reference.PAGES}
    for found in docs_hook.LINK.finditer(without_code(page.read_text(encoding="utf-8"))):
        target = (page.parent / found.group(3)).resolve()
        assert target.exists() or target in generated, f"{name_of(page)}: {found.group(0)}"


@cache
def anchors(page: Path) -> set[str]:
    """Return the fragments of the headings of a page; a generated page is written first."""
    name = page.relative_to(ROOT / "docs").as_posix() if page.is_relative_to(ROOT / "docs") else ""
    text = reference.PAGES[name]() if name in reference.PAGES else page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", docs_hook.fill_tables(text), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_fragments_of_links_lead_to_a_heading(page: Path) -> None:
    text = without_code(page.read_text(encoding="utf-8"))
    for found in re.finditer(r"\]\(([^)\s#:]*)#([^)\s]+)\)", text):
        target = (page.parent / found[1]).resolve() if found[1] else page
        assert found[2] in anchors(target), f"{name_of(page)}: {found[0]}"


def test_the_tests_that_the_trust_page_names_exist() -> None:
    page = (ROOT / "docs/explanation/trust.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(named) > 30
    for file, test in named:
        file = file if file.startswith("tests/") else f"tests/share/{file}"
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_there_are_fragments_to_check() -> None:
    assert "what-the-demo-measures" in anchors(ROOT / "docs/tutorials/first-run.md")
    assert "the-root" in anchors(ROOT / "docs/reference/formats.md")
    assert "#what-the-demo-measures" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_of_the_repository_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|scripts|examples|benchmarks|docs)/[\w/.-]+)`", page.read_text(encoding="utf-8"))
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []


def options_of(verb: Any) -> list[dataclasses.Field[Any]]:
    """Return the options of a verb, then those of the options that are nested in it, as in its help."""
    fields = [field for field in dataclasses.fields(verb) if "Suppress" not in repr(field.type)]
    nested = [field for field in fields if dataclasses.is_dataclass(field.default_factory)]
    own = [field for field in fields if field not in nested]
    return own + [part for field in nested for part in options_of(field.default_factory)]


def test_the_reference_has_every_verb_and_option(cli_page: str) -> None:
    parts = {part.split("\n")[0]: part for part in cli_page.split("\n## ")}
    for name, verb in VERBS.items():
        rows = re.findall(r"^\| `([^`]+)` \|", parts[f"atoll {name}"], re.MULTILINE)
        assert rows == [argument_of(field) for field in options_of(verb)]


def argument_of(field: dataclasses.Field[Any]) -> str:
    """Return how the command line shows a field of a verb: its placeholder, `--name`, or `--no-name` if it is true."""
    settings = [part for part in get_args(field.type)[1:] if hasattr(part, "metavar")]
    if "Positional" in repr(field.type):
        return str(settings[0].metavar)
    name = next((part.name for part in settings if part.name), field.name)
    return f"--{'no-' if field.default is True else ''}{name.replace('_', '-')}"


def test_a_flag_is_off_by_default(cli_page: str) -> None:
    assert "| `--keep-labels` | flag | off |" in cli_page
    assert "| `--no-fold` | flag | off: fold into AdaLN-Single by least squares |" in cli_page


def test_the_reference_has_every_configuration_key(configuration_page: str) -> None:
    for section, field in Config.model_fields.items():
        nested = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        names = [f"{section}.{key}" for key in keys_at([section])] if nested else [section]
        assert [name for name in names if f"| `{name}` |" not in configuration_page] == []


def test_generated_tables_have_a_meaning_in_each_row_and_no_unknown_marker(
    cli_page: str, configuration_page: str
) -> None:
    tables = {name: write() for name, write in reference.TABLES.items() if name != "layout"}
    for page in (cli_page, configuration_page, *tables.values()):
        rows = [line for line in page.splitlines() if line.startswith("|")]
        assert rows
        assert [row for row in rows if row.endswith("– |")] == []
    for name in ("metrics", "lease", "root", "policy", "snapshot", "signature"):
        assert tables[name].splitlines()[0].endswith("| meaning |")
    markers = [m for page in GUIDES for m in re.findall(r"<!-- generated: (\w+) -->", page.read_text(encoding="utf-8"))]
    assert set(markers) == set(reference.TABLES)


def test_equations_become_mathml() -> None:
    page = "Text\n\n```math\nv = \\sum_k \\frac{a}{b} \\tag{3}\n```\n\nmore"
    rendered = docs_hook.render_equations(page)
    assert "<mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac>" in rendered
    assert rendered.endswith("<span>3</span></div>\n\nmore")
    fences = re.findall(r"^```math$", "".join(page.read_text(encoding="utf-8") for page in GUIDES), re.MULTILINE)
    assert len(fences) > 20
    for page in GUIDES:
        assert "merror" not in docs_hook.render_equations(page.read_text(encoding="utf-8"))


def test_the_index_of_guides_has_every_page_in_the_order_of_the_navigation() -> None:
    linked = re.findall(
        r"^- \[.*\]\(([\w-]+\.md)\)", (ROOT / "docs/how-to/index.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    listed = re.findall(r"- how-to/([\w-]+\.md)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert listed == ["index.md", *linked]
    assert {*listed} == {page.name for page in GUIDES if page.parent.name == "how-to"}


def test_the_readme_lists_the_extras() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("| extra | adds |")[1].split("\n\n")[0]
    assert {*re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)} == {*extras} - {"docs", "dev"}


def test_the_python_api_names_modules_that_exist() -> None:
    assert [module for module in reference.PUBLIC if find_spec(module) is None] == []


def test_links_change_between_the_repository_and_the_site() -> None:
    inside = "[a](../../recipes/README.md) [b](bridge.md#x) `c` [it](../../src/atoll) [src/atoll](../../src/atoll)"
    outside = "[a](../../docs/explanation/bridge.md) [b](../README.md) ![c](../../docs/figures/demo.png)"
    assert docs_hook.site_links(inside, "explanation/method.md") == (
        "[a](../recipes/README.md) [b](bridge.md#x) `c` it (`src/atoll`) `src/atoll`"
    )
    assert docs_hook.site_links(outside, "recipes/bridge/README.md") == (
        "[a](../../explanation/bridge.md) [b](../README.md) ![c](../../figures/demo.png)"
    )
    nav = [{"How-to": "how-to/"}, "index.md"]
    pages = ["how-to/b.md", "index.md", "how-to/a.md"]
    assert docs_hook.expand_folders(nav, pages) == [{"How-to": ["how-to/a.md", "how-to/b.md"]}, "index.md"]
