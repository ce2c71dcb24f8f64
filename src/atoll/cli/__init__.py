"""The `atoll` command. Heavy imports stay inside the `run` of each verb, so help is fast."""

import io
import os
import re
import select
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import tyro

from atoll.cli import evaluate, launch, models, sample, share, start, studio, train
from atoll.cli.verb import Configured, Verb
from atoll.core import disk
from atoll.core.config import absolute_source
from atoll.core.errors import AtollError, unknown
from atoll.core.version import __version__

GROUPS: dict[str, dict[str, type[Verb]]] = {
    "start": {"demo": start.Demo, "init": start.Init, "config": start.ShowConfig, "prepare": start.Prepare},
    "train": {"train": train.Train, "launch": launch.Launch, "merge": train.Merge},
    "share": {
        "keys": share.Keys,
        "push": share.Push,
        "trust": share.Trust,
        "join": share.Join,
        "status": share.Status,
        "admit": share.Admit,
        "pull": share.Pull,
    },
    "use": {
        "sample": sample.Sample,
        "evaluate": evaluate.Evaluate,
        "report": evaluate.Report,
        "serve": studio.Serve,
    },
    "models": {"convert": models.Convert, "export": models.Export},
}
VERBS: dict[str, type[Verb]] = {name: verb for group in GROUPS.values() for name, verb in group.items()}
# Flags without a --no-OPTION twin: one line of help for each.
TYRO_CONFIG = (tyro.conf.FlagCreatePairsOff,)
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the number of the signal, as in shells."""
DIFFUSERS = {
    "num-inference-steps": "--steps",
    "num-images-per-prompt": "--num-images",
    "guidance-rescale": "--rescale",
    "height": "--size WIDTHxHEIGHT",
    "width": "--size WIDTHxHEIGHT",
    "checkpointing-steps": "--train.save_every, in images",
    "dataset-name": "--data.source",
    "gradient-accumulation-steps": "--train.grad_accum_steps",
    "gradient-checkpointing": "--train.activation_checkpointing true",
    "instance-data-dir": "--data.source",
    "learning-rate": "--train.lr",
    "lr-scheduler": "--train.lr_schedule",
    "lr-warmup-steps": "--train.warmup_images, in images",
    "max-train-steps": "--train.total_images, in images",
    "mixed-precision": "--train.precision",
    "num-train-epochs": "--train.total_images, in images",
    "pretrained-model-name-or-path": "atoll init --base",
    "report-to": "--train.trackers",
    "resolution": "--data.resolution",
    "train-batch-size": "--train.batch_size",
    "train-data-dir": "--data.source",
}
"""Options of diffusers' pipelines and training scripts, and what they are called here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Return 0 for success, 2 for invalid input, 130 after Ctrl-C, 1 for a closed output (`| head`)."""
    try:
        try:
            return _main(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Only a closed standard output is normal; a pipe of a worker process that breaks is an error.
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):
            raise
        # The interpreter flushes standard output once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _main(arguments: list[str]) -> int:
    name, *rest = arguments or ["help"]
    verb: Verb | None = None
    try:
        if name in ("-h", "--help", "help"):
            print(overview())
        elif name in ("-V", "--version"):
            print(f"atoll {__version__}")
        else:
            verb = parse(name, rest)
            verb.run()
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("atoll: stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if not disk.is_full(error):
            raise
        # A write to an open file has no name in its error.
        print(f"atoll: {disk.full_error(Path(error.filename or getattr(verb, 'folder', '.')))}", file=sys.stderr)
        return 2
    return 0


def parse(name: str, arguments: list[str]) -> Verb:
    """Return the verb with its options and settings. Raise `AtollError`, or exit as tyro does, if they are invalid."""
    if name not in VERBS:
        raise AtollError(f"{unknown('verb', name, VERBS)}\nsee: atoll --help")
    if {"-h", "--help"} & set(arguments):
        print(verb_help(name))
        sys.exit(0)
    # `--section.key VALUE` and `--section.key=VALUE` are removed first: tyro would reject options that are not fields
    # of the verb. The dot distinguishes a key of atoll.yaml from an option: no option of a verb contains one.
    rest: list[str] = []
    overrides: dict[str, str] = {}
    remaining = iter(arguments)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        if not (option.startswith("--") and "." in option):
            if own := option.startswith("--") and DIFFUSERS.get(option[2:].replace("_", "-")):
                raise AtollError(f"unknown option {option}; did you mean {own}?")
            rest.append(argument)
            continue
        following = value if equals else next(remaining, None)
        if following is None:
            raise AtollError(f"{option} needs a value: {option} VALUE")
        overrides[option.removeprefix("--")] = following
    if "data.source" in overrides:
        here = absolute_source(overrides["data.source"], Path.cwd(), kind=overrides.get("data.kind"))
        overrides["data.source"] = here
    verb = tyro.cli(VERBS[name], args=rest, prog=f"atoll {name}", config=TYRO_CONFIG)
    if isinstance(verb, Configured):
        return cast(Verb, replace(cast(Any, verb), overrides=overrides))
    if overrides:
        raise AtollError(f"atoll {name} accepts no settings of a run: --{', --'.join(overrides)}")
    return verb


def overview() -> str:
    """Return the help of `atoll` itself: the verbs by group, on one screen of 80 columns and 24 rows."""
    lines = [
        "usage: atoll VERB [options]    Train and sample decentralized diffusion models.",
        "atoll VERB --help lists options; keys of atoll.yaml, too: --clusters.count 4.",
        "",
    ]
    for group, verbs in GROUPS.items():
        for number, (name, verb) in enumerate(verbs.items()):
            lines.append(f"{'' if number else group:<7}{name:<9} {(verb.__doc__ or '').splitlines()[0]}")
    return "\n".join(lines)


def verb_help(name: str) -> str:
    """Return the help of a verb: tyro's with a usage line of at most 80 columns, then the epilog of the verb."""
    printed = io.TextIOWrapper(io.BytesIO(), sys.stdout.encoding)
    printed.isatty = sys.stdout.isatty  # type: ignore[method-assign]  # tyro prints colors to a terminal
    with redirect_stdout(printed), suppress(SystemExit):
        tyro.cli(VERBS[name], args=["--help"], prog=f"atoll {name}", config=TYRO_CONFIG)
    printed.seek(0)
    usage, rest = printed.read().rstrip().split("\n", 1)
    # tyro lists all options there if they have less than 80 characters, without the name of the verb.
    usage = re.sub(r"\[--.*", "[OPTIONS]", re.sub(r"\x1b\[[\d;]*m", "", usage))  # without colors
    epilog = getattr(VERBS[name], "epilog", "")
    return "\n".join([usage, rest, *([epilog.strip("\n")] if epilog else [])])
