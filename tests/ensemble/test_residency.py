"""Experts in and out of memory, and what that takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import atoll
from atoll.ensemble.plan import peak_bytes
from atoll.errors import AtollError
from ensemble.runs import SMALL, write_run

PROMPTS = ["a red circle", "a green square", "nothing at all"]


def test_pictures_do_not_depend_on_how_many_experts_are_in_memory(run: Path) -> None:
    """Bit for bit."""
    how = {"routing": "top-2", "steps": 4, "n": 7, "guidance": 3.0}
    everything = atoll.load(run).generate(PROMPTS, **how)
    for resident in (1, 2):
        few = atoll.load(run, resident=resident)
        assert torch.equal(few.generate(PROMPTS, **how).latents, everything.latents)
        assert len(few.residents._here) <= resident
        assert few.residents.loads > 3


def test_the_least_recently_used_expert_leaves_and_those_in_memory_go_first(run: Path) -> None:
    residents = atoll.load(run, resident=2).residents
    for number in (0, 1, 0, 2):
        residents.get(number)
    assert list(residents._here) == [0, 2]
    assert residents.loads == 3
    assert residents.order([0, 1, 2]) == [0, 2, 1]
    residents.get(0)
    assert residents.loads == 3


def test_nothing_is_read_before_it_is_needed(run: Path) -> None:
    ensemble = atoll.load(run)
    assert ensemble.residents.loads == 0
    ensemble.velocity(torch.zeros(2, 3, 8, 8), 0.5, routing="oracle", cluster=torch.tensor([1, 1]))
    assert ensemble.residents.loads == 1


def test_at_least_one_expert_must_fit(run: Path) -> None:
    with pytest.raises(AtollError, match="resident is -1"):
        atoll.load(run, resident=-1)


def test_the_meter_counts_what_is_alive_at_once() -> None:
    def work() -> torch.Tensor:
        a = torch.zeros(1000)  # 4000 bytes
        b = a + 1  # 8000 alive
        del a
        return b * 2  # 8000 alive

    assert peak_bytes(work) == 8000


MEASURE = """
import json, resource, sys
import torch, atoll
from atoll.ensemble.sampling import Settings
torch.set_num_threads(1)
run, resident, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
ensemble = atoll.load(run, resident=resident, dtype=dtype)
ensemble.models.codec, ensemble.plan(1)                              # imports happen now
def peak(): return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small = torch.zeros(1, *ensemble.shape)
(torch.nn.Linear(64, 64)(torch.zeros(64, 64)), torch.randn(64, 64) @ torch.randn(64, 64))
before = peak()
router = sum(tensor.numel() * 4 for tensor in ensemble.router.network.parameters())
for step in range(4):
    x = torch.randn(16, *ensemble.shape)
    with torch.no_grad():
        ensemble.velocity(x, 1 - step / 4, routing="full", guidance=1.0)
print(json.dumps({"measured": peak() - before, "plan": ensemble.plan(16, 1, guided=False).to_dict()}))
"""


@pytest.mark.parametrize(("resident", "dtype"), [(1, "float32"), (3, "float32"), (2, "bfloat16")])
def test_the_plan_is_what_the_process_takes(tmp_path: Path, resident: int, dtype: str) -> None:
    """Peak resident memory of a process of its own, beyond what it had before the first expert."""
    big = {**SMALL, "width": 512, "depth": 6, "heads": 8}
    run = write_run(tmp_path / "run", ("flow-matching",) * 4, (big,), told=())
    command = [sys.executable, "-c", MEASURE, str(run), str(resident), dtype]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    assert answer["plan"]["resident"] == resident
    assert answer["measured"] == pytest.approx(answer["plan"]["total"], rel=0.15), answer
