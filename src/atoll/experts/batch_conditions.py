"""The conditions of a batch: the distinct ones, stored once, and the row of each image.

Images of one prompt share one condition, and under guidance all images share the null condition. A batch therefore
holds the D distinct conditions, with the null condition appended as row D:

    distinct   text (D + 1, tokens, width), pooled (D + 1, width), label (D + 1,), as far as the data has them
    rows       (batch,) with values 0 … D: the row of `distinct` that conditions each image; always on the CPU, so that
               the host can group images by row without waiting for an accelerator

Each expert prepares the distinct conditions once (keys and values of the text, label embeddings) and gathers
`prepared[rows]` at every sampling step, so the text is not projected again. On a server images arrive and leave between
two steps: `ConditionSlots` keeps a fixed number of rows and counts a version per row, so an expert prepares only the
rows that changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atoll.nets import Condition, PreparedCondition, concatenate
from atoll.nets.arguments import ArgumentTable


@dataclass(frozen=True, eq=False)
class BatchConditions:
    """Distinct conditions with the null condition last, and the row of each image's condition."""

    distinct: Condition
    rows: Tensor
    """Row of `distinct` for each image, (batch,), on the CPU."""
    count: int
    """Number of distinct conditions without the null condition; 0 for unconditional images."""
    reused: bool
    """Whether later steps use the same conditions, so that preparing them saves time."""
    versions: Sequence[int] = ()
    """Number of replacements of each row; empty if rows are never replaced. The null condition is never replaced."""
    negative: Tensor | None = None
    """Row of `distinct` that guidance moves each image away from, its negative prompt, (batch,) on the CPU; None is the
    null condition."""

    @classmethod
    def of(
        cls, condition: Condition | None, rows: Tensor, *, negative: Tensor | None = None, reused: bool = False
    ) -> "BatchConditions":
        """Append the null condition to distinct conditions; `rows` (batch,), on the CPU, selects one for each image."""
        if condition is None or not condition.tensors():
            return cls(Condition(), torch.zeros_like(rows), 0, reused)
        count = len(condition.tensors()[0])
        distinct = concatenate([condition, condition[:1].unconditional()])
        return cls(distinct, rows, count, reused, negative=negative)

    @property
    def conditioned(self) -> bool:
        """Whether there are conditions, without which guidance has no effect."""
        return self.count > 0

    @property
    def null(self) -> Tensor:
        """The row of every image's unconditional velocity (batch,): the null condition or its negative prompt."""
        return torch.full_like(self.rows, self.count) if self.negative is None else self.negative


class ConditionSlots:
    """A fixed number of replaceable conditions, followed by the null condition."""

    def __init__(self, example: Condition, count: int) -> None:
        """Fill all slots with the null condition; `example` is one row with the parts that all conditions will have."""
        # Texts of different lengths share one tensor, so the mask must mark the tokens of each.
        if example.text is not None and example.text_mask is None:
            raise ValueError("condition slots with text need a text_mask")
        self.count = count
        self.distinct = concatenate([example.unconditional()] * (count + 1))
        if example.table is not None:
            # Row 0 is the null condition, and a row for each slot follows.
            table = ArgumentTable(example.table.rows[:1] * (count + 1), example.table.batching)
            rows = torch.tensor([*range(1, count + 1), 0], device=self.distinct.tensors()[0].device)
            self.distinct = replace(self.distinct, arguments=rows, table=table)
        self.versions = [0] * (count + 1)

    def put(self, slot: int, condition: Condition) -> None:
        """Write a condition of one row into a slot."""
        # In place: `distinct` stays the same object, from which experts see that only some rows changed.
        for name in ("text", "text_mask", "pooled", "label"):
            part, given = getattr(self.distinct, name), getattr(condition, name)
            if part is not None:
                part[slot] = given[0]
        if self.distinct.table is not None and condition.table is not None and condition.arguments is not None:
            self.distinct.table.put(slot + 1, condition.table.rows[int(condition.arguments[0])])
        assert self.distinct.dropped is not None
        self.distinct.dropped[slot].fill_(False)  # on the device; an assignment would copy False to it
        self.versions[slot] += 1

    def batch(self, rows: Tensor) -> BatchConditions:
        """Return the conditions of images that use these slots (batch,)."""
        return BatchConditions(self.distinct, rows, self.count, True, self.versions)


def replace_rows(prepared: PreparedCondition, rows: Tensor, new: PreparedCondition) -> None:
    """Overwrite some rows of prepared conditions in place."""
    old_parts = [*prepared.embeddings, *(part for pair in prepared.keys_values for part in pair), prepared.mask]
    new_parts = [*new.embeddings, *(part for pair in new.keys_values for part in pair), new.mask]
    for old, fresh in zip(old_parts, new_parts, strict=True):
        # A part of one row is the same for all conditions (such as a null label), so it has no rows to replace.
        if old is not None and fresh is not None and len(old) > 1:
            old[rows] = fresh
