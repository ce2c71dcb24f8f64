"""Arguments of a foreign network, image by image: nested lists, tuples and dicts of tensors and plain values.

Images share a call of the network if their arguments have one *signature*: equal shapes, and equal values of what a
batch has only once. Nothing is padded, so an image does not depend on the others in its batch.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Signature
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.utils._pytree import tree_map

from atoll.core.device import upload
from atoll.core.errors import AtollError

Arguments = dict[str, Any]
"""Keyword arguments of a network, for one image (a batch of one) or a batch."""
Batching = Any
"""How the argument of a batch is made of those of its images: "list" for a list with an entry for each image, the batch
dimension of a tensor, None for a value that all images share; a list or a dict of these for nested arguments."""


def find_batching(one: Any, two: Any, name: str) -> Batching:
    """Compare an argument of one image with that of two images."""
    if isinstance(one, Tensor) and isinstance(two, Tensor) and one.ndim == two.ndim:
        changed = [place for place in range(one.ndim) if one.shape[place] != two.shape[place]]
        if not changed:
            return None
        if len(changed) == 1 and (one.shape[changed[0]], two.shape[changed[0]]) == (1, 2):
            return changed[0]
    elif isinstance(one, list | tuple) and isinstance(two, list | tuple):
        if (len(one), len(two)) == (1, 2):
            return "list"
        if len(one) == len(two):
            return [find_batching(a, b, f"{name}[{place}]") for place, (a, b) in enumerate(zip(one, two, strict=True))]
    elif isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        return {key: find_batching(one[key], two[key], f"{name}[{key!r}]") for key in one}
    elif same(one, two):
        return None
    raise AtollError(f"the argument {name} of two images is not made of those of single images")


def join(values: Sequence[Any], how: Batching) -> Any:
    """Return the argument of a batch, from those of its images."""
    if how == "list":
        return [value[0] for value in values]
    if isinstance(how, int):
        return torch.cat(list(values), how)
    if isinstance(how, dict):
        return {key: join([value[key] for value in values], own) for key, own in how.items()}
    if isinstance(how, list):
        return type(values[0])(join([value[place] for value in values], own) for place, own in enumerate(how))
    return values[0]


def take(value: Any, how: Batching, places: Sequence[int], batch: int) -> Any:
    """Return the argument of some images of a batch, the inverse of `join`.

    A trace may not have seen the argument, or only None: the residuals of a ControlNet, the mask of prompts of
    different lengths. Then its tensors have a row for each image if their first dimension is the batch.
    """
    if how == "list" and isinstance(value, list | tuple):
        return [value[place] for place in places]
    if isinstance(value, dict):
        known = how if isinstance(how, dict) else {}
        return {key: take(part, known.get(key), places, batch) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = how if isinstance(how, list) and len(how) == len(value) else [None] * len(value)
        return type(value)(take(part, own, places, batch) for part, own in zip(value, parts, strict=True))
    if isinstance(value, Tensor):
        dimension = how if isinstance(how, int) else 0
        if value.ndim > dimension and value.shape[dimension] == batch:
            return value.index_select(dimension, torch.tensor(places, device=value.device))
    return value


def bound(signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Return the arguments of a call of a network by their names; `signature` is of its class, with self."""
    found: Arguments = dict(signature.bind(None, *args, **kwargs).arguments)
    del found[next(iter(found))]  # self
    others: Arguments = found.pop("kwargs", {})
    return {**found, **others}


def signature(value: Any, how: Batching) -> Any:
    """Return a hashable key of an image's argument, equal for images that can share a batch."""
    if isinstance(how, dict):
        return tuple((key, signature(value[key], own)) for key, own in how.items())
    if isinstance(how, list):
        return tuple(signature(part, own) for part, own in zip(value, how, strict=True))
    if isinstance(value, Tensor):
        shape = (tuple(value.shape), value.dtype)
        return shape if isinstance(how, int) else (*shape, value.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    if isinstance(value, list | tuple):
        return tuple(signature(part, 0 if how == "list" else None) for part in value)
    return repr(value)


def same(one: Any, two: Any, *, tolerance: float = 0.0) -> bool:
    """Return whether two arguments have equal structures and values."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return one.shape == two.shape and torch.allclose(one.double(), two.double(), rtol=tolerance, atol=tolerance)
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(same(a, b, tolerance=tolerance) for a, b in zip(one, two, strict=True))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key], tolerance=tolerance) for key in one)
    return type(one) is type(two) and bool(one == two)


# Files of captions, as arguments of a base network

ARGUMENT, SHAPE = "argument:", "shape:"
"""Prefixes of tensors: the values of all captions in sequence, and the shape of each caption's tensor."""
SHARED, STRUCTURE = "arguments-{}.safetensors", "structure"
"""File with the arguments of no prompt for images of a size, and the tensor in it with their structure, as JSON."""


def flatten(arguments: Arguments) -> tuple[dict[str, Tensor], JsonValue]:
    """Return all tensors and numbers of arguments as tensors by path, and the structure that holds them, as JSON."""
    tensors: dict[str, Tensor] = {}

    def visit(value: Any, path: str) -> JsonValue:
        if isinstance(value, Tensor):
            tensors[path] = value
            return {"tensor": path}
        if isinstance(value, int | float):
            tensors[path] = torch.tensor(value)
            return {"number": path}
        if isinstance(value, dict):
            return {"dict": {key: visit(part, f"{path}.{key}" if path else key) for key, part in value.items()}}
        if isinstance(value, list | tuple):
            return {type(value).__name__: [visit(part, f"{path}.{place}") for place, part in enumerate(value)]}
        return {"value": value}

    return tensors, visit(arguments, "")


def unflatten(tensors: Mapping[str, Tensor], structure: Any) -> Any:
    """Return arguments from the result of `flatten`."""
    ((kind, content),) = structure.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "number":
        return tensors[content].item()
    if kind == "dict":
        return {key: unflatten(tensors, part) for key, part in content.items()}
    if kind in ("list", "tuple"):
        parts = [unflatten(tensors, part) for part in content]
        return parts if kind == "list" else tuple(parts)
    return content


@dataclass(eq=False)
class ArgumentTable:
    """The arguments of all images of a batch, one row for each prompt; row 0 is the null condition."""

    rows: list[Arguments]
    batching: dict[str, Batching]
    _signatures: dict[int, Hashable] = field(default_factory=dict)
    _moved: dict[int, dict[tuple[torch.device, torch.dtype], Arguments]] = field(default_factory=dict)

    def put(self, place: int, row: Arguments) -> None:
        """Replace a row."""
        self.rows[place] = row
        self._signatures.pop(place, None)
        self._moved.pop(place, None)

    def row(self, place: int, device: torch.device, dtype: torch.dtype) -> Arguments:
        """Return a row on a device, with real numbers in a precision; it is moved there once."""

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return upload(leaf, device).to(dtype if leaf.is_floating_point() else leaf.dtype)

        moved = self._moved.setdefault(place, {})
        if (device, dtype) not in moved:
            moved[device, dtype] = tree_map(move, self.rows[place])
        return moved[device, dtype]

    def signature(self, place: int) -> Hashable:
        """Return the key of rows that can share a call of the network."""
        if place not in self._signatures:
            row = self.rows[place]
            self._signatures[place] = tuple(signature(row[name], how) for name, how in self.batching.items())
        return self._signatures[place]
