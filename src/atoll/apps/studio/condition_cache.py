"""Cache of encoded conditions: every prompt is encoded once, and every expert prepares it once.

Requests with equal conditions share a slot. A slot without users keeps its condition until another condition needs the
slot, so repeating a prompt costs nothing. The number of slots bounds the memory.
"""

# Experts prepare conditions (keys and values of the text tokens, label embeddings) for a whole tensor of slots, and a
# step selects rows of it: slot i is row i, and the row after the last slot is the null condition of guidance. All rows
# of such a tensor have the same parts. A condition with a prompt and one with a class therefore live in different
# pools, and images of different pools cannot share a forward pass. The arguments of a base network also depend on the
# size of the image, so they have a pool for each size.

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from atoll.core.sizes import Size
from atoll.ensemble import Sampler
from atoll.experts.batch_conditions import BatchConditions, ConditionSlots
from atoll.nets import Condition
from atoll.nets.conditioning import OF_PROMPTS

Key = tuple[str | None, str | int | None]
"""Prompt and class of a request."""


class SlotPool:
    """Cache slots of conditions with the same parts (prompt, class, or both), replaced least recently used first."""

    def __init__(self, example: Condition, count: int) -> None:
        self.rows = ConditionSlots(example, count)
        self._slots: dict[Key, int] = {}
        self._users = [0] * count
        # Slots without users and what they still hold, the least recently used first. The engine runs at most as many
        # requests as a pool has slots, and each holds at most one, so a new condition always finds an unused slot.
        self._unused: OrderedDict[int, Key | None] = OrderedDict.fromkeys(range(count))

    def missing(self, keys: Sequence[Key]) -> list[Key]:
        """Return the distinct keys that are not cached, and mark the cached ones as recently used."""
        # Without the mark, `put` for one key of a group could evict another key of the same group.
        for key in keys:
            if self._slots.get(key) in self._unused:
                self._unused.move_to_end(self._slots[key])
        return [key for key in dict.fromkeys(keys) if key not in self._slots]

    def put(self, key: Key, condition: Condition) -> None:
        """Store a condition of one row in the least recently used slot."""
        slot, evicted = self._unused.popitem(last=False)
        if evicted is not None:
            del self._slots[evicted]
        self._unused[slot] = key
        self._slots[key] = slot
        self.rows.put(slot, condition)

    def acquire(self, key: Key) -> int:
        """Return the slot of a cached condition and keep it until `release` has been called as often."""
        slot = self._slots[key]
        self._unused.pop(slot, None)
        self._users[slot] += 1
        return slot

    def release(self, key: Key) -> None:
        """Remove one user of a condition."""
        slot = self._slots[key]
        self._users[slot] -= 1
        if not self._users[slot]:
            self._unused[slot] = key


@dataclass(frozen=True)
class Slot:
    """The cache slot of a request's condition."""

    pool: SlotPool | None
    """None if the model is unconditional."""
    row: int
    key: Key | None = None
    """None for the null condition, which is always cached."""

    def release(self) -> None:
        """Give the slot back when the request ends."""
        if self.pool is not None and self.key is not None:
            self.pool.release(self.key)


class ConditionCache:
    """Cached conditions of one loaded model."""

    def __init__(self, sampler: Sampler, count: int) -> None:
        self._sampler, self._ensemble, self._count = sampler, sampler.ensemble, count
        self._pools: dict[tuple[tuple[bool, bool], Size | None], SlotPool] = {}
        self._unconditional = Condition()

    def acquire(self, keys: Sequence[Key], size: Size | None = None) -> list[Slot]:
        """Return a slot for each condition of images of one size; the ones that are not cached are encoded together."""
        size = size if "arguments" in self._ensemble.conditioning else None
        for parts in {self._parts(key) for key in keys if any(self._parts(key))}:
            pool, own = self._pools.get((parts, size)), [key for key in keys if self._parts(key) == parts]
            new = list(dict.fromkeys(own)) if pool is None else pool.missing(own)
            if not new:
                continue
            condition = self._sampler.encode(
                [str(prompt) for prompt, _ in new] if parts[0] else None,
                [label for _, label in new if label is not None] if parts[1] else None,
                size=size,
            )
            pool = self._pools.setdefault((parts, size), pool or SlotPool(condition[:1], self._count))
            for row, key in enumerate(new):
                pool.put(key, condition[row : row + 1])
        return [self._slot(key, size) for key in keys]

    def batch(self, slots: Sequence[Slot]) -> BatchConditions:
        """Return the conditions of a batch of images whose slots are in one pool."""
        rows = torch.tensor([slot.row for slot in slots])
        pool = slots[0].pool
        return BatchConditions(self._unconditional, rows, 0, True) if pool is None else pool.rows.batch(rows)

    def _parts(self, key: Key) -> tuple[bool, bool]:
        """Return whether the model uses the prompt, and whether it uses the class."""
        accepted = self._ensemble.conditioning
        return key[0] is not None and bool(accepted & OF_PROMPTS), key[1] is not None and "label" in accepted

    def _slot(self, key: Key, size: Size | None) -> Slot:
        parts = self._parts(key)
        if any(parts):
            pool = self._pools[parts, size]
            return Slot(pool, pool.acquire(key), key)
        if not self._ensemble.conditioning:
            return Slot(None, 0)
        # Every pool has the null condition in its last row. Reusing a pool that exists lets unconditional images share
        # the forward passes of conditioned ones. If there is none, create one for prompts, or for classes without text.
        known = [pool for (_, own), pool in self._pools.items() if own == size]
        if not known:
            text = bool(self._ensemble.conditioning & OF_PROMPTS)
            example = self._sampler.encode([""], size=size) if text else self._sampler.encode(labels=[0])
            known = [self._pools.setdefault(((text, not text), size), SlotPool(example, self._count))]
        return Slot(known[0], self._count)
