"""Atoll: train one image model as isolated experts on many islands, and sample from all of them as one."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.ensemble import load

__all__ = ["__version__", "load"]
__version__ = version("atoll")


def __getattr__(name: str) -> Any:
    """`atoll.load`, imported when it is first used: torch takes its time."""
    if name == "load":
        from atoll.ensemble import load

        return load
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
