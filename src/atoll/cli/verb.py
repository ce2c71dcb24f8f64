"""The interface of verbs: a dataclass of options with a `run` method. Its docstrings are the help texts."""

from pathlib import Path
from typing import Annotated, Literal, Protocol, runtime_checkable

from tyro.conf import Positional, Suppress, arg

Overrides = Annotated[dict[str, str], Suppress]
"""Settings of a run (`--section.key VALUE`), removed from the command line before tyro parses the other options."""
RunFolder = Annotated[Positional[Path], arg(metavar="RUN")]
ModelName = Annotated[Positional[str], arg(metavar="RUN")]
"""A run, an export or a hub name. It is a text: a path would drop the `./` that distinguishes a folder from a name."""
KeyFile = Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: atoll/key.pem in the user config)")]
MaxLoadedExperts = Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: all)")]
Devices = Annotated[str | None, arg(metavar="LIST", help_behavior_hint="(default: all visible GPUs, else cpu)")]
DType = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    arg(help_behavior_hint="(default: bfloat16 on GPUs, float32 on CPUs)"),
]


class Verb(Protocol):
    """One verb."""

    def run(self) -> None: ...


@runtime_checkable
class Configured(Protocol):
    """A verb that accepts settings of a run."""

    overrides: Overrides
