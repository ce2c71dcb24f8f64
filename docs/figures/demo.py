"""Draw the image of the README from a finished demo: samples of all experts as one model, and of the monolith.

python docs/figures/demo.py [RUN]
"""

import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from atoll.apps.evaluate.models import EvaluatedModel
from atoll.apps.launch import demo
from atoll.apps.report.gallery import Gallery, choose_examples
from atoll.core.config import load
from atoll.ensemble import SampleSettings

SIDE, GAP, LEFT, TOP = 96, 6, 150, 58


def main(run: Path) -> None:
    """Generate the missing images and write demo.png beside this file."""
    config = load(run)
    settings = SampleSettings(routing="top-1", steps=demo.STEPS, guidance_scale=demo.GUIDANCE)
    examples = choose_examples(run, config.clusters.count, demo.PROMPTS)
    gallery = Gallery(examples, settings)
    rows = {
        f"{config.clusters.count} experts\nas one model": gallery.row(EvaluatedModel(run, "experts", "top-1")).images,
        "one network of\nequal FLOPs": gallery.row(EvaluatedModel(run, "monolith")).images,
    }
    width = LEFT + len(demo.PROMPTS) * (SIDE + GAP)
    page = Image.new("RGB", (width, TOP + len(rows) * (SIDE + GAP)), "white")
    pen, small = ImageDraw.Draw(page), ImageFont.load_default(12)
    for column, example in enumerate(examples):
        place = (LEFT + column * (SIDE + GAP) + SIDE / 2, TOP - 6)
        text = wrapped(example.prompt) + ("" if example.split == "train" else " *")  # held out from training
        pen.multiline_text(place, text, "#444444", small, anchor="md", align="center")
    for row, (name, images) in enumerate(rows.items()):
        top = TOP + row * (SIDE + GAP)
        pen.multiline_text((8, top + SIDE / 2), name, "black", ImageFont.load_default(16), anchor="lm")
        for column, image in enumerate(images):
            page.paste(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC), (LEFT + column * (SIDE + GAP), top))
    page.save(Path(__file__).with_suffix(".png"), optimize=True)


def wrapped(prompt: str, most: int = 14) -> str:
    """Return a prompt in short lines."""
    lines = [""]
    for word in prompt.split():
        lines[-1:] = [f"{lines[-1]} {word}".strip()] if len(lines[-1]) + len(word) < most else [lines[-1], word]
    return "\n".join(lines).strip()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
