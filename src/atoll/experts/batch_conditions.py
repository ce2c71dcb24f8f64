"""What the samples of a batch are told: distinct conditions, and which of them each sample has.

Many pictures of one prompt have one condition, and under guidance all share the null condition. Each expert prepares
the distinct ones once (keys and values of the text, label embeddings), and takes rows of them at every step. Where
samples come and go, as on a server, `ConditionSlots` keeps their conditions: only what is new is prepared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.nets import Condition, PreparedCondition, concatenate


@dataclass(frozen=True, eq=False)
class BatchConditions:
    """Distinct conditions, the null condition last, and the number of each sample's condition."""

    distinct: Condition
    rows: Tensor
    count: int
    reused: bool
    """Whether later steps are told the same, so that preparing pays."""
    versions: Sequence[int] = ()
    """How often each of the distinct conditions was replaced, where that happens; the null condition never is."""

    @classmethod
    def of(cls, condition: Condition | None, rows: Tensor, reused: bool = False) -> "BatchConditions":
        """From the distinct conditions without the null."""
        parts = [] if condition is None else [condition.text, condition.pooled, condition.label]
        given = next((part for part in parts if part is not None), None)
        if given is None or condition is None:
            return cls(Condition(), torch.zeros_like(rows), 0, reused)
        condition = condition.to(rows.device)
        return cls(concatenate([condition, condition[:1].unconditional()]), rows, len(given), reused)

    @property
    def conditioned(self) -> bool:
        """Whether the samples are told anything, so that guidance means something."""
        return self.count > 0

    @property
    def null(self) -> Tensor:
        """The number of the null condition, for every sample."""
        return torch.full_like(self.rows, self.count)


class ConditionSlots:
    """Conditions that come and go: so many places, each filled by itself, and the null condition after them."""

    def __init__(self, example: Condition, count: int) -> None:
        """All places hold the null condition; `example` is one row with the parts that all conditions will have."""
        if example.text is not None and example.text_mask is None:
            raise ValueError("conditions that come and go need a mask of their text tokens")
        self.count = count
        self.distinct = concatenate([example.unconditional()] * (count + 1))
        self.versions = [0] * (count + 1)

    def put(self, place: int, condition: Condition) -> None:
        """Fill a place with a condition of one row."""
        for name in ("text", "text_mask", "pooled", "label"):
            part, given = getattr(self.distinct, name), getattr(condition, name)
            if part is not None:
                part[place] = given[0]
        assert self.distinct.dropped is not None
        self.distinct.dropped[place] = False
        self.versions[place] += 1

    def batch(self, rows: Tensor) -> BatchConditions:
        """For samples that have the conditions of these places."""
        return BatchConditions(self.distinct, rows, self.count, True, self.versions)


def replace_rows(prepared: PreparedCondition, rows: Tensor, new: PreparedCondition) -> None:
    """Write newly prepared conditions over some rows; a part that is the same for all of them stays."""
    old_parts = [*prepared.embeddings, *(part for pair in prepared.keys_values for part in pair), prepared.mask]
    new_parts = [*new.embeddings, *(part for pair in new.keys_values for part in pair), new.mask]
    for old, fresh in zip(old_parts, new_parts, strict=True):
        if old is not None and fresh is not None and len(old) > 1:
            old[rows] = fresh
