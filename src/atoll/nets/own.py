"""Networks of one's own: a class outside Atoll that implements `Expert`, named in the configuration of a local run.

    networks:
      default: {class: my_networks:ConvExpert, width: 64}

A class is code. A manifest, an export or the settings of a shared run can name one too, and reading them must not run
code of strangers. So `build` imports only what `allow` was given: the classes in atoll.yaml of a run of this machine.
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from atoll.core.config import Config
from atoll.core.errors import AtollError, first_line
from atoll.core.networks import CLASS, OwnConfig
from atoll.verify.local_trust import local_trust

_allowed: set[str] = set()


def allow(run: Path, config: Config) -> None:
    """Let `build` import the classes that the configuration of a local run names; refuse those of a shared run."""
    choices = [*config.networks.values(), config.student.network]
    named = {choice[CLASS] for choice in choices if isinstance(choice, dict) and CLASS in choice}
    if named and local_trust(run) is not None:
        raise AtollError(
            f"{run} is a shared run, and {', '.join(sorted(named))} is code outside Atoll; a shared run has networks "
            "of Atoll and diffusers only, so that nobody runs code of strangers"
        )
    _allowed.update(named)


def open_own(config: OwnConfig) -> nn.Module:
    """Import the class and build the network; its attribute `config` is set to the specification."""
    if config.path not in _allowed:
        raise AtollError(
            f"the network is {config.path}, code outside Atoll. It is not imported: only a run of this machine whose "
            "atoll.yaml names this class opens it, never a shared run, an export or a copy of them"
        )
    module, _, name = config.path.partition(":")
    here = os.getcwd()
    if here not in sys.path:  # as with `python -m`; last, so that no other module is hidden
        sys.path.append(here)
    try:
        kind: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise AtollError(f"networks: {config.path} cannot be imported: {first_line(error)}") from error
    # Before it is called: with fields of strangers, subprocess:Popen would be a program.
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise AtollError(f"networks: {config.path} is no torch.nn.Module")
    try:
        network = kind(**config.fields)
    except TypeError as error:
        raise AtollError(f"networks: {config.path} does not take its fields: {first_line(error)}") from error
    network.config = config  # type: ignore[assignment]  # an attribute, not a tensor
    return network
