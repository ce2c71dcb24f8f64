"""Conditions of requests: encoded once, and kept in places from which experts prepare them once.

Equal requests share a place. A place that nobody uses keeps what it holds until another condition needs it, so the same
prompt again costs nothing; the number of places bounds the memory.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from atoll.ensemble import Sampler
from atoll.experts.batch_conditions import BatchConditions, ConditionSlots
from atoll.nets import Condition

Key = tuple[str | None, str | int | None]
"""Prompt and class."""


class Shelf:
    """The places of conditions that have the same parts: prompts, classes, or both."""

    def __init__(self, example: Condition, count: int) -> None:
        self.places = ConditionSlots(example, count)
        self._numbers: dict[Key, int] = {}
        self._users = [0] * count
        self._idle: OrderedDict[int, Key | None] = OrderedDict.fromkeys(range(count))  # the longest unused first

    def missing(self, keys: Sequence[Key]) -> list[Key]:
        """Those of the conditions that no place holds; the others are not to be replaced next."""
        for key in keys:
            if self._numbers.get(key) in self._idle:
                self._idle.move_to_end(self._numbers[key])
        return [key for key in dict.fromkeys(keys) if key not in self._numbers]

    def put(self, key: Key, condition: Condition) -> None:
        """Keep a condition of one row where the one that was unused for longest was."""
        number, before = self._idle.popitem(last=False)
        if before is not None:
            del self._numbers[before]
        self._idle[number] = key
        self._numbers[key] = number
        self.places.put(number, condition)

    def hold(self, key: Key) -> int:
        """The number of a condition's place, which keeps it until it is released as often."""
        number = self._numbers[key]
        self._idle.pop(number, None)
        self._users[number] += 1
        return number

    def release(self, key: Key) -> None:
        """One user less."""
        number = self._numbers[key]
        self._users[number] -= 1
        if not self._users[number]:
            self._idle[number] = key


@dataclass(frozen=True)
class Seat:
    """Where the condition of a request is."""

    shelf: Shelf | None
    """None if the model cannot be told anything."""
    number: int
    key: Key | None = None

    @property
    def something(self) -> bool:
        """Whether the model is told anything."""
        return self.key is not None

    def leave(self) -> None:
        """The request needs it no more."""
        if self.shelf is not None and self.key is not None:
            self.shelf.release(self.key)


class Conditions:
    """All conditions that an ensemble is told at present."""

    def __init__(self, sampler: Sampler, count: int) -> None:
        self._sampler, self._ensemble, self._count = sampler, sampler.ensemble, count
        self._shelves: dict[tuple[bool, bool], Shelf] = {}
        self._nothing = Condition()

    def seats(self, keys: Sequence[Key]) -> list[Seat]:
        """A place for each of the conditions; new ones are encoded together."""
        for parts in {self._parts(key) for key in keys}:
            self._encode(parts, [key for key in keys if self._parts(key) == parts])
        return [self._seat(key) for key in keys]

    def told(self, seats: Sequence[Seat]) -> BatchConditions:
        """What samples on seats of one shelf are told."""
        rows = torch.tensor([seat.number for seat in seats], device=self._ensemble.device)
        shelf = seats[0].shelf
        return BatchConditions(self._nothing, rows, 0, True) if shelf is None else shelf.places.batch(rows)

    def _parts(self, key: Key) -> tuple[bool, bool]:
        """Whether the model takes in the prompt, and the class."""
        told = self._ensemble.conditioning
        return key[0] is not None and bool(told & {"text", "pooled"}), key[1] is not None and "label" in told

    def _seat(self, key: Key) -> Seat:
        parts = self._parts(key)
        if any(parts):
            shelf = self._shelves[parts]
            return Seat(shelf, shelf.hold(key), key)
        if not self._ensemble.conditioning:
            return Seat(None, 0)
        return Seat(self._any_shelf(), self._count)

    def _encode(self, parts: tuple[bool, bool], keys: Sequence[Key]) -> None:
        if not any(parts):
            return
        held = self._shelves.get(parts)
        new = list(dict.fromkeys(keys)) if held is None else held.missing(keys)
        if not new:
            return
        condition = self._sampler.encode(
            [str(prompt) for prompt, _ in new] if parts[0] else None,
            [label for _, label in new if label is not None] if parts[1] else None,
        )
        shelf = self._shelves.setdefault(parts, held or Shelf(condition[:1], self._count))
        for number, key in enumerate(new):
            shelf.put(key, condition[number : number + 1])

    def _any_shelf(self) -> Shelf:
        """Wherever conditions are kept, the null condition is too."""
        if not self._shelves:
            text = bool(self._ensemble.conditioning & {"text", "pooled"})
            example = self._sampler.encode([""]) if text else self._sampler.encode(labels=[0])
            self._shelves[text, not text] = Shelf(example, self._count)
        return next(iter(self._shelves.values()))
