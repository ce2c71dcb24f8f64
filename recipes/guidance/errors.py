"""Why guidance spoils images of prompts that the networks have memorized: velocity errors by time, and contrast.

    python recipes/guidance/errors.py runs/weak --images recipes/guidance/images.png

The first tables are means over the experts: 32 images of each cluster (fewer for validation), noised once in each of
ten bins of t. The last one has the standard deviation of the final latents of 8 prompts; that of real latents is 0.98.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import atoll
from atoll.data.dataset import Shards
from atoll.experts.expert import condition_of
from atoll.experts.validation import TIME_BINS, ValidationSet, velocity_errors

IMAGES = 32
PROMPTS = [
    "grinning face",
    "pig face",
    "flag of Bolivia",
    "flag of Brazil",
    "blue heart",
    "red apple",
    "panda",
    "cactus",
]
INTERVAL = (0.2, 0.7)
SETTINGS = {
    "none": {"guidance_scale": 1.0},
    "2": {"guidance_scale": 2.0},
    "3": {"guidance_scale": 3.0},
    "3, t from 0.2 to 0.7": {"guidance_scale": 3.0, "guidance_interval": INTERVAL},
    "3, rescale 0.7": {"guidance_scale": 3.0, "guidance_rescale": 0.7},
    "auto 2": {"guidance_scale": 2.0, "guidance": "autoguidance"},
    "auto 3": {"guidance_scale": 3.0, "guidance": "autoguidance"},
}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--images", type=Path)
    options = parser.parse_args()
    sampler = atoll.load(options.run)
    ensemble, count = sampler.ensemble, len(sampler.ensemble.references)
    ensemble.check_weak()
    for split in ("train", "validation"):
        errors = {name: torch.zeros(TIME_BINS) for name in ("v", "v_null", "v_weak", "v - v_null", "v - v_weak")}
        rows = torch.zeros(TIME_BINS)
        for k in range(count):
            expert, weak = (ensemble.cache.get(number).expert for number in (k, count + k))
            for part in ValidationSet(Shards.open(options.run, [k], split), 0, IMAGES).batches(torch.device("cpu")):
                x, t, target = part.noised.input, part.noised.t, part.noised.target
                condition = condition_of(part.batch, expert.conditioning)
                v, v_null = expert.velocity(x, t, condition), expert.velocity(x, t, condition.unconditional())
                v_weak = weak.velocity(x, t, condition)
                pairs = ((v, target), (v_null, target), (v_weak, target), (v, v_null), (v, v_weak))
                bins = (t * TIME_BINS).long().clamp(max=TIME_BINS - 1)
                for total, (one, other) in zip(errors.values(), pairs, strict=True):
                    total.index_add_(0, bins, velocity_errors(one, other, t))
                rows += torch.bincount(bins, minlength=TIME_BINS)
        print(f"\n{split}: mean squared error or difference, by t\n")
        for name, total in errors.items():
            print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in (total / rows).tolist()) + " |")
    print("\n| guidance | standard deviation of the latents |\n|---|---|")
    grid = []
    for name, how in SETTINGS.items():
        samples = sampler.generate(PROMPTS, num_inference_steps=25, seed=3, **how)
        print(f"| {name} | {samples.latents.flatten(1).std(1).mean():.2f} |", flush=True)
        grid.append(np.concatenate([np.asarray(image) for image in samples.images], 1))
    if options.images:
        Image.fromarray(np.concatenate(grid)).save(options.images)


if __name__ == "__main__":
    main()
