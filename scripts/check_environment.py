"""Fail if torchvision is installed, or required by a dependency of Atoll.

No build of torchvision matches the CPU build of torch that Atoll is tested on. Unpinned, it replaces torch and installs
gigabytes of other packages.
"""

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement

FORBIDDEN = "torchvision"


def required_by(name: str, extras: frozenset[str] = frozenset()) -> dict[str, list[str]]:
    """Return all direct and indirect dependencies of `name`, each with the chain that leads to it."""
    chains: dict[str, list[str]] = {}
    queue: list[tuple[str, frozenset[str], list[str]]] = [(name, extras, [name])]
    while queue:
        current, current_extras, chain = queue.pop()
        try:
            requirements = distribution(current).requires or []
        except PackageNotFoundError:
            continue
        for requirement in map(Requirement, requirements):
            environments = [{"extra": extra} for extra in (current_extras or {""})]
            wanted = requirement.marker is None or any(requirement.marker.evaluate(env) for env in environments)
            if wanted and requirement.name.lower() not in chains:
                chains[requirement.name.lower()] = [*chain, requirement.name]
                queue.append((requirement.name, frozenset(requirement.extras), [*chain, requirement.name]))
    return chains


def problems() -> list[str]:
    """Return one sentence for each problem of this environment."""
    found = []
    if importlib.util.find_spec(FORBIDDEN) is not None:
        found.append(f"{FORBIDDEN} is installed: remove it (pip uninstall {FORBIDDEN})")
    all_extras = frozenset(distribution("atoll").metadata.get_all("Provides-Extra") or [])
    if chain := required_by("atoll", all_extras).get(FORBIDDEN):
        found.append(f"{FORBIDDEN} is required: {' -> '.join(chain)}")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(problems()) or None)
