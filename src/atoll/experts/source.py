"""A model before its weights are read: from a run, an exported folder, or a foreign release."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from atoll.core.errors import AtollError
from atoll.encoders.encoders import Encoders
from atoll.experts.expert import ExpertReference


@dataclass(frozen=True, eq=False)
class ModelReference:
    """References to the networks of a model, after their files were checked."""

    experts: Sequence[ExpertReference]
    router: ExpertReference | None
    encoders: Encoders
    missing: tuple[str, ...] = ()
    """Experts of a run that are not finished."""

    def choose(self, model: str, source: object) -> Self:
        """Keep all experts (`experts`) or one of them (`expert:K`), which needs no router."""
        kind, _, number = model.partition(":")
        if model == "experts":
            return self if len(self.experts) > 1 else replace(self, router=None)
        if kind == "expert" and number.isdecimal() and int(number) < len(self.experts):
            return replace(self, experts=[self.experts[int(number)]], router=None)
        raise AtollError(
            f"there is no model {model!r} in {source}; its models are experts, and expert:0 to "
            f"expert:{len(self.experts) - 1}"
        )
