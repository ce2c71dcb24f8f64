"""Sizes and buckets: notation, the candidates' bounds, and the choice for an image."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import AtollError
from atoll.core.sizes import Size, bucket_sizes, cropped_share, nearest_size, upscaling


def test_a_size_is_written_width_first() -> None:
    assert Size.parse("96x64") == Size(height=64, width=96)
    assert str(Size(64, 96)) == "96x64"


@pytest.mark.parametrize("text", ["", "96", "96x", "x64", "0x64", "-96x64", "96X64", "96 x 64", "96x64x3", "123456x1"])
def test_other_notations_are_refused(text: str) -> None:
    with pytest.raises(AtollError, match="not a size WIDTHxHEIGHT in pixels, such as 96x64"):
        Size.parse(text)


@pytest.mark.parametrize(("resolution", "multiple"), [(64, 4), (64, 16), (96, 8), (256, 16), (512, 16), (64, 64)])
def test_candidates_keep_their_bounds(resolution: int, multiple: int) -> None:
    sizes = bucket_sizes(resolution, multiple)
    assert sizes[0] == Size(resolution, resolution)
    assert len(set(sizes)) == len(sizes) <= 139
    for size in sizes:
        assert size.height % multiple == size.width % multiple == 0
        assert 0.75 <= size.area / resolution**2 <= 1.25
        assert max(size.height, size.width) <= 4 * min(size.height, size.width)
    # Every candidate also lies: portrait and landscape are treated alike.
    assert {Size(size.width, size.height) for size in sizes} == set(sizes)
    ratios = sorted(Fraction(size.width, size.height) for size in sizes)
    assert all(low / high <= Fraction(98, 100) for low, high in pairwise(ratios))


def test_ratios_of_cameras_lose_nothing() -> None:
    sizes = bucket_sizes(512, 16)
    for width, height in ((6000, 4000), (4000, 6000), (4032, 3024), (2048, 2048), (1920, 960)):
        assert cropped_share(nearest_size(sizes, width, height), width, height) == 0


def test_every_ratio_up_to_four_loses_little() -> None:
    sizes = bucket_sizes(512, 16)
    shares = [cropped_share(nearest_size(sizes, width, 1000), width, 1000) for width in range(250, 4001, 10)]
    # The step of 2 % between ratios, and the distance between the possible ratios.
    assert max(shares) < 0.022
    assert sum(shares) / len(shares) < 0.01


def test_a_resolution_that_is_no_multiple_is_refused() -> None:
    with pytest.raises(AtollError, match=r"data\.resolution 60 is not a multiple of 16"):
        bucket_sizes(60, 16)


@given(st.integers(1, 99), st.integers(1, 99), st.integers(1, 999), st.integers(1, 999))
def test_the_cropped_share_is_that_of_the_covering_resize(h: int, w: int, width: int, height: int) -> None:
    scale = max(Fraction(w, width), Fraction(h, height))
    expected = 1 - Fraction(w * h) / (scale**2 * width * height)
    assert math.isclose(cropped_share(Size(h, w), width, height), expected, abs_tol=1e-12)
    assert math.isclose(upscaling(Size(h, w), width, height), scale)


def test_equal_losses_go_to_the_larger_area() -> None:
    sizes = [Size(32, 48), Size(64, 96), Size(64, 64)]
    assert nearest_size(sizes, 300, 200) == Size(64, 96)
    assert nearest_size(reversed(sizes), 300, 200) == Size(64, 96)
    assert nearest_size(sizes, 20, 20) == Size(64, 64)
