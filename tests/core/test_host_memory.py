"""Host memory of a process: the machine, limits of cgroups, and other processes of the same job."""

import os
from pathlib import Path

import pytest

from atoll.core.host_memory import PINNED_SHARE, host_memory, pinned_budget, pinned_size

MB = 1 << 20
MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
UNLIMITED_V1 = 9223372036854771712
SLURM_V2 = "system.slice/slurmstepd.scope/job_7"


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {}, MACHINE),
        ("0::/\n", {"memory.max": 300 * MB}, 300 * MB),
        ("0::/\n", {"memory.max": "max"}, MACHINE),
        ("0::/\n", {"memory.max": "max", "memory.high": 200 * MB}, 200 * MB),
        # A job of Slurm: the step has no limit of its own, the job has.
        (f"0::/{SLURM_V2}/step_0/user\n", {f"{SLURM_V2}/memory.max": 400 * MB, f"{SLURM_V2}/step_0/memory.max": "max"},
         400 * MB),
        (f"0::/{SLURM_V2}/step_0\n", {f"{SLURM_V2}/memory.max": 400 * MB, f"{SLURM_V2}/step_0/memory.max": 100 * MB},
         100 * MB),
        # Another job on the machine does not count.
        (f"0::/{SLURM_V2}\n", {"system.slice/slurmstepd.scope/job_8/memory.max": 100 * MB}, MACHINE),
        # A container that sees the name of its group on the host.
        ("0::/docker/0123abcd\n", {"memory.max": 500 * MB}, 500 * MB),
        # Version 1, in which each controller has its own hierarchy.
        ("5:cpu,cpuacct:/other\n4:memory:/slurm/uid_0/job_7/step_0\n0::/\n",
         {"memory/memory.limit_in_bytes": UNLIMITED_V1, "memory/slurm/uid_0/job_7/memory.limit_in_bytes": 250 * MB},
         250 * MB),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": UNLIMITED_V1}, MACHINE),
    ],
)  # fmt: skip
def test_the_smallest_limit_of_a_cgroup_counts(
    tmp_path: Path, membership: str, files: dict[str, object], expected: int
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(membership)
    for name, value in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
    assert host_memory(tmp_path) == expected


def test_a_machine_without_cgroups_gives_all_of_its_memory(tmp_path: Path) -> None:
    assert host_memory(tmp_path) == MACHINE


def test_processes_of_torchrun_share_the_memory_of_their_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = pinned_budget()
    assert 0 < alone <= PINNED_SHARE * MACHINE
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert host_memory(tmp_path) == MACHINE // 8
    assert pinned_budget() == pytest.approx(alone / 8, abs=1)


def test_pinned_tensors_take_a_power_of_two() -> None:
    assert [pinned_size(size) for size in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]
