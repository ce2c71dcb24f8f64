"""The `atoll` command. Each package has a file with its verbs. Heavy imports stay inside `run`, so help is fast."""

import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from atoll.cli import convert, core, data, ensemble, evaluate, islands, launch, studio, train
from atoll.cli.verb import Configured, Verb
from atoll.core import disk
from atoll.core.errors import AtollError, unknown
from atoll.core.version import __version__

GROUPS: dict[str, dict[str, type[Verb]]] = {
    "start": {"demo": core.Demo, "init": core.Init, "config": core.Config, "prepare": data.Prepare},
    "train": {"train": train.Train, "launch": launch.Launch, "merge": train.Merge},
    "share": {
        "keys": islands.Keys,
        "push": islands.Push,
        "trust": islands.Trust,
        "join": islands.Join,
        "status": islands.Status,
        "admit": islands.Admit,
        "pull": islands.Pull,
    },
    "use": {
        "sample": ensemble.Sample,
        "evaluate": evaluate.Evaluate,
        "report": evaluate.Report,
        "serve": studio.Serve,
    },
    "models": {"convert": convert.Convert, "export": ensemble.Export},
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
        if not _output_is_closed():
            raise
        # The interpreter flushes standard output once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"atoll {__version__}")
        return 0
    name, *rest = arguments
    verb: Verb | None = None
    try:
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
    # Overrides are removed first: tyro would reject options that are not fields of the verb.
    rest, overrides = split_overrides(arguments)
    verb = tyro.cli(VERBS[name], args=rest, prog=f"atoll {name}", config=TYRO_CONFIG)
    if isinstance(verb, Configured):
        verb.overrides = overrides
    elif overrides:
        raise AtollError(f"atoll {name} accepts no settings of a run: --{', --'.join(overrides)}")
    return verb


def _output_is_closed() -> bool:
    """Return whether the reader of standard output has closed it, as `| head` does."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def overview() -> str:
    """Return the help of `atoll` itself: the verbs by group, on one screen of 80 columns and 24 rows."""
    rows = [
        f"{group if name == next(iter(verbs)) else '':<7}{name:<9} {(verb.__doc__ or '').splitlines()[0]}"
        for group, verbs in GROUPS.items()
        for name, verb in verbs.items()
    ]
    return "\n".join(
        [
            "usage: atoll VERB [options]    Train and sample decentralized diffusion models.",
            "atoll VERB --help lists options; keys of atoll.yaml, too: --clusters.count 4.",
            "",
            *rows,
        ]
    )


def split_overrides(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Separate `--section.key VALUE` and `--section.key=VALUE` from the options of the verb."""
    rest: list[str] = []
    overrides: dict[str, str] = {}
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        # The dot distinguishes a key of atoll.yaml from an option: no option of a verb contains one.
        if not (name.startswith("--") and "." in name):
            rest.append(argument)
            continue
        following = value if equals else next(remaining, None)
        if following is None:
            raise AtollError(f"{name} needs a value: {name} VALUE")
        overrides[name.removeprefix("--")] = following
    return rest, overrides
