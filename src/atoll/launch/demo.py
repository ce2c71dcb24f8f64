"""`atoll demo`: the whole journey on some of the built-in emoji, in the minutes that are given.

Each stage is a command that anyone can type; the demo types them in order, trains one network on each core, and ends
with a report. What is done is not done again, so an interrupted demo continues.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.config import Config
from atoll.core.config_yaml import to_yaml
from atoll.core.errors import AtollError
from atoll.core.layout import CONFIG_FILE
from atoll.core.metrics_file import last_line
from atoll.core.presets import PRESETS
from atoll.core.progress import progress

MINUTES = 15.0
"""Within these the preset's samples fit on two cores, with everything around the training."""
AROUND = 4.0
"""Minutes of it that are not training: preparation, evaluation, report."""
PAUSE = 0.5
GUIDANCE, STEPS = 1.0, 25
"""No guidance: networks that know their pictures by heart need none, and it would cost as much again."""

PROMPTS = (
    *("grinning face", "smiling face with sunglasses", "pig face", "flag of Bolivia", "flag of Brazil", "blue heart"),
    *("red apple", "panda", "cactus", "grimacing face", "flag of Italy", "grey heart"),
)
"""What the report's pictures show: captions of training pictures, and three at the end that no training sees."""


@dataclass(frozen=True)
class Job:
    """One network to train."""

    name: str
    arguments: tuple[str, ...]
    samples: int


def scaled(minutes: float) -> Config:
    """The preset's settings with as many samples as so many minutes allow."""
    config = configuration.resolve(PRESETS["demo"], source="preset demo")
    if minutes <= AROUND:
        raise AtollError(f"--minutes {minutes:g} leaves no time for training; expected more than {AROUND:g}")
    share = (minutes - AROUND) / (MINUTES - AROUND)
    assert config.router.samples is not None
    train = {"samples": _steps(share * config.train.samples, config.train.batch)}
    router = {"samples": _steps(share * config.router.samples, config.router.batch or config.train.batch)}
    changes = {"train": config.train.model_copy(update=train), "router": config.router.model_copy(update=router)}
    return config.model_copy(update=changes)


def _steps(samples: float, batch: int) -> int:
    return max(1, round(samples / batch)) * batch


def jobs(config: Config) -> list[Job]:
    """Every network of the demo, the longest first.

    The monolith sees as many samples as all experts together: with equal networks that is the same number of FLOPs, and
    it need not wait for them.
    """
    experts, each = config.clusters.count, config.train.samples
    dense = Job("monolith", ("--monolith", "--train.samples", str(experts * each)), experts * each)
    found = [Job(layout.expert_job(number), ("--expert", str(number)), each) for number in range(experts)]
    return [dense, *found, Job("router", ("--router",), config.router.samples or each)]


def missing(run: Path, config: Config) -> list[Job]:
    """The jobs that are not finished."""
    return [job for job in jobs(config) if Artifact(run, layout.final(job.name)).manifest() is None]


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
    train(run, missing(run, config))
    say("4 of 5: figures")
    command(*evaluation(run))
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
    if config.train.samples != scaled(minutes).train.samples:
        print(f"{file} is there: its {config.train.samples:,} samples for each expert count, not --minutes {minutes:g}")
    return config


def evaluation(run: Path) -> list[str]:
    """The command that takes the figures; few samples, for the minutes are few."""
    how = ["--samples", "256", "--steps", str(STEPS), "--guidance", f"{GUIDANCE:g}", "--routings", "top-1", "top-2"]
    return [
        "evaluate",
        str(run),
        *how,
        "--diversity",
        "16",
        "4",
        "--prompts",
        "train",
        "--skip",
        "trajectories",
        "--allow-few",
    ]


def train(run: Path, todo: Sequence[Job]) -> None:
    """Train the jobs, as many at a time as there are cores: small networks gain little from a second one."""
    waiting, running = list(todo), dict[Job, subprocess.Popen[bytes]]()
    total, seen = sum(job.samples for job in todo), sum(position(run, job) for job in todo)
    with stopping(running), progress("training", total, seen) as bar:
        while waiting or running:
            while waiting and len(running) < cores():
                running[waiting[0]] = begin(run, waiting[0])
                waiting.pop(0)
            time.sleep(PAUSE)
            for job in [job for job, process in running.items() if process.poll() is not None]:
                finish(run, job, running.pop(job).returncode)
            now = sum(job.samples for job in todo if job not in waiting and job not in running)
            now += sum(position(run, job) for job in (*waiting, *running))
            bar.update(now - seen)
            seen = now


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def begin(run: Path, job: Job) -> subprocess.Popen[bytes]:
    """Start a job with one thread; what it says goes to its log."""
    log = log_of(run, job)
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"{job.name}: {job.samples:,} samples, log in {log}", file=sys.stderr, flush=True)
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "atoll.cli", "train", str(run), *job.arguments],
            stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )  # fmt: skip


def finish(run: Path, job: Job, code: int) -> None:
    """Note that a job ended; a failed one ends the demo, with its last words."""
    if code:
        last = log_of(run, job).read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        raise AtollError("\n".join([f"{job.name} ended with code {code}:", *last, f"all of it: {log_of(run, job)}"]))
    print(f"{job.name}: done", file=sys.stderr, flush=True)


def log_of(run: Path, job: Job) -> Path:
    """Where a job's words go."""
    return run / "logs" / f"{job.name.replace('/', '-')}.log"


def position(run: Path, job: Job) -> int:
    """Samples that a job has seen, by its journal."""
    line = last_line(run / layout.metrics(job.name))
    return line.samples if line else 0


@contextmanager
def stopping(running: dict[Job, subprocess.Popen[bytes]]) -> Iterator[None]:
    """However the work ends, also by SIGTERM, ask what still runs to save and wait for it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        raise AtollError("stopped; networks in training were saved, and the same command continues") from None
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
        signal.signal(signal.SIGTERM, before)


def command(*words: str) -> None:
    """Type one command of `atoll`, in sight of the user."""
    print(f"$ atoll {' '.join(_quoted(word) for word in words)}", flush=True)
    try:
        code = subprocess.run([sys.executable, "-m", "atoll.cli", *words], check=False).returncode
    except KeyboardInterrupt:
        raise AtollError("stopped; the same command continues") from None
    if code:
        raise AtollError(f"atoll {words[0]} ended with code {code}; mend what it says, and the same command continues")


def _quoted(word: str) -> str:
    return f'"{word}"' if " " in word else word


def say(what: str) -> None:
    """The head of a stage."""
    print(f"\n== {what}", flush=True)


def farewell(run: Path, report: Path, seconds: float) -> str:
    """Where the report is, and what to try next."""
    how = f"--guidance {GUIDANCE:g} --steps {STEPS}"
    return "\n".join(
        [
            f"\ndone in {seconds / 60:.1f} minutes. Open the report in a browser: {report.resolve()}",
            *([] if shutil.which("atoll") else [f"first: source {sys.prefix}/bin/activate"]),
            "next:",
            f'  atoll sample {run} "red heart" "grinning face" {how} --trace    # and see who drew what',
            f'  atoll sample {run} "flag of Italy" --model monolith {how}    # the same from the dense model',
            f"  atoll evaluate {run} --samples 2500 --allow-few {how}    # figures of more samples",
            f"  atoll report {run}    # the page again, with them",
            "  atoll demo --minutes 60 --run runs/long    # more training: better pictures",
            f"  atoll serve {run}    # and now paint: a page in your browser, made by your own experts",
        ]
    )
