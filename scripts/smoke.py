"""A whole run in a minute, with the core dependencies only: prepare, train, sample, export, and open the export.

python scripts/smoke.py        # in an environment where Atoll is installed; `scripts/compat.py` runs it in many
"""

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import atoll
from atoll import cli

CONFIG = """
data: {{source: {source}, resolution: 16, val_fraction: 0.2}}
clusters: {{count: 2, method: labels}}
latents: {{autoencoder: pixels}}
text: {{encoder: none}}
networks: {{default: {{width: 32, depth: 1, heads: 2, patch: 4}}}}
router: {{network: DiT-XS/4, total_images: 64, batch_size: 16}}
train: {{total_images: 64, batch_size: 16}}
"""


def main() -> None:
    """Run the verbs in one process, and compare the images of the run with those of its export."""
    from diffusers import DiffusionPipeline

    with tempfile.TemporaryDirectory() as folder:
        source, run, exported = (Path(folder) / name for name in ("images", "run", "exported"))
        for number, color in enumerate(("crimson", "seagreen")):
            (source / color).mkdir(parents=True)
            for side in range(20):
                Image.new("RGB", (20 + side, 24), color).save(source / color / f"{number}-{side}.png")
        run.mkdir()
        (run / "atoll.yaml").write_text(CONFIG.format(source=source))
        for arguments in (
            ["prepare", run],
            ["train", run, "--expert", "0"],
            ["train", run, "--expert", "1"],
            ["train", run, "--router"],
            ["sample", run, "--steps", "2", "--out", Path(folder) / "images.png"],
            ["export", run, exported, "--standalone"],
        ):
            if status := cli.main([str(argument) for argument in arguments]):
                sys.exit(f"atoll {arguments[0]}: status {status}")
        how = {"num_inference_steps": 2, "routing": "top-2", "seed": 1, "num_images_per_prompt": 2}
        expected = atoll.load(run, device="cpu").sample(**how)
        pipe = DiffusionPipeline.from_pretrained(exported, trust_remote_code=True)
        for one, other in zip(pipe(**how).images, expected, strict=True):
            assert np.array_equal(np.asarray(one), np.asarray(other))
    packages = ("torch", "diffusers", "transformers", "pydantic", "numpy")
    print("smoke:", ", ".join(f"{name} {version(name)}" for name in packages), f"| {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
