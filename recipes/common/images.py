"""The same prompts and noise by several models: pictures.py ROOT/seedS RECIPE OUT.png ARM:LABEL[=TEXT]...

LABEL is that of a model in the evaluation ("experts top-1", "monolith"); TEXT stands beside its row, | breaks it.
"""

import json
import sys
from pathlib import Path

from PIL import Image, ImageDraw
from safetensors.torch import load_file

COUNT, GAP, LEFT = 14, 4, 120


def row(arm: Path, recipe: str, label: str) -> list[Image.Image]:
    """The first pictures of a model's set."""
    answer = json.loads((arm / "evaluation" / f"{recipe}.json").read_text())
    model = next(model for model in answer["models"] if model["label"] == label)
    folder = arm / model["metrics"]["inception"]["protocol"]["set"]
    pictures = load_file(sorted(folder.glob("*.safetensors"))[0])["pictures"][:COUNT]
    return [Image.fromarray(picture) for picture in pictures.numpy()]


def main(root: Path, recipe: str, out: Path, wanted: list[str]) -> None:
    """Draw one row for each model."""
    rows = []
    for want in wanted:
        place, _, text = want.partition("=")
        arm, _, label = place.partition(":")
        rows.append((text or label, row(root / arm, recipe, label)))
    side = rows[0][1][0].width
    page = Image.new("RGB", (LEFT + COUNT * (side + GAP), len(rows) * (side + GAP) + GAP), "white")
    pen = ImageDraw.Draw(page)
    for number, (text, pictures) in enumerate(rows):
        top = GAP + number * (side + GAP)
        pen.multiline_text((GAP, top + side // 3), text.replace("|", "\n"), fill="black")
        for place, picture in enumerate(pictures):
            page.paste(picture, (LEFT + place * (side + GAP), top))
    page.save(out, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
