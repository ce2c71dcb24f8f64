"""Names on the Hugging Face hub, and how they differ from local folders."""

import re
import sys
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+")
BUILT_IN = frozenset({"efficientnet-lite0", "emoji", "pixels", "minilm", "none"})
"""Names in the settings of a run that stand for neither a folder nor a name on the hub."""
LOCAL = "local"
"""Stands for a local folder in whatever may leave this machine; its fingerprint identifies the network."""


def is_hub_name(name: str | Path) -> bool:
    """Return whether a text is a name on the hub, `owner/name`. A local folder of that name is `./owner/name`."""
    # Otherwise a folder that somebody placed into the working directory would replace the network of that name.
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def public_name(name: str) -> str:
    """Return the name of a network for other machines: `local` unless it is built in or a name on the hub.

    The answer does not depend on which folders exist. So a bare name, which can be a folder, is `local`, too.
    """
    return name if name in BUILT_IN or is_hub_name(name) else LOCAL


def local_folder(name: str | Path) -> Path | None:
    """Return the local folder of this name; None if there is none, or if it is a name on the hub."""
    folder = Path(name).expanduser()
    return folder if folder.is_dir() and not is_hub_name(name) else None


def hint(name: str) -> str:
    """Return how to write the name of a local folder, if one has the same name as a network on the hub."""
    if not (is_hub_name(name) and Path(name).is_dir()):
        return ""
    return f"{name} is a name on the hub; for the folder of that name here, write ./{name}"


def print_hint(name: str) -> None:
    """Print how to write the name of a local folder, if there is one."""
    if text := hint(name):
        print(f"note: {text}", file=sys.stderr, flush=True)
