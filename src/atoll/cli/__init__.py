"""The `atoll` command. Heavy imports stay inside the `run` of each verb, so help is fast."""

import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Return 0 for success, 2 for invalid input, 1 for a closed standard output (`| head`)."""
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
    # `--section.key VALUE` and `--section.key=VALUE` are removed first: tyro would reject options that are not fields
    # of the verb. The dot distinguishes a key of atoll.yaml from an option: no option of a verb contains one.
    rest: list[str] = []
    overrides: dict[str, str] = {}
    remaining = iter(arguments)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        if not (option.startswith("--") and "." in option):
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
        verb.overrides = overrides
    elif overrides:
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
