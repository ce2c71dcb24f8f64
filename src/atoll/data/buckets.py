"""The buckets of a run: the sizes that its images are cropped and resized to, chosen before the pass.

With `data.buckets: auto`, the candidates are all sizes of about resolution² pixels. Each image of a sample goes to the
nearest one, by headers alone, and candidates with few images are left out: a size costs a file in every cluster, and a
batch has one size.
"""

import math
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any

from atoll.core.config import Config
from atoll.core.config_sections import DataSection
from atoll.core.errors import AtollError
from atoll.core.networks import CLASS, CLASS_NAME, DEFAULT_NAME, DIFFUSERS_EXPERTS, NAMES, OwnConfig, read_network
from atoll.core.progress import say
from atoll.core.sizes import Size, bucket_sizes, nearest_size
from atoll.data.chunks import prefetch
from atoll.data.images import BadImage, image_size
from atoll.data.sources.source import Source, SourceImage

SAMPLE = 4096
"""Images whose headers are read. The share of a bucket with 1 % of the images is then known within 0.3 % (two standard
deviations)."""
MIN_SHARE = 0.01
"""Smallest share of the images in a bucket. Merging a smaller one into its neighbor crops at most 1 % of the images
more, and there are at most 100 buckets; a choice."""

SHOWN = 8
"""Merged buckets that the message names: two lines of a terminal."""


def side_multiple(config: Config, factor: int) -> int:
    """Return what the sides of buckets are multiples of: all patch sizes times the factor of the autoencoder."""
    patches = []
    own = [] if config.student.network is None else [config.student.network]
    for choice in [*config.networks.values(), config.router.network, *own]:
        parts: Mapping[str, Any] = {"name": choice} if isinstance(choice, str) else choice
        if CLASS in parts:
            patches.append(OwnConfig.from_dict(parts).patch)
        elif parts.get(CLASS_NAME) in DIFFUSERS_EXPERTS:
            patches.append(read_network(parts).patch)
        else:
            patches.append(int(parts.get("patch", NAMES[parts.get("name", DEFAULT_NAME)]["patch"])))
    return math.lcm(*patches) * factor


def choose_sizes(data: DataSection, source: Source, *, images: int, multiple: int) -> tuple[Size, ...]:
    """Return the sizes of a run, from the headers of some of its `images`."""
    if data.buckets == "off":
        return (Size.square(data.resolution),)
    if isinstance(data.buckets, list):
        sizes = tuple(map(Size.parse, data.buckets))
        for size in sizes:
            if size.width % multiple or size.height % multiple:
                raise AtollError(
                    f"data.buckets: the sides of {size} are not multiples of {multiple}, the patch size of the "
                    "networks times the factor of the autoencoder"
                )
        return sizes
    candidates = bucket_sizes(data.resolution, multiple)
    # Evenly spread, because sources are often sorted.
    sample = islice(source.images(), 0, None, -(-images // SAMPLE))
    shapes = [shape for shape in prefetch(sample, _shape, data.workers) if shape]
    kept, left_out = merge_small(candidates, shapes)
    if left_out:
        by_count = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
        small = ", ".join(f"{size} ({count})" for size, count in by_count[:SHOWN])
        small += f" and {len(left_out) - SHOWN} more" if len(left_out) > SHOWN else ""
        say(
            f"buckets: {len(kept)} sizes; fewer than {MIN_SHARE:.0%} of {len(shapes):,} sampled images are nearest to "
            f"these, and go to the next size: {small}",
        )
    return kept


def merge_small(
    candidates: tuple[Size, ...], shapes: list[tuple[int, int]]
) -> tuple[tuple[Size, ...], dict[Size, int]]:
    """Return the sizes with enough of the images of some widths and heights, and the others with their images.

    The smallest bucket is left out first, and its images go to the nearest of the rest, which may then be large enough.
    """
    counts = Counter(shapes)

    def filled(sizes: list[Size]) -> Counter[Size]:
        found: Counter[Size] = Counter()
        for shape, count in counts.items():
            found[nearest_size(sizes, *shape)] += count
        return found

    # Candidates without any image are not worth a sentence.
    by_size = filled(list(candidates)) or Counter({candidates[0]: 0})
    left_out: dict[Size, int] = {}
    while len(by_size) > 1:
        # One at a time: its images may fill the next bucket, which then stays.
        size, count = min(by_size.items(), key=lambda item: (item[1], item[0]))
        if count >= MIN_SHARE * len(shapes):
            break
        left_out[size] = count
        by_size = filled([other for other in by_size if other != size])
    return tuple(size for size in candidates if size in by_size), left_out


def _shape(image: SourceImage) -> tuple[int, int] | None:
    """Return width and height of an image; None if it is unreadable."""
    try:
        return image_size(image.read())
    except BadImage:
        return None
