"""`atoll demo`: the whole journey on some of the built-in emoji, in the minutes that are given.

Each stage is a command that anyone can type. The demo runs them in order, trains one network on each core, and ends
with a report. You can interrupt it; running it again resumes.
"""

import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.config import Config
from atoll.core.config_yaml import to_yaml
from atoll.core.errors import AtollError
from atoll.core.layout import CONFIG_FILE
from atoll.core.presets import PRESETS
from atoll.launch.base import Setting
from atoll.launch.launch import submit
from atoll.launch.local import Local, cores
from atoll.launch.plan import Kind, Wish

MINUTES = 15.0
"""Within these the preset's images fit on two cores, with everything around the training."""
AROUND = 4.0
"""Minutes of it that are not training: preparation, evaluation, report."""
JOBS: tuple[Kind, ...] = ("experts", "router", "monolith")
GUIDANCE, STEPS = 1.0, 25
"""No guidance: networks that know their pictures by heart need none, and it would cost as much again."""

PROMPTS = (
    *("grinning face", "smiling face with sunglasses", "pig face", "flag of Bolivia", "flag of Brazil", "blue heart"),
    *("red apple", "panda", "cactus", "grimacing face", "flag of Italy", "grey heart"),
)
"""What the report's pictures show: captions of training pictures, and three at the end that no training sees."""


def scaled(minutes: float) -> Config:
    """Return the preset's settings with as many images as so many minutes allow.

    The monolith sees as many images as all experts together. With equal networks that is the same number of FLOPs, and
    it need not wait for them.
    """
    config = configuration.resolve(PRESETS["demo"], source="preset demo")
    if minutes <= AROUND:
        raise AtollError(f"--minutes {minutes:g} leaves no time for training; expected more than {AROUND:g}")
    share, batch = (minutes - AROUND) / (MINUTES - AROUND), config.train.batch_size
    assert config.router.total_images is not None
    assert config.router.batch_size is None
    each, router = (
        max(1, round(share * one / batch)) * batch for one in (config.train.total_images, config.router.total_images)
    )
    changes = {
        "train": config.train.model_copy(update={"total_images": each}),
        "router": config.router.model_copy(update={"total_images": router}),
        "monolith": config.monolith.model_copy(update={"total_images": config.clusters.count * each}),
    }
    return config.model_copy(update=changes)


def demo(run: Path, minutes: float = MINUTES) -> Path:
    """Do what is left of the demo, and return where the report is."""
    start = time.monotonic()
    say(f"1 of 5: settings in {run / CONFIG_FILE}")
    config = settle(run, minutes)
    say("2 of 5: pictures, sorted into clusters by what they look like")
    command("prepare", str(run))
    say(
        f"3 of 5: {config.clusters.count} experts, each from its own cluster alone; a router; a monolith of equal FLOPs"
    )
    train(run, config)
    say("4 of 5: figures")
    how = (
        "--steps",
        str(STEPS),
        "--guidance-scale",
        f"{GUIDANCE:g}",
        "--prompts",
        "train",
        "--routings",
        "top-1",
        "top-2",
    )
    few = ("--num-images", "256", "--diversity", "16", "4", "--without", "trajectories", "--allow-small")
    command("evaluate", str(run), *how, *few)
    say("5 of 5: pictures and report")
    report = run / layout.REPORT_FILE
    command("report", str(run), "--routings", "top-1", "top-2", "full", "--prompts", *PROMPTS)
    print(farewell(run, report, time.monotonic() - start), flush=True)
    return report


def settle(run: Path, minutes: float) -> Config:
    """The settings of the run, written now or before."""
    file = run / CONFIG_FILE
    if not file.exists():
        run.mkdir(parents=True, exist_ok=True)
        file.write_text(to_yaml(scaled(minutes)), encoding="utf-8")
    config = configuration.load(run)
    if config.train.total_images != scaled(minutes).train.total_images:
        print(f"{file} exists: each expert trains on its {config.train.total_images:,} images; --minutes is ignored")
    return config


def train(run: Path, config: Config) -> None:
    """Launch what is missing, one job with one thread on each core: small networks gain little from a second thread."""
    slots = cores()
    print(f"$ atoll launch {run} --jobs {' '.join(JOBS)} --max-parallel {slots}", flush=True)
    run = run.resolve()
    found = submit(Local(Setting(run, config.island, at_once=slots)), run, config, wish=Wish(JOBS))
    if found.elsewhere:
        raise AtollError(f"another launch trains {', '.join(found.elsewhere)}; run the demo again when it has ended")


def command(*words: str) -> None:
    """Run one command of `atoll`, and show it to the user."""
    print(f"$ atoll {shlex.join(words)}", flush=True)
    try:
        code = subprocess.run([sys.executable, "-m", "atoll.cli", *words], check=False).returncode
    except KeyboardInterrupt:
        raise AtollError("stopped; the same command continues") from None
    if code:
        raise AtollError(f"atoll {words[0]} ended with code {code}; fix what it says, and the same command continues")


def say(what: str) -> None:
    """The head of a stage."""
    print(f"\n== {what}", flush=True)


def farewell(run: Path, report: Path, seconds: float) -> str:
    """Where the report is, and what to try next."""
    how = f"--guidance-scale {GUIDANCE:g} --steps {STEPS}"
    return "\n".join(
        [
            f"\ndone in {seconds / 60:.1f} minutes. Open the report in a browser: {report.resolve()}",
            *([] if shutil.which("atoll") else [f"first: source {sys.prefix}/bin/activate"]),
            "next:",
            f'  atoll sample {run} "red heart" "grinning face" {how} --save-routing    # and see who drew what',
            f'  atoll sample {run} "flag of Italy" --model monolith {how}    # the same from the dense model',
            f"  atoll evaluate {run} --num-images 2500 --allow-small {how}    # figures of more images",
            f"  atoll report {run}    # the page again, with them",
            "  atoll demo --minutes 60 --run runs/long    # more training: better pictures",
            f"  atoll serve {run}    # and now paint: a page in your browser, made by your own experts",
        ]
    )
