"""Run verbs of `atoll` on the null GPU, and print the exit code and the launches of each as JSON.

python verbs.py FOLDER    # with a prepared run in FOLDER/run and a trained one in FOLDER/trained
"""

import json
import shutil
import sys
from pathlib import Path

import torch

import nullgpu
from atoll import cli
from atoll.ensemble import sampler

SMALL = (
    *("--num-images", "8", "--num-real", "8", "--allow-small", "--steps", "2", "--num-val", "4"),
    *("--extractors", "efficientnet-lite0", "--num-trajectories", "2", "--diversity", "2", "2"),
)
SHORT = ("--train.total_images", "64", "--train.sample_every", "64")


def main(folder: Path) -> None:
    """Run all verbs that use a device."""
    assume_finite_results()
    run, trained, fresh = folder / "run", folder / "trained", folder / "fresh"
    fresh.mkdir()
    shutil.copy(run / "atoll.yaml", fresh)
    autoencoder = ("--latents.autoencoder", "emoji", "--data.resolution", "64")
    commands = {
        **{
            f"prepare {stage}": ("prepare", fresh, "--stage", stage, *autoencoder)
            for stage in ("ingest", "features", "latents", "text")
        },
        "sample": ("sample", trained, "a red circle", "--steps", "2", "--routing", "top-2"),
        "sample monolith": ("sample", trained, "--steps", "2", "--model", "monolith", "--solver", "dpm++"),
        "sample quantized": ("sample", trained, "--steps", "2", "--quantize", "int8", "--max-loaded-experts", "1"),
        "evaluate": ("evaluate", trained, *SMALL),
        "report": ("report", trained, "--steps", "2"),
        "train expert": ("train", run, "--expert", "0", *SHORT),
        "train router": ("train", run, "--router", *SHORT),
        "train monolith": ("train", run, "--monolith", *SHORT),
        "train student": ("train", trained, "--student", *SHORT),
        "train --dry-run": ("train", run, "--dry-run", "--expert", "1"),
        "export": ("export", trained, folder / "exported"),
        "sample exported": ("sample", folder / "exported", "a red circle", "--steps", "2", "--out", folder / "images"),
    }
    found = {}
    for name, command in commands.items():
        with nullgpu.watch() as seen:
            code = cli.main([str(word) for word in command])
        found[name] = {"code": code, "launches": seen.counts["launch"]}
    used = [torch.cuda.max_memory_allocated(number) > 0 for number in range(torch.cuda.device_count())]
    print(json.dumps({"verbs": found, "devices": sum(used)}))


def assume_finite_results() -> None:
    """Make the check of decoded latents succeed: the null GPU does not compute its result."""
    real = sampler.download

    def download(first: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.ones(()), *real(first, *others)[1:])

    sampler.download = download


if __name__ == "__main__":
    main(Path(sys.argv[1]))
