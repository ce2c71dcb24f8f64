"""Sizes of images in pixels, and the buckets: the sizes that the images of a run are cropped and resized to.

Users write a size as `WIDTHxHEIGHT` (96x64). Arrays and tensors have the height first, so `Size` has too.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from atoll.core.errors import AtollError

MIN_AREA, MAX_AREA = 0.75, 1.25
"""Bounds of a bucket's area, as fractions of resolution². Within them a ratio such as 3:2 is met exactly by small
multiples, and the memory of a batch differs by at most a quarter from that of square images."""
MAX_RATIO = 4.0
"""Largest ratio of the sides of a bucket; a choice, as in the buckets of SDXL. Longer images are cropped to it."""
RATIO_STEP = 0.02
"""Smallest relative difference between the ratios of two buckets; a choice. With it, images of all ratios lose about
1 % of their pixels on average, and there are at most 139 candidates, whatever the resolution."""
_PATTERN = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")


@dataclass(frozen=True, order=True)
class Size:
    """Height and width of an image in pixels."""

    height: int
    width: int

    @classmethod
    def parse(cls, text: str) -> "Size":
        """Parse `WIDTHxHEIGHT`, such as 96x64."""
        if not (found := _PATTERN.fullmatch(text)):
            raise AtollError(f"{text!r} is not a size WIDTHxHEIGHT in pixels, such as 96x64")
        return cls(int(found[2]), int(found[1]))

    @classmethod
    def square(cls, side: int) -> "Size":
        """Return the size of a square."""
        return cls(side, side)

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    @property
    def area(self) -> int:
        """Number of pixels."""
        return self.height * self.width


def bucket_sizes(resolution: int, multiple: int) -> tuple[Size, ...]:
    """Return the candidates for buckets: the square first, then the other sizes by the ratio of their sides.

    Sides are multiples of `multiple`, areas are within 0.75 to 1.25 of resolution². Of several sizes with one ratio,
    the one whose area is nearest to resolution² is taken; the square always has the side `resolution`. Of ratios that
    are nearly equal, the one of the smallest integers is taken, because cameras have such ratios (3:2, 4:3, 16:9).
    """
    if resolution % multiple:
        raise AtollError(
            f"data.resolution {resolution} is not a multiple of {multiple}, the network's patch size times the "
            "factor of the autoencoder; data.buckets needs that"
        )
    target = resolution**2
    by_ratio: dict[tuple[int, int], Size] = {}
    # In units of `multiple`; a longer side than this has a ratio above MAX_RATIO, even at the largest area.
    longest = math.isqrt(int(MAX_AREA * MAX_RATIO * target)) // multiple
    for height in range(1, longest + 1):
        for width in range(1, longest + 1):
            size = Size(height * multiple, width * multiple)
            fits = MIN_AREA * target <= size.area <= MAX_AREA * target
            if not fits or max(height, width) > MAX_RATIO * min(height, width):
                continue
            divisor = math.gcd(height, width)
            ratio = (height // divisor, width // divisor)
            by_ratio[ratio] = min(by_ratio.get(ratio, size), size, key=lambda size: (abs(size.area - target), size))
    chosen: list[Size] = []
    for _, size in sorted(by_ratio.items(), key=lambda item: (sum(item[0]), item[0])):
        if all(cropped_share(size, other.width, other.height) >= RATIO_STEP for other in chosen):
            chosen.append(size)
    square, *others = chosen
    return (square, *sorted(others, key=lambda size: size.width / size.height))


def cropped_share(size: Size, width: int, height: int) -> float:
    """Return the share of an image's pixels that is lost when it is resized to cover `size` and cropped."""
    # The ratio of the two aspect ratios, in integers: equal ratios give exactly 0.
    a, b = size.width * height, size.height * width
    return 1 - min(a, b) / max(a, b)


def nearest_size(sizes: Iterable[Size], width: int, height: int) -> Size:
    """Return the size that loses the smallest share of an image; of equal ones, that with the largest area."""
    return min(sizes, key=lambda size: (cropped_share(size, width, height), -size.area, size))


def upscaling(size: Size, width: int, height: int) -> float:
    """Return the factor by which an image is enlarged to cover `size`; below 1 if it is made smaller."""
    return max(size.width / width, size.height / height)
