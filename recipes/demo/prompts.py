"""Compare experts and monolith prompt by prompt: prompts.py RUN [--sheet OUT.png].

For each prompt of the demo's report, both models generate 16 images from the same noise. The distance of an image is
the Euclidean distance of its Inception features to those of the real image with that caption. The script prints the
median distance of each prompt and model as a Markdown table, and the number of prompts for which the experts' is at
most the monolith's. The sheet shows the real image, four images of the experts and four of the monolith in each row.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

import atoll
from atoll.apps.evaluate.extractors import open_vision
from atoll.apps.launch.demo import PROMPTS, STEPS
from atoll.core import config as configuration
from atoll.data.sources.source import decode
from atoll.data.stages.ingest import open_configured

SEEDS = 16
SHOWN = 4
"""Images of each model and prompt on the sheet."""


def real_images(run: Path) -> dict[str, Image.Image]:
    """Return the image of each prompt from the source of the run."""
    config = configuration.load(run)
    found: dict[str, Image.Image] = {}
    for image in open_configured(config.data).images():
        if image.caption in PROMPTS and image.caption not in found:
            found[image.caption] = decode(image.read(), config.data.resolution)
    return found


def main() -> None:
    """Generate the images, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--guidance-scale", type=float, default=1.0)
    parser.add_argument("--guidance-weights", default="conditional")
    parser.add_argument("--routing", default="top-1")
    parser.add_argument("--sheet", type=Path)
    args = parser.parse_args()
    vision = open_vision("inception")
    real = real_images(args.run)
    prompts = [prompt for prompt in PROMPTS if prompt in real]
    targets = vision(np.stack([np.asarray(real[prompt]) for prompt in prompts]))  # (prompts, features)
    medians: dict[str, Tensor] = {}
    images: dict[str, list[Image.Image]] = {}
    for model in ("experts", "monolith"):
        # Images cycle through the prompts: image i has prompt i mod len(prompts).
        images[model] = atoll.load(args.run, model).sample(
            prompts, num_images=SEEDS * len(prompts), steps=STEPS, routing=args.routing,
            guidance_scale=args.guidance_scale, guidance_weights=args.guidance_weights,
        )  # fmt: skip
        features = vision(np.stack([np.asarray(image) for image in images[model]])).unflatten(0, (SEEDS, -1))
        medians[model] = torch.linalg.vector_norm(features - targets, dim=-1).median(0).values  # (prompts,)
    print("| prompt | experts | monolith |\n|---|---|---|")
    for number, prompt in enumerate(prompts):
        print(f"| {prompt} | {medians['experts'][number]:.2f} | {medians['monolith'][number]:.2f} |")
    better = int((medians["experts"] <= medians["monolith"]).sum())
    print(f"\nexperts at most the monolith's distance: {better} of {len(prompts)} prompts")
    print(f"mean of the medians: experts {medians['experts'].mean():.2f}, monolith {medians['monolith'].mean():.2f}")
    if args.sheet:
        draw_sheet(args.sheet, prompts, real, images=images)


def draw_sheet(
    out: Path, prompts: list[str], real: dict[str, Image.Image], images: dict[str, list[Image.Image]]
) -> None:
    """Draw one row per prompt."""
    side, gap, margin = next(iter(real.values())).width, 4, 190
    sheet = Image.new(
        "RGB", (margin + (1 + 2 * SHOWN) * (side + gap) + 4 * gap, len(prompts) * (side + gap) + 20), "white"
    )
    draw = ImageDraw.Draw(sheet)
    for column, text in ((0, "real"), (1, "experts"), (1 + SHOWN, "monolith")):
        draw.text((margin + column * (side + gap) + 2 * gap * min(column, 2), 4), text, fill="black")
    for row, prompt in enumerate(prompts):
        top = 20 + row * (side + gap)
        draw.text((gap, top + side // 3), prompt, fill="black")
        shown = [real[prompt], *(images[model][seed * len(prompts) + row] for model in images for seed in range(SHOWN))]
        for column, image in enumerate(shown):
            group = 0 if column == 0 else 1 if column <= SHOWN else 2
            sheet.paste(image, (margin + column * (side + gap) + 2 * gap * group, top))
    sheet.save(out, optimize=True)


if __name__ == "__main__":
    main()
