"""Atoll: train one image model as isolated experts on many islands, and sample from all of them as one."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from atoll.core.version import __version__

if TYPE_CHECKING:
    from atoll import flow
    from atoll.api import evaluate, export, launch, prepare, sample, train
    from atoll.apps.models.attach import attach, detach
    from atoll.apps.models.pipeline import AtollPipeline
    from atoll.core.errors import AtollError
    from atoll.core.progress import Update
    from atoll.ensemble import load

__all__ = [
    "AtollError",
    "AtollPipeline",
    "Update",
    "__version__",
    "attach",
    "detach",
    "evaluate",
    "export",
    "flow",
    "launch",
    "load",
    "prepare",
    "sample",
    "train",
]
_HOMES = {
    **dict.fromkeys(("evaluate", "export", "launch", "prepare", "sample", "train"), "atoll.api"),
    **dict.fromkeys(("attach", "detach"), "atoll.apps.models.attach"),
    "AtollError": "atoll.core.errors",
    "Update": "atoll.core.progress",
    "AtollPipeline": "atoll.apps.models.pipeline",
    "load": "atoll.ensemble",
}
"""The modules of these names. They are imported when they are first used: torch and diffusers take their time."""


def __getattr__(name: str) -> Any:
    """Import `atoll.load` and the others when they are first used."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "flow":
        return import_module("atoll.flow")
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, for completion."""
    return sorted(__all__)


class _Facade(ModuleType):
    """Let `atoll.train` be the function, although Python would set it to the package of this name.

    `from atoll.train import …` is the package.
    """

    @property
    def train(self) -> Any:
        return __getattr__("train")

    @train.setter
    def train(self, package: ModuleType) -> None:
        """Ignore what the import of the package sets."""


sys.modules[__name__].__class__ = _Facade
