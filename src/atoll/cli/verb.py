"""What every verb is: a dataclass of its options with the work in `run`."""

from typing import Annotated, Protocol, runtime_checkable

from tyro.conf import Suppress

Overrides = Annotated[dict[str, str], Suppress]
"""Dotted options (`--section.key VALUE`), taken out of the command line before the verb reads its own."""


class Verb(Protocol):
    """One verb."""

    def run(self) -> None:
        """Do the work."""


@runtime_checkable
class Configured(Protocol):
    """A verb that takes settings of a run."""

    overrides: Overrides
