"""Count the lines of code of src/atoll, without blank lines, comments and docstrings, and the lines of comments.

python scripts/count.py            # this tree
python scripts/count.py COMMIT     # another commit, and this tree as a share of it
"""

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = "src/atoll"
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


_DIRECTIVE = re.compile(r"#\s*(type:|noqa|fmt:|ruff:|pragma|!)")


def code_lines(text: str) -> set[int]:
    """Return the numbers of a Python file's lines that hold code."""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        # A string that stands alone is documentation: of a module, class, function or constant.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines - docstrings


def comment_lines(text: str) -> set[int]:
    """Return the numbers of a Python file's lines with a comment that is no directive to a tool."""
    return {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and not _DIRECTIVE.match(token.string)
    }


def working_tree() -> Iterator[tuple[str, str]]:
    """Yield name and text of every Python file of this tree."""
    for file in sorted((ROOT / SOURCE).rglob("*.py")):
        yield file.relative_to(ROOT / SOURCE).as_posix(), file.read_text(encoding="utf-8")


def committed(commit: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of every Python file of a commit."""
    names = _git("ls-tree", "-r", "--name-only", commit, SOURCE).split()
    for name in names:
        if name.endswith(".py"):
            yield name.removeprefix(f"{SOURCE}/"), _git("show", f"{commit}:{name}")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


def by_package(files: Iterator[tuple[str, str]], lines: Callable[[str], set[int]] = code_lines) -> Counter[str]:
    """Count the lines of each package: of code, or of another kind."""
    counts: Counter[str] = Counter()
    for name, text in files:
        counts[name.split("/")[0] if "/" in name else "."] += len(lines(text))
    return counts


def main() -> None:
    """Print the counts of this tree and, if one is named, of another commit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commit", nargs="?", help="compare with this commit")
    commit = parser.parse_args().commit
    here = by_package(working_tree())
    comments = by_package(working_tree(), comment_lines)
    print(f"{'package':<12} {'code':>7} {'comments':>9} {'per 100':>8}")
    for package, count in sorted(here.items()):
        print(f"{package:<12} {count:>7,} {comments[package]:>9,} {100 * comments[package] / max(count, 1):>8.1f}")
    print(f"{'total':<12} {here.total():>7,} {comments.total():>9,} {100 * comments.total() / here.total():>8.1f}")
    if commit:
        there = by_package(committed(commit)).total()
        print(f"{commit:.12} {there:>7,}   ratio {here.total() / there:.3f}")


if __name__ == "__main__":
    main()
