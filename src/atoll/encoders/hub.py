"""Where networks are: names on the Hugging Face hub, local folders, and pip packages."""

from importlib.util import find_spec
from pathlib import Path

from atoll.core.errors import AtollError, listed
from atoll.core.names import HUB_NAME
from atoll.core.networks import BASE, LOCAL

BUILT_IN = frozenset({"efficientnet-lite0", "emoji", "pixels", "minilm", "none"})
"""Names in the settings of a run that stand for neither a folder nor a name on the hub."""


def is_hub_name(name: str | Path) -> bool:
    """Return whether a text is a name on the hub, `owner/name`. A local folder of that name is `./owner/name`."""
    # Otherwise a folder that somebody placed into the working directory would replace the network of that name.
    return isinstance(name, str) and HUB_NAME.fullmatch(name) is not None


def public_name(name: str) -> str:
    """Return the name of a network for other machines: `local` unless it is built in or a name on the hub.

    The answer does not depend on which folders exist. So a bare name, which can be a folder, is `local`, too.
    """
    if name.startswith(BASE):
        return BASE + public_name(name.removeprefix(BASE).partition("#")[0])
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


def check_here(name: str | Path, advice: str) -> None:
    """Raise `AtollError` if a name on the hub is probably meant as a path: its first part is a folder here.

    The names of somebody's folders are not sent to the hub.
    """
    folder = Path(name)
    if is_hub_name(name) and folder.parent.is_dir() and not folder.exists():
        others = listed(sorted(path.name for path in folder.parent.iterdir() if path.is_dir()))
        raise AtollError(f"{name}: no such folder; {folder.parent} has {others or 'no folders'}. {advice}")


def package_folder(module: str, missing: str) -> Path:
    """Return the folder of a pip package without importing it; raise `AtollError` with `missing` if there is none."""
    # Only its files are needed, not its dependencies.
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise AtollError(missing)
    return Path(spec.origin).parent
