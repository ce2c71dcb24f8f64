"""Refusing bad input: what was given, what was expected, and which right name is nearest."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class AtollError(Exception):
    """Bad input that a person can mend. The message names the file or key, the reason and what to do."""


def first_line(error: BaseException) -> str:
    """What an error of a library says, without its details."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def wrong_fields(error: "ValidationError", limit: int = 3) -> str:
    """Return what is wrong with a model, one phrase for each of its first wrong fields."""
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:limit])


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, if any is like it at all."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=0.5)), None)


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """The sentence for an unknown name: `unknown solver 'eulr' (did you mean 'euler'?); known: dpm++, euler, …`."""
    known = list(known)
    guess = nearest(str(name), known)
    hint = f" (did you mean {guess!r}?)" if guess else ""
    return f"unknown {kind} {name!r}{hint}; known: {', '.join(known)}"
