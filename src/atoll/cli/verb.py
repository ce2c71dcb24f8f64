"""What every verb is: a dataclass of its options with the work in `run`."""

from typing import Annotated, Protocol

from tyro.conf import Suppress

Overrides = Annotated[dict[str, str], Suppress]
"""Dotted options (`--section.key VALUE`), taken out of the command line before the verb reads its own."""


class Verb(Protocol):
    """One verb."""

    overrides: Overrides

    def run(self) -> None:
        """Do the work."""
