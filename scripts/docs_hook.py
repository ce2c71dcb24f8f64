"""A hook of mkdocs (`make docs`): generated pages and tables, equations, and links between docs/ and the repository.

Pages outside docs/ (recipes, benchmarks, CONTRIBUTING.md) become part of the site, so that links to them are checked. A
link to any other file of the repository is shown as its path.
"""

import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # mkdocs loads this file by its path

from reference import PAGES, TABLES

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = (
    *("recipes/README.md", "recipes/*/README.md", "recipes/*/*.png", "benchmarks/README.md"),
    *("CONTRIBUTING.md", "CHANGELOG.md"),
)
"""Pages outside docs/ and their images, which are part of the site under the same paths."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
"""A relative link or image: exclamation mark, text, path, fragment."""


def fill_tables(markdown: str) -> str:
    """Replace the markers of generated tables."""
    return re.sub(r"<!-- generated: (\w+) -->", lambda found: TABLES[found.group(1)](), markdown)


def render_equations(markdown: str) -> str:
    """Replace fenced blocks of LaTeX, which GitHub renders itself, by MathML, which needs no script."""
    from latex2mathml.converter import convert

    def render(found: re.Match[str]) -> str:
        latex, _, number = found.group(1).partition(r"\tag")
        return f'<div class="equation">{convert(latex, display="block")}<span>{number.strip("{} ")}</span></div>'

    return re.sub(r"^```math\n(.*?)\n```$", render, markdown, flags=re.MULTILINE | re.DOTALL)


def notebook_page(path: Path) -> str:
    """Return the cells of a notebook as a page: text and code."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ("".join(cell["source"]) for cell in cells)
    parts = [
        f"```python\n{text}\n```" if cell["cell_type"] == "code" else text
        for cell, text in zip(cells, texts, strict=True)
    ]
    return "\n\n".join([*parts, f"*This page is the notebook [{path.name}]({path.name}), without its outputs.*\n"])


def outside_files() -> list[str]:
    """Return the paths of the files outside docs/ that are part of the site."""
    return sorted(path.relative_to(ROOT).as_posix() for pattern in OUTSIDE for path in ROOT.glob(pattern))


def site_links(markdown: str, page: str) -> str:
    """Change links between docs/ and the rest of the repository into links of the site."""
    outside = outside_files()
    start = page if page in outside else f"docs/{page}"

    def change(found: re.Match[str]) -> str:
        image, text, path, fragment = found.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(start), path))
        if target.startswith("docs/") or target in outside:
            here = posixpath.dirname(page)
            return f"{image}[{text}]({posixpath.relpath(target.removeprefix('docs/'), here or '.')}{fragment or ''})"
        if not (ROOT / target).exists():
            return found.group(0)  # a broken link, which mkdocs reports
        return f"`{target}`" if text.strip("`") in target else f"{text} (`{target}`)"

    return LINK.sub(change, markdown)


def expand_folders(nav: Any, pages: list[str]) -> Any:
    """Replace a folder in the navigation (`how-to/`) by its pages in alphabetical order."""
    if isinstance(nav, list):
        return [expand_folders(entry, pages) for entry in nav]
    if isinstance(nav, dict):
        return {title: expand_folders(entry, pages) for title, entry in nav.items()}
    if nav.endswith("/"):
        return sorted(page for page in pages if page.startswith(nav))
    return nav


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages and those outside docs/ to the site, and complete the navigation."""
    from mkdocs.structure.files import File

    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    for notebook in sorted((ROOT / "docs").glob("*/*.ipynb")):
        page = notebook.relative_to(ROOT / "docs").with_suffix(".md").as_posix()
        files.append(File.generated(config, page, content=notebook_page(notebook)))
    for path in outside_files():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    config.nav = expand_folders(config.nav, [file.src_uri for file in files.documentation_pages()])
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill the generated tables of a page, render its equations and change its links."""
    return site_links(render_equations(fill_tables(markdown)), page.file.src_uri)
