"""The interface of verbs: a dataclass of options with a `run` method. Its docstrings are the help texts."""

from pathlib import Path
from typing import Annotated, Protocol, runtime_checkable

from tyro.conf import Positional, arg

from atoll.core.options import Overrides

RunFolder = Annotated[Positional[Path], arg(metavar="RUN")]
ModelArgument = Annotated[Positional[str], arg(metavar="RUN")]
"""A run, an export or a hub name. It is a text: a path would drop the `./` that distinguishes a folder from a name."""
KeyFile = Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: atoll/key.pem in the user config)")]


class Verb(Protocol):
    """One verb."""

    def run(self) -> None: ...


@runtime_checkable
class Configured(Protocol):
    """A verb that accepts settings of a run."""

    @property
    def overrides(self) -> Overrides: ...
