"""The conditioning of networks: text tokens, a pooled text vector, a class label, any of them together, or nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


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
    dropped: Tensor | None = None
    """True for images whose whole condition is replaced by the null condition, (batch,)."""

    def __post_init__(self) -> None:
        """Check shapes and dtypes, but no values: that would synchronize with the GPU."""
        if torch.compiler.is_compiling():
            return
        _check_part("text", self.text, 3, expected="floating point of shape (batch, length, width)", kind=float)
        _check_part(
            "text_mask", self.text_mask, 2, expected="bool of shape (batch, length), True for tokens", kind=bool
        )
        _check_part("pooled", self.pooled, 2, expected="floating point of shape (batch, width)", kind=float)
        _check_part("label", self.label, 1, expected="integers of shape (batch,)", kind=int)
        _check_part("dropped", self.dropped, 1, expected="bool of shape (batch,)", kind=bool)
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
        given = next((part for part in (self.text, self.pooled, self.label) if part is not None), None)
        return self if given is None else self.drop(torch.zeros(len(given), dtype=torch.bool, device=given.device))

    def unconditional(self) -> "Condition":
        """Return the null condition for every image of this batch."""
        given = next((part for part in self._parts().values() if part is not None), None)
        return self if given is None else self.drop(torch.ones(len(given), dtype=torch.bool, device=given.device))

    def map(self, function: Callable[[Tensor], Tensor]) -> "Condition":
        """Return the condition with `function` applied to each part."""
        return Condition(**{name: None if part is None else function(part) for name, part in self._parts().items()})

    def tensors(self) -> list[Tensor]:
        """Return the parts that are given, in a fixed order."""
        return [part for part in self._parts().values() if part is not None]

    def with_tensors(self, parts: Sequence[Tensor]) -> "Condition":
        """Return a condition with other tensors for the parts that are given, in the order of `tensors`."""
        return Condition(**dict(zip((n for n, part in self._parts().items() if part is not None), parts, strict=True)))

    def to(self, device: torch.device | str) -> "Condition":
        """Return the condition on another device."""
        return self.map(lambda part: part.to(device))

    def __getitem__(self, samples: Tensor | slice) -> "Condition":
        """Return the condition of some images of the batch."""
        return self.map(lambda part: part[samples])

    def _parts(self) -> dict[str, Tensor | None]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _check_part(name: str, part: Tensor | None, dimensions: int, *, expected: str, kind: type) -> None:
    """Raise an error for a wrong dtype or number of dimensions."""
    # The dtype of masks matters: attention would silently add an integer mask to its scores.
    if part is None:
        return
    found = float if part.is_floating_point() else bool if part.dtype == torch.bool else int
    if part.ndim != dimensions or found is not kind:
        hint = "; convert it with .bool()" if kind is bool and found is int else ""
        raise ValueError(f"{name} must be {expected}, got {part.dtype} of shape {tuple(part.shape)}{hint}")


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
    parts: dict[str, Tensor | None] = {}
    for name in ("text", "pooled", "label"):
        tensors = [getattr(condition, name) for condition in conditions]
        given = [tensor for tensor in tensors if tensor is not None]
        if given and len(given) < len(tensors):
            raise ValueError(
                f"cannot join conditions with and without {name}; use Condition.unconditional() for the null condition"
            )
        parts[name] = torch.cat(given) if given else None
    if any(condition.text_mask is not None for condition in conditions):
        parts["text_mask"] = torch.cat([_token_mask(condition) for condition in conditions])
    if any(condition.dropped is not None for condition in conditions):
        parts["dropped"] = torch.cat([_drop_mask(condition) for condition in conditions])
    return Condition(**parts)


def _token_mask(condition: Condition) -> Tensor:
    if condition.text_mask is not None:
        return condition.text_mask
    assert condition.text is not None  # all conditions have text if one has a mask, because they have the same parts
    return torch.ones(condition.text.shape[:2], dtype=torch.bool, device=condition.text.device)


def _drop_mask(condition: Condition) -> Tensor:
    if condition.dropped is not None:
        return condition.dropped
    given = next(part for part in (condition.text, condition.pooled, condition.label) if part is not None)
    return torch.zeros(len(given), dtype=torch.bool, device=given.device)


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
