"""Atoll: train one image model as isolated experts on many islands, and sample from all of them as one."""

from typing import TYPE_CHECKING, Any

from atoll.core.version import __version__

if TYPE_CHECKING:
    from atoll.apps.models.pipeline import AtollPipeline
    from atoll.ensemble import load

__all__ = ["AtollPipeline", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """`atoll.load` and `atoll.AtollPipeline`, imported when first used: torch and diffusers take their time."""
    if name == "load":
        from atoll.ensemble import load

        return load
    if name == "AtollPipeline":
        from atoll.apps.models.pipeline import AtollPipeline

        return AtollPipeline
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
