"""The conditioning of networks: text tokens, a pooled text vector, a class label, any of them together, or nothing."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from atoll.nets.arguments import ArgumentTable

_EXPECTED: dict[str, tuple[int, type, str]] = {
    "text": (3, float, "floating point of shape (batch, length, width)"),
    "text_mask": (2, bool, "bool of shape (batch, length), True for tokens"),
    "pooled": (2, float, "floating point of shape (batch, width)"),
    "label": (1, int, "integers of shape (batch,)"),
    "arguments": (1, int, "integers of shape (batch,)"),
    "dropped": (1, bool, "bool of shape (batch,)"),
}
"""Number of dimensions and dtype of each part, and both in words."""
OF_PROMPTS = frozenset({"text", "pooled", "arguments"})
"""The parts that are made of a prompt."""


@dataclass(frozen=True)
class Condition:
    """The conditioning of one batch. A part that is None is replaced by the learned null condition of the network."""

    text: Tensor | None = None
    """Text tokens, (batch, length, text width)."""
    text_mask: Tensor | None = None
    """True where `text` holds a token, (batch, length); None means everywhere."""
    pooled: Tensor | None = None
    """One vector per text, (batch, pooled width)."""
    label: Tensor | None = None
    """Class labels, (batch,)."""
    arguments: Tensor | None = None
    """Rows of `table` (batch,), for base networks, whose conditions are any arguments."""
    dropped: Tensor | None = None
    """True for images whose whole condition is replaced by the null condition, (batch,)."""
    table: ArgumentTable | None = None
    """The arguments by row, shared by all parts of a batch."""

    def __post_init__(self) -> None:
        """Check shapes and dtypes, but no values: that would synchronize with the GPU."""
        if torch.compiler.is_compiling():
            return
        for name, part in self._parts().items():
            if part is None:
                continue
            # The dtype of masks matters: attention would silently add an integer mask to its scores.
            dimensions, kind, expected = _EXPECTED[name]
            found = float if part.is_floating_point() else bool if part.dtype == torch.bool else int
            if part.ndim != dimensions or found is not kind:
                hint = "; convert it with .bool()" if kind is bool and found is int else ""
                raise ValueError(f"{name} must be {expected}, got {part.dtype} of shape {tuple(part.shape)}{hint}")
        if self.text is not None and self.text_mask is not None and self.text.shape[:2] != self.text_mask.shape:
            raise ValueError(
                f"text_mask has shape {tuple(self.text_mask.shape)}, expected {tuple(self.text.shape[:2])} for text of "
                f"shape {tuple(self.text.shape)}"
            )
        rows = {name: len(part) for name, part in self._parts().items() if part is not None}
        if len(set(rows.values())) > 1:
            raise ValueError(f"all parts of a condition must have the same batch size, got {rows}")

    def drop(self, samples: Tensor) -> "Condition":
        """Replace the condition of the marked images by the null condition, as training does for guidance."""
        return replace(self, dropped=samples if self.dropped is None else self.dropped | samples)

    def marked(self) -> "Condition":
        """Return the condition with `dropped` filled in, so that the null condition takes part in every training step.

        Distributed training waits for the gradient of every weight, even in a batch where no image was dropped.
        """
        given = next((part for part in (self.text, self.pooled, self.label, self.arguments) if part is not None), None)
        return self if given is None else self.drop(torch.zeros(len(given), dtype=torch.bool, device=given.device))

    def unconditional(self) -> "Condition":
        """Return the null condition for every image of this batch."""
        given = next((part for part in self._parts().values() if part is not None), None)
        return self if given is None else self.drop(torch.ones(len(given), dtype=torch.bool, device=given.device))

    def map(self, function: Callable[[Tensor], Tensor]) -> "Condition":
        """Return the condition with `function` applied to each part."""
        given: dict[str, Any] = {name: function(part) for name, part in self._parts().items() if part is not None}
        return replace(self, **given)

    def tensors(self) -> list[Tensor]:
        """Return the parts that are given, in a fixed order."""
        return [part for part in self._parts().values() if part is not None]

    def with_tensors(self, parts: Sequence[Tensor]) -> "Condition":
        """Return a condition with other tensors for the parts that are given, in the order of `tensors`."""
        names = (name for name, part in self._parts().items() if part is not None)
        given: dict[str, Any] = dict(zip(names, parts, strict=True))
        return replace(self, **given)

    def to(self, device: torch.device | str) -> "Condition":
        """Return the condition on another device."""
        return self.map(lambda part: part.to(device))

    def __getitem__(self, samples: Tensor | slice) -> "Condition":
        """Return the condition of some images of the batch."""
        return self.map(lambda part: part[samples])

    def _parts(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "table"}


def check_rows(condition: Condition, batch: int) -> None:
    """Raise an error if the batch size of the condition is neither 1 nor that of the images."""
    given = next((part for part in condition._parts().values() if part is not None), None)
    if given is not None and len(given) not in (1, batch):
        raise ValueError(f"the condition has {len(given)} rows for a batch of {batch} images")


def check_labels(label: Tensor, classes: int) -> None:
    """Raise an error for labels without an embedding; -1 and, as in DiT, `classes` mean the null class."""
    # On a GPU, this comparison would wait for all queued kernels, so only tensors on the CPU are checked. Subclasses of
    # Tensor are not checked: fake tensors have no values.
    if type(label) is Tensor and label.device.type == "cpu" and label.numel() and not torch.compiler.is_compiling():
        largest = int(label.max())
        if largest > classes:
            raise ValueError(
                f"label {largest} is out of range: there are {classes} classes, 0 to {classes - 1}, and {classes} or "
                "-1 for the null class"
            )


def concatenate(conditions: Sequence[Condition]) -> Condition:
    """Join conditions into one batch, such as the conditional and unconditional halves of a guided sampling step.

    All of them must have the same parts; missing masks of tokens and of dropped images are filled in.
    """
    parts: dict[str, Any] = {}
    for name in ("text", "pooled", "label", "arguments"):
        tensors = [getattr(condition, name) for condition in conditions]
        given = [tensor for tensor in tensors if tensor is not None]
        if given and len(given) < len(tensors):
            raise ValueError(
                f"cannot join conditions with and without {name}; use Condition.unconditional() for the null condition"
            )
        parts[name] = torch.cat(given) if given else None
    tables = [condition.table for condition in conditions if condition.table is not None]
    if tables:
        parts["table"] = tables[0]
        if any(table is not tables[0] for table in tables):
            # The rows of one table follow those of the one before.
            starts = itertools.accumulate((len(table.rows) for table in tables), initial=0)
            rows = [
                own.arguments + start
                for own, start in zip(conditions, starts, strict=False)
                if own.arguments is not None
            ]
            parts["arguments"] = torch.cat(rows)
            parts["table"] = ArgumentTable([row for table in tables for row in table.rows], tables[0].batching)
    # Missing masks stand for real tokens everywhere, and for images that are not dropped.
    masks = [condition.text_mask for condition in conditions]
    if any(mask is not None for mask in masks):
        texts = [condition.text for condition in conditions if condition.text is not None]
        filled = [
            text.new_ones(text.shape[:2], dtype=torch.bool) if mask is None else mask
            for mask, text in zip(masks, texts, strict=True)
        ]
        parts["text_mask"] = torch.cat(filled)
    if any(condition.dropped is not None for condition in conditions):
        dropped = [condition.marked().dropped for condition in conditions]
        parts["dropped"] = torch.cat([part for part in dropped if part is not None])
    return Condition(**parts)


@dataclass(frozen=True)
class PreparedCondition:
    """A condition with everything precomputed that is the same in all sampling steps."""

    embeddings: tuple[Tensor | None, ...]
    """Sum of label and pooled text embeddings for each timestep embedding, (batch or 1, width)."""
    keys_values: tuple[tuple[Tensor, Tensor], ...]
    """Keys and values of the text for the cross-attention of every block; empty without text."""
    mask: Tensor | None
    """Attention mask over the text tokens."""

    def __getitem__(self, samples: Tensor | slice) -> "PreparedCondition":
        """Return the prepared condition of some images; a part that is the same for all images has only one row."""

        def some(part: Tensor) -> Tensor:
            if len(part) > 1:
                return part[samples]
            return part if isinstance(samples, slice) else part.expand(len(samples), *part.shape[1:])

        return PreparedCondition(
            # A single row stays single: with one timestep and one embedding for the batch, modulation is cheaper.
            tuple(part if part is None or len(part) == 1 else part[samples] for part in self.embeddings),
            tuple((some(keys), some(values)) for keys, values in self.keys_values),
            None if self.mask is None else some(self.mask),
        )
