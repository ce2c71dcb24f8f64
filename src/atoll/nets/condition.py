"""What a network may be told besides the noisy image: text tokens, a pooled text vector, a class label, or nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Condition:
    """The conditioning of one batch. A part that is None is replaced by the network's learned null condition."""

    text: Tensor | None = None
    """Text tokens, (batch, length, text width)."""
    text_mask: Tensor | None = None
    """True where `text` holds a token, (batch, length); None means everywhere."""
    pooled: Tensor | None = None
    """One vector per text, (batch, pooled width)."""
    label: Tensor | None = None
    """Class labels, (batch,)."""
    dropped: Tensor | None = None
    """True for samples whose whole condition is replaced by the null condition, (batch,)."""

    def __post_init__(self) -> None:
        """Check shapes and dtypes; nothing here waits for an accelerator."""
        if torch.compiler.is_compiling():
            return
        _check_part("text", self.text, 3, "floating point of shape (batch, length, width)", float)
        _check_part("text_mask", self.text_mask, 2, "bool of shape (batch, length), True for tokens", bool)
        _check_part("pooled", self.pooled, 2, "floating point of shape (batch, width)", float)
        _check_part("label", self.label, 1, "integers of shape (batch,)", int)
        _check_part("dropped", self.dropped, 1, "bool of shape (batch,)", bool)
        if self.text is not None and self.text_mask is not None and self.text.shape[:2] != self.text_mask.shape:
            raise ValueError(
                f"text_mask has shape {tuple(self.text_mask.shape)}, expected {tuple(self.text.shape[:2])} for text of "
                f"shape {tuple(self.text.shape)}"
            )
        rows = {name: len(part) for name, part in self._parts().items() if part is not None}
        if len(set(rows.values())) > 1:
            raise ValueError(f"all parts of a condition must have one batch size, got {rows}")

    def drop(self, samples: Tensor) -> "Condition":
        """Replace the condition of the marked samples by the null condition, as training does for guidance."""
        return replace(self, dropped=samples if self.dropped is None else self.dropped | samples)

    def marked(self) -> "Condition":
        """The same with `dropped` filled in, so that the null condition takes part in every training step.

        Distributed training waits for the gradient of every weight, also in a batch where no sample was dropped.
        """
        given = next((part for part in (self.text, self.pooled, self.label) if part is not None), None)
        return self if given is None else self.drop(torch.zeros(len(given), dtype=torch.bool, device=given.device))

    def unconditional(self) -> "Condition":
        """The null condition for every sample of this batch."""
        given = next((part for part in self._parts().values() if part is not None), None)
        return self if given is None else self.drop(torch.ones(len(given), dtype=torch.bool, device=given.device))

    def to(self, device: torch.device | str) -> "Condition":
        """The same condition on another device."""
        return Condition(**{name: None if part is None else part.to(device) for name, part in self._parts().items()})

    def __getitem__(self, samples: Tensor | slice) -> "Condition":
        """The condition of some samples of the batch."""
        return Condition(**{name: None if part is None else part[samples] for name, part in self._parts().items()})

    def _parts(self) -> dict[str, Tensor | None]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _check_part(name: str, part: Tensor | None, dimensions: int, expected: str, kind: type) -> None:
    """Refuse a part of the wrong dtype or number of dimensions. Attention would add an integer mask to its scores."""
    if part is None:
        return
    found = float if part.is_floating_point() else bool if part.dtype == torch.bool else int
    if part.ndim != dimensions or found is not kind:
        hint = "; convert it with .bool()" if kind is bool and found is int else ""
        raise ValueError(f"{name} must be {expected}, got {part.dtype} of shape {tuple(part.shape)}{hint}")


def check_rows(condition: Condition, batch: int) -> None:
    """Refuse a condition of another batch size than the images; one row serves a whole batch."""
    given = next((part for part in condition._parts().values() if part is not None), None)
    if given is not None and len(given) not in (1, batch):
        raise ValueError(f"the condition has {len(given)} rows for a batch of {batch} images")


def check_labels(label: Tensor, classes: int) -> None:
    """Refuse class labels that the network has no embedding for; -1 and, as in DiT, `classes` mean the null class."""
    # On an accelerator this comparison would stall the stream, so only host tensors are checked. Subclasses are not:
    # the fake tensors of the memory plan have no values.
    if type(label) is Tensor and label.device.type == "cpu" and label.numel() and not torch.compiler.is_compiling():
        largest = int(label.max())
        if largest > classes:
            raise ValueError(
                f"label {largest} is out of range: there are {classes} classes, 0 to {classes - 1}, and {classes} or "
                "-1 for the null class"
            )


def concatenate(conditions: Sequence[Condition]) -> Condition:
    """One batch out of several, such as the guided and the unguided half of a sampling step.

    All of them must carry the same parts; masks of tokens and of dropped samples are filled in where they are missing.
    """
    parts: dict[str, Tensor | None] = {}
    for name in ("text", "pooled", "label"):
        tensors = [getattr(condition, name) for condition in conditions]
        given = [tensor for tensor in tensors if tensor is not None]
        if given and len(given) < len(tensors):
            raise ValueError(f"cannot join conditions with and without {name}; use Condition.unconditional() for null")
        parts[name] = torch.cat(given) if given else None
    if any(condition.text_mask is not None for condition in conditions):
        parts["text_mask"] = torch.cat([_token_mask(condition) for condition in conditions])
    if any(condition.dropped is not None for condition in conditions):
        parts["dropped"] = torch.cat([_drop_mask(condition) for condition in conditions])
    return Condition(**parts)


def _token_mask(condition: Condition) -> Tensor:
    if condition.text_mask is not None:
        return condition.text_mask
    assert condition.text is not None  # a mask elsewhere implies text here: joined conditions carry the same parts
    return torch.ones(condition.text.shape[:2], dtype=torch.bool, device=condition.text.device)


def _drop_mask(condition: Condition) -> Tensor:
    if condition.dropped is not None:
        return condition.dropped
    given = next(part for part in (condition.text, condition.pooled, condition.label) if part is not None)
    return torch.zeros(len(given), dtype=torch.bool, device=given.device)


@dataclass(frozen=True)
class PreparedCondition:
    """A condition with everything computed that does not change from one sampling step to the next."""

    embeddings: tuple[Tensor | None, ...]
    """What label and pooled text add to each time embedding."""
    keys_values: tuple[tuple[Tensor, Tensor], ...]
    """Keys and values of the text for the cross-attention of every block; empty without text."""
    mask: Tensor | None
    """Attention mask over the text tokens."""

    def __getitem__(self, samples: Tensor | slice) -> "PreparedCondition":
        """The prepared condition of some samples of the batch; a part that is the same for all has one row only."""

        def some(part: Tensor) -> Tensor:
            if len(part) > 1:
                return part[samples]
            return part if isinstance(samples, slice) else part.expand(len(samples), *part.shape[1:])

        return PreparedCondition(
            # One row of an embedding stays one: a network that sees one time and one embedding has less to do.
            tuple(part if part is None or len(part) == 1 else part[samples] for part in self.embeddings),
            tuple((some(keys), some(values)) for keys, values in self.keys_values),
            None if self.mask is None else some(self.mask),
        )
