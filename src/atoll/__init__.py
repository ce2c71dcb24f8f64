"""Atoll: train one image model as isolated experts on many islands, and sample from all of them as one."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from atoll.core.version import __version__

if TYPE_CHECKING:
    from atoll import flow
    from atoll.apps.models.attach import attach, detach
    from atoll.apps.models.pipeline import AtollPipeline
    from atoll.ensemble import load

__all__ = ["AtollPipeline", "__version__", "attach", "detach", "flow", "load"]


def __getattr__(name: str) -> Any:
    """Import `atoll.load` and the others when they are first used: torch and diffusers take their time."""
    if name == "load":
        from atoll.ensemble import load

        return load
    if name == "AtollPipeline":
        from atoll.apps.models.pipeline import AtollPipeline

        return AtollPipeline
    if name in ("attach", "detach"):
        from atoll.apps.models import attach

        return getattr(attach, name)
    if name == "flow":
        return import_module("atoll.flow")
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the names above too, for completion."""
    return sorted({*globals(), *__all__})
