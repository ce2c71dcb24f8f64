"""The batches of experts: which rows each expert computes in one evaluation, and with which weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True, eq=False)
class ExpertBatches:
    """All pairs (expert, row) with a nonzero weight, sorted by expert, on the CPU."""

    row: Tensor
    """Row of each pair, (pairs,)."""
    weight: Tensor
    """Weight of each pair, (pairs,)."""
    spans: dict[int, slice]
    """The pairs of each expert that has any."""

    @classmethod
    def of(cls, weights: Tensor, *, padded: bool) -> "ExpertBatches":
        """Group the nonzero weights (rows, experts) by expert.

        With `padded`, the batch of an expert is filled up to one of few sizes: its last row is repeated with weight 0.
        Accelerators choose kernels, and compile graphs, by size.
        """
        expert, row = torch.nonzero(weights.T).unbind(1)
        weight = weights.T[expert, row]
        counts = torch.bincount(expert, minlength=weights.shape[1]).tolist()
        spans, start = {}, 0
        parts: list[tuple[Tensor, Tensor]] = []
        for number, count in enumerate(counts):
            if not count:
                continue
            size = padded_size(count) if padded else count
            end = sum(counts[: number + 1])
            mine = slice(end - count, end)
            spans[number] = slice(start, start + size)
            start += size
            if padded:
                last = row[end - 1 : end].expand(size - count)
                parts.append((torch.cat([row[mine], last]), torch.cat([weight[mine], weight.new_zeros(size - count)])))
        if parts:
            row, weight = (torch.cat(list(part)) for part in zip(*parts, strict=True))
        return cls(row, weight, spans)


def padded_size(count: int) -> int:
    """Return the next number of the form 2^k or 3 · 2^k: 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on.

    There are 14 of them up to 128. At most a third of the rows are padding, on average 13 % if all counts are equally
    frequent.
    """
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


@contextmanager
def attention_kernels(device: torch.device) -> Iterator[None]:
    """Exclude cuDNN's attention, which builds a plan for every new batch size; routing changes them at every step."""
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield
