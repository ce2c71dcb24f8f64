"""Draw images of models with the same prompts and noise: images.py ROOT/seedS RECIPE OUT.png ARM:LABEL[=TEXT]...

LABEL is the label of a model in the evaluation ("experts top-1", "monolith"). TEXT is drawn beside its row; | is a line
break.
"""

import json
import sys
from pathlib import Path

from PIL import Image, ImageDraw
from safetensors.torch import load_file

COLUMNS, GAP, MARGIN = 14, 4, 120


def read_row(arm: Path, recipe: str, label: str) -> list[Image.Image]:
    """Return the first images that a model generated for its metrics."""
    evaluation = json.loads((arm / "evaluation" / f"{recipe}.json").read_text())
    model = next(model for model in evaluation["models"] if model["label"] == label)
    folder = arm / model["metrics"]["inception"]["protocol"]["set"]
    images = load_file(sorted(folder.glob("*.safetensors"))[0])["images"][:COLUMNS]
    return [Image.fromarray(image) for image in images.numpy()]


def main(root: Path, recipe: str, out: Path, models: list[str]) -> None:
    """Draw one row per model."""
    rows = []
    for model in models:
        name, _, text = model.partition("=")
        arm, _, label = name.partition(":")
        rows.append((text or label, read_row(root / arm, recipe, label)))
    side = rows[0][1][0].width
    sheet = Image.new("RGB", (MARGIN + COLUMNS * (side + GAP), len(rows) * (side + GAP) + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (text, images) in enumerate(rows):
        top = GAP + row * (side + GAP)
        draw.multiline_text((GAP, top + side // 3), text.replace("|", "\n"), fill="black")
        for column, image in enumerate(images):
            sheet.paste(image, (MARGIN + column * (side + GAP), top))
    sheet.save(out, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
