"""The built-in emoji source: content, splits and rendering."""

import io
import re
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import metadata

import numpy as np
import pytest
from PIL import Image

from atoll.core.errors import AtollError
from atoll.data.images import decode
from atoll.data.sources.emoji import PACKAGES, STYLES, _package_folder, draw, every_emoji
from atoll.data.sources.open import open_source
from atoll.data.sources.source import SourceImage, SourceOptions


@pytest.fixture(scope="module")
def emoji() -> list[SourceImage]:
    return list(open_source("emoji").images())


def center(style: str, code: str) -> np.ndarray:
    """Mean color of the middle of an emoji."""
    return np.asarray(decode(draw(style, code), 64))[28:36, 28:36].mean(axis=(0, 1))


def test_the_styles_and_categories_have_the_expected_sizes(emoji: list[SourceImage]) -> None:
    assert Counter(s.attributes["style"] for s in emoji) == {"noto": 3796, "openmoji": 3944, "twemoji": 3944}
    assert len({s.id for s in emoji}) == len(emoji) == 11_684
    assert all(re.fullmatch(r"(noto|openmoji|twemoji)/[0-9a-f]+(-[0-9a-f]+)*", s.id) for s in emoji)
    assert all(s.caption for s in emoji)
    categories = Counter(s.label for s in emoji)
    assert len(categories) == 10
    assert categories["other"] < 100


def test_captions_and_labels_match_the_emoji(emoji: list[SourceImage]) -> None:
    by_id = {image.id: image for image in emoji}
    expected = {
        "twemoji/1f34e": ("red apple", "food-drink"),
        "noto/1f1ef-1f1f5": ("flag of Japan", "flags"),
        "openmoji/1f44d-1f3ff": ("thumbs up, dark skin tone", "people-body"),
        "noto/23-fe0f-20e3": ("keycap #", "symbols"),
        "twemoji/1f570-fe0f": ("mantelpiece clock", "travel-places"),
    }
    assert {id: (by_id[id].caption, by_id[id].label) for id in expected} == expected


def test_every_image_has_attribution_and_license(emoji: list[SourceImage]) -> None:
    licenses = {(s.attributes["style"], s.attributes["license"]) for s in emoji}
    assert licenses == {("noto", "OFL-1.1"), ("openmoji", "CC-BY-SA-4.0"), ("twemoji", "CC-BY-4.0")}
    assert all(s.attributes["attribution"] == STYLES[s.attributes["style"]]["attribution"] for s in emoji)


def test_a_concept_is_validation_in_all_styles_and_tones(emoji: list[SourceImage]) -> None:
    concepts = {found.code: found.concept for found in every_emoji()}
    sides: dict[str, set[str]] = defaultdict(set)
    for image in emoji:
        sides[concepts[image.id.split("/")[1]]].add(image.split)
    assert all(len(side) == 1 for side in sides.values())
    fraction = sum(side == {"validation"} for side in sides.values()) / len(sides)
    assert 0.035 < fraction < 0.065


def test_a_larger_val_fraction_includes_the_smaller_one(emoji: list[SourceImage]) -> None:
    more = {s.id for s in open_source("emoji", SourceOptions(val_fraction=0.1)).images() if s.split == "validation"}
    assert {s.id for s in emoji if s.split == "validation"} < more


def test_styles_categories_and_skin_tones_can_be_selected() -> None:
    chosen = open_source("emoji:styles=twemoji,noto;categories=food-drink,activities;skin-tones=no")
    images = list(chosen.images())
    assert {(s.attributes["style"], s.label) for s in images} == {
        (style, category) for style in ("noto", "twemoji") for category in ("food-drink", "activities")
    }
    assert not any("skin tone" in (s.caption or "") for s in images)
    assert chosen.fingerprint != open_source("emoji").fingerprint
    assert (
        chosen.fingerprint
        == open_source("emoji:skin-tones=no;categories=activities,food-drink;styles=noto,twemoji").fingerprint
    )


@pytest.mark.parametrize("style", STYLES)
def test_rendered_emoji_have_the_expected_colors(style: str) -> None:
    red, green, blue = center(style, "1f34e")  # red apple
    assert red > 180
    assert max(green, blue) < 100
    red, green, blue = center(style, "1f7e6")  # blue square
    assert blue > red + 80
    japan = np.asarray(decode(draw(style, "1f1ef-1f1f5"), 64)).astype(int)
    assert japan[32, 32, 0] > japan[32, 32, 1] + 100
    assert japan[32, 8].min() > 200
    image = Image.open(io.BytesIO(draw(style, "1f600")))
    assert image.size == (128, 128)
    assert (np.asarray(decode(draw(style, "1f600"), 64))[[0, 0, -1, -1], [0, -1, 0, -1]] == 255).all()


@pytest.mark.parametrize("style", STYLES)
def test_skin_tones_differ(style: str) -> None:
    light, dark = (center(style, f"270b-1f3f{tone}").mean() for tone in "bf")
    assert light > dark + 60


def test_rendering_is_deterministic_in_threads(emoji: list[SourceImage]) -> None:
    some = emoji[::500]
    once = [image.read() for image in some]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda image: image.read(), some * 3)) == once * 3


def test_no_rendered_emoji_is_blank(emoji: list[SourceImage]) -> None:
    blank = [s.caption for s in emoji[::97] if np.asarray(decode(s.read(), 32)).std() < 8]
    assert blank == []


@pytest.mark.slow
def test_every_emoji_can_be_rendered(emoji: list[SourceImage]) -> None:
    """The only blank one is the white square of Twemoji, which has a very light edge."""
    assert [s.id for s in emoji if np.asarray(decode(s.read(), 64)).std() < 8] == ["twemoji/2b1c"]


def test_a_missing_package_is_an_error_that_names_it() -> None:
    with pytest.raises(AtollError, match="needs the package no_such_images") as error:
        _package_folder("no_such_images")
    assert "pip install 'atoll[demo]'" in str(error.value)
    extra = metadata("atoll").get_all("Requires-Dist")
    assert all(any(line.startswith(package) and "demo" in line for line in extra) for package in PACKAGES)
