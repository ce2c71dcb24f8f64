"""Errors for users: what is wrong, what was expected, and the most similar valid name."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from pydantic import ValidationError

P = ParamSpec("P")
R = TypeVar("R")


class AtollError(Exception):
    """Bad input that the user can fix. The message names the file or key, the reason and what to do."""


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, without its details."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def wrong_fields(error: "ValidationError", limit: int = 3) -> str:
    """Return what is wrong with a pydantic model, one phrase for each of its first `limit` wrong fields."""
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:limit])


def shown(text: str) -> str:
    """Return a text of strangers, such as a file name, without what a terminal would obey or break a line at."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def listed(names: Sequence[str], limit: int = 10) -> str:
    """Return names for a message: the first ones, and the number of the others."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(map(shown, names[:limit])) + more


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to `name`, or None if no name is similar."""
    known = list(known)
    # A slip of the finger (0.8), then a word of a longer name (steps: num_inference_steps), then what resembles it:
    # 0.5 is a choice below difflib's default of 0.6, because in short names two wrong letters weigh much.
    slips, similar = (get_close_matches(name, known, n=1, cutoff=cutoff) for cutoff in (0.8, 0.5))
    return next(iter([*slips, *(other for other in known if name in other.split("_")), *similar]), None)


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """Return the message for an unknown name: `unknown solver 'eulr' (did you mean 'euler'?); known: dpm++, …`."""
    known = list(known)
    guess = nearest(str(name), known)
    hint = f" (did you mean {guess!r}?)" if guess else ""
    return f"unknown {kind} {name!r}{hint}; known: {', '.join(known)}"


def suggest_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Let an unknown keyword argument raise an error that names the most similar one."""
    known = list(inspect.signature(function).parameters)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if wrong := next((name for name in kwargs if name not in known), None):
            # TypeError, as Python raises it without the names.
            raise TypeError(f"{function.__qualname__}: {unknown('keyword', wrong, [n for n in known if n != 'self'])}")
        return function(*args, **kwargs)

    return call
