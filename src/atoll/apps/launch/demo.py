"""`atoll demo`: all stages on a part of the built-in emoji, scaled to a given number of minutes.

Each stage is an ordinary `atoll` command. The demo runs them in order, trains one network per core, and writes a
report. You can interrupt it; running it again resumes.
"""

import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from atoll.apps.launch.launch import submit
from atoll.apps.launch.launcher import LaunchSettings
from atoll.apps.launch.local import Local, cores
from atoll.apps.launch.steps import GroupKind, LaunchRequest
from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.config import Config, to_yaml
from atoll.core.errors import AtollError
from atoll.core.layout import CONFIG_FILE
from atoll.core.presets import PRESETS

# For two cores, with the number of images in the preset `demo`.
MINUTES = 15.0
"""Minutes that the demo takes with the images of the preset."""
OVERHEAD_MINUTES = 4.0
"""Minutes of these that are not training: preparation, evaluation, report."""
JOBS: tuple[GroupKind, ...] = ("experts", "router", "monolith")
# Scale 1 turns guidance off: networks that memorize a small training set do not need it, and it would double the cost
# of sampling.
GUIDANCE, STEPS = 1.0, 25
"""Guidance scale and number of steps of the sampler."""

PROMPTS = (
    *("grinning face", "smiling face with sunglasses", "pig face", "flag of Bolivia", "flag of Brazil", "blue heart"),
    *("red apple", "panda", "cactus", "grimacing face", "flag of Italy", "grey heart"),
)
"""Prompts of the report: captions of training images, and three validation captions at the end."""


def scaled(minutes: float) -> Config:
    """Return the settings of the preset, with as many training images as the given minutes allow.

    The monolith sees as many images as all experts together. With equal networks, that is the same number of FLOPs.
    """
    config = configuration.resolve(PRESETS["demo"], source="preset demo")
    if minutes <= OVERHEAD_MINUTES:
        raise AtollError(f"--minutes {minutes:g} leaves no time for training; expected more than {OVERHEAD_MINUTES:g}")
    share = (minutes - OVERHEAD_MINUTES) / (MINUTES - OVERHEAD_MINUTES)
    assert config.router.total_images is not None
    assert config.router.batch_size is not None
    # Experts and router have their own batch sizes, and each count must be a multiple of its own.
    sizes = (config.train.total_images, config.train.batch_size), (config.router.total_images, config.router.batch_size)
    each, router = (max(1, round(share * images / batch)) * batch for images, batch in sizes)
    changes = {
        "train": config.train.model_copy(update={"total_images": each}),
        "router": config.router.model_copy(update={"total_images": router}),
        "monolith": config.monolith.model_copy(update={"total_images": config.clusters.count * each}),
    }
    return config.model_copy(update=changes)


def demo(run: Path, minutes: float = MINUTES) -> Path:
    """Run all unfinished stages of the demo; return the path of the report."""
    start = time.monotonic()
    print_stage(f"1 of 5: settings in {run / CONFIG_FILE}")
    config = load_or_write_config(run, minutes)
    print_stage("2 of 5: images, clustered by visual features")
    command("prepare", str(run))
    print_stage(
        f"3 of 5: {config.clusters.count} experts, one per cluster; a router; a monolith with the same total FLOPs"
    )
    train(run, config)
    print_stage("4 of 5: metrics")
    guidance = f"{GUIDANCE:g}"
    # Top-1 alone, which is the better routing here: another one takes half a minute.
    sampling = ("--steps", str(STEPS), "--guidance-scale", guidance, "--prompts", "train", "--routings", "top-1")
    sizes = ("--num-images", "256", "--diversity", "16", "4", "--without", "trajectories", "--allow-small")
    command("evaluate", str(run), *sampling, *sizes)
    print_stage("5 of 5: sample images and report")
    report = run / layout.REPORT_FILE
    command("report", str(run), "--routings", "top-1", "top-2", "full", "--prompts", *PROMPTS)
    print(next_steps(run, report, time.monotonic() - start), flush=True)
    return report


def load_or_write_config(run: Path, minutes: float) -> Config:
    """Return the settings of the run; write them first if there are none."""
    file = run / CONFIG_FILE
    if not file.exists():
        run.mkdir(parents=True, exist_ok=True)
        file.write_text(to_yaml(scaled(minutes)), encoding="utf-8")
    config = configuration.load(run)
    if config.train.total_images != scaled(minutes).train.total_images:
        print(f"{file} exists and sets {config.train.total_images:,} images per expert; --minutes is ignored")
    return config


def train(run: Path, config: Config) -> None:
    """Launch all unfinished training jobs, one per core with one thread each."""
    # Networks this small gain little from a second thread, so parallel jobs finish sooner.
    slots = cores()
    print(f"$ atoll launch {run} --jobs {' '.join(JOBS)} --max-parallel {slots}", flush=True)
    settings = LaunchSettings(run.resolve(), config.island, max_parallel=slots)
    found = submit(Local(settings), config, LaunchRequest(JOBS))
    if found.active_elsewhere:
        raise AtollError(
            f"another launch trains {', '.join(found.active_elsewhere)}; run the demo again when it has ended"
        )


def command(*arguments: str) -> None:
    """Print and run one `atoll` command."""
    print(f"$ atoll {shlex.join(arguments)}", flush=True)
    try:
        code = subprocess.run([sys.executable, "-m", "atoll.cli", *arguments], check=False).returncode
    except KeyboardInterrupt:
        raise AtollError("stopped; run the same command again to resume") from None
    if code:
        raise AtollError(
            f"atoll {arguments[0]} ended with code {code}; fix the reported error, then run the same command to resume"
        )


def print_stage(what: str) -> None:
    """Print the heading of a stage."""
    print(f"\n== {what}", flush=True)


def next_steps(run: Path, report: Path, seconds: float) -> str:
    """Return the closing text: the path of the report, and commands to try next."""
    sampling = f"--guidance-scale {GUIDANCE:g} --steps {STEPS}"
    return "\n".join(
        [
            f"\ndone in {seconds / 60:.1f} minutes. Open the report in a browser: {report.resolve()}",
            *([] if shutil.which("atoll") else [f"first: source {sys.prefix}/bin/activate"]),
            "next:",
            f'  atoll sample {run} "red heart" "grinning face" {sampling} --save-routing    # saves the expert weights',
            f'  atoll sample {run} "flag of Italy" --model monolith {sampling}    # the dense model for comparison',
            f"  atoll evaluate {run} --num-images 2500 --allow-small {sampling}    # metrics with more images",
            f"  atoll report {run}    # updates the report with them",
            "  atoll demo --minutes 60 --run runs/long    # more training, better images",
            f"  atoll serve {run}    # the studio: generate images in your browser",
        ]
    )
