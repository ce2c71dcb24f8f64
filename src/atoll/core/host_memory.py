"""Host memory: how much of it belongs to this process, and how much of that it may pin.

Pinned memory is what accelerators copy from and to without making the host wait. The system cannot swap it out, so a
process that pins too much takes it from everything else on the machine, or is killed by the limit of its cgroup.
"""

import os
from contextlib import suppress
from pathlib import Path

PINNED_SHARE = 0.5
"""Share of its host memory that a process may pin for one purpose: host copies of experts, or of a checkpoint. The rest
stays for everything else; a choice."""
LIMIT_FILES = ("memory.max", "memory.high", "memory.limit_in_bytes")
"""Limits of a cgroup, of versions 2 and 1. Above memory.high pages are reclaimed, which pinned ones cannot be."""


def pinned_budget() -> int:
    """Return the bytes that this process may pin for one purpose."""
    return int(PINNED_SHARE * host_memory())


def host_memory(root: Path = Path("/")) -> int:
    """Return the bytes of host memory for this process.

    It is the memory of the machine or, if that is less, the limit of a container or of a Slurm job; divided by the
    number of processes that torchrun started on the machine. `root` is where /proc and /sys are.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    lines = list[str]()
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    # The limits of the cgroups of this process, and of the groups above them.
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        # In a container the name may be the host's, while the files are the root's: others are missing.
        group = Path(name.lstrip("/"))
        for file in (folder / above / file for above in (group, *group.parents) for file in LIMIT_FILES):
            with suppress(OSError, ValueError):  # "max" is no limit
                limits.append(int(file.read_text(encoding="utf-8")))
    return min(limits) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def pinned_size(size: int) -> int:
    """Return the bytes that torch takes to pin a tensor of `size` bytes: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0
