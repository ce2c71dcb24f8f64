"""The `atoll` command. The verbs of a room are in the file of its name; heavy imports stay inside the verb."""

import os
import select
import sys
from collections.abc import Sequence

import tyro

from atoll.cli import convert, core, data, ensemble, evaluate, islands, studio, train
from atoll.cli.verb import Configured, Verb
from atoll.core.errors import AtollError, unknown
from atoll.core.version import __version__

VERBS: dict[str, type[Verb]] = {
    "demo": core.Demo,
    "init": core.Init,
    "config": core.Config,
    "prepare": data.Prepare,
    "train": train.Train,
    "launch": islands.Launch,
    "push": islands.Push,
    "join": islands.Join,
    "admit": islands.Admit,
    "status": islands.Status,
    "pull": islands.Pull,
    "keys": islands.Keys,
    "sample": ensemble.Sample,
    "evaluate": evaluate.Evaluate,
    "report": evaluate.Report,
    "convert": convert.Convert,
    "export": ensemble.Export,
    "serve": studio.Serve,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; 0 is success, 2 is input that was refused, 1 that whoever read its output has gone."""
    try:
        try:
            return _main(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"atoll {__version__}")
        return 0
    try:
        name, *rest = arguments
        if name not in VERBS:
            raise AtollError(f"{unknown('verb', name, VERBS)}\nsee: atoll --help")
        rest, overrides = split_overrides(rest)
        verb = tyro.cli(VERBS[name], args=rest, prog=f"atoll {name}")
        if isinstance(verb, Configured):
            verb.overrides = overrides
        elif overrides:
            raise AtollError(f"atoll {name} takes no settings of a run: --{', --'.join(overrides)}")
        verb.run()
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        return 2
    return 0


def _reader_has_gone() -> bool:
    """Whether nobody reads standard output any more, as after `| head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def overview() -> str:
    """The help of `atoll` itself."""
    verbs = [f"  {name:<10} {(verb.__doc__ or '').splitlines()[0]}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "usage: atoll VERB [options]",
            "",
            "Decentralized diffusion models: isolated experts, one model.",
            "",
            "verbs, in the order of a run:",
            *verbs,
            "",
            "atoll VERB --help tells the options of one verb. Verbs that read a run's atoll.yaml let any key",
            "of it be overridden on the command line: --clusters.count 4 (keys: atoll config RUN).",
        ]
    )


def split_overrides(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Part `--section.key VALUE` and `--section.key=VALUE` from the verb's own options."""
    rest: list[str] = []
    overrides: dict[str, str] = {}
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if not (name.startswith("--") and "." in name):
            rest.append(argument)
            continue
        following = value if equals else next(remaining, None)
        if following is None:
            raise AtollError(f"{name} needs a value: {name} VALUE")
        overrides[name.removeprefix("--")] = following
    return rest, overrides
