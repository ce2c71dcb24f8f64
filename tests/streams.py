"""An endless stream of training batches, drawn in threads."""

from collections.abc import Iterator

from atoll.data.chunks import prefetch
from atoll.data.dataset import Batch, Shards


def stream(
    shards: Shards, batch_size: int, seed: int, start: int = 0, *, rank: int = 0, world_size: int = 1, workers: int = 1
) -> Iterator[Batch]:
    """Yield the batches from position `start` on: this rank's slice of each global batch of `batch_size`."""
    slices = shards.positions(batch_size, start, rank=rank, world_size=world_size)
    return prefetch(slices, lambda part: shards.draw(part, seed, batch_size=batch_size), workers)
