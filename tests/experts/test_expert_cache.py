"""The expert cache and the memory plan."""

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import atoll
from atoll.cli import main
from atoll.core.errors import AtollError
from atoll.core.networks import read_network
from atoll.ensemble.memory_plan import activation_bytes
from atoll.experts.expert_cache import ExpertCache, LoadedExpert
from atoll.nets import build
from ensemble.runs import SMALL, write_run

PROMPTS = ["a red circle", "a green square", "nothing at all"]


@pytest.mark.parametrize("routing", ["top-2", "full"])
def test_images_do_not_depend_on_the_number_of_loaded_experts(run: Path, routing: str) -> None:
    """Experts run in a different order, on batches of equal shapes."""
    how = {"routing": routing, "num_inference_steps": 4, "num_images": 7, "guidance_scale": 3.0}
    everything = atoll.load(run).generate(PROMPTS, **how)
    for limit in (1, 2):
        few = atoll.load(run, max_loaded_experts=limit)
        latents = few.generate(PROMPTS, **how).latents
        if routing == "top-2":
            assert torch.equal(latents, everything.latents)
        else:  # accelerators add three terms in no fixed order
            torch.testing.assert_close(latents, everything.latents, atol=1e-4, rtol=1e-4)
        assert len(few.ensemble.cache._loaded) <= limit
        assert few.ensemble.cache.loads > 3


def test_an_expert_is_freed_before_the_next_one_is_loaded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, where loading copies: a limit of one expert must not need the memory of two."""
    networks, most, load = list["weakref.ref[torch.nn.Module]"](), [0], ExpertCache._load

    def counted(self: ExpertCache, number: int) -> LoadedExpert:
        most[0] = max(most[0], sum(network() is not None for network in networks))
        opened = load(self, number)
        networks.append(weakref.ref(opened.expert.network))
        return opened

    monkeypatch.setattr(ExpertCache, "_load", counted)
    atoll.load(run, max_loaded_experts=1, dtype="bfloat16").generate(
        PROMPTS, num_images=4, num_inference_steps=2, routing="full"
    )
    assert len(networks) > 3
    assert most[0] <= 1


def test_the_least_recently_used_expert_is_dropped_and_loaded_ones_run_first(run: Path) -> None:
    cache = atoll.load(run, max_loaded_experts=2).ensemble.cache
    for number in (0, 1, 0, 2):
        cache.get(number)
    assert list(cache._loaded) == [0, 2]
    assert cache.loads == 3
    assert cache.order([0, 1, 2]) == [0, 2, 1]
    cache.get(0)
    assert cache.loads == 3


def test_experts_on_the_device_of_the_states_run_last(run: Path) -> None:
    """The other devices then compute meanwhile; on each device, experts in memory still run first."""
    cache, home = atoll.load(run).ensemble.cache, torch.device("cuda", 0)
    cache.get(2)
    cache.devices = (home, torch.device("cuda", 1), home)
    assert cache.order([0, 1, 2], last=home) == [1, 2, 0]
    assert cache.order([0, 1, 2]) == [2, 0, 1]


def test_experts_are_read_only_when_they_are_needed(run: Path) -> None:
    ensemble = atoll.load(run)
    assert ensemble.ensemble.cache.loads == 0
    ensemble.ensemble.velocity(torch.zeros(2, 3, 8, 8), 0.5, routing="oracle", cluster=torch.tensor([1, 1]))
    assert ensemble.ensemble.cache.loads == 1


def test_a_limit_below_one_expert_is_an_error(run: Path) -> None:
    with pytest.raises(AtollError, match="max_loaded_experts is -1"):
        atoll.load(run, max_loaded_experts=-1)


TRANSFORMER = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_size": 8, "patch_size": 2}
UNET = {
    "sample_size": 8, "block_out_channels": (32, 64), "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (SMALL, 5 * 16 * 32 * 11 * 4),
        ({**SMALL, "mlp_ratio": 1.0}, 5 * 16 * 32 * 7 * 4),
        ({"_class_name": "DiTExpert", "in_channels": 3, "num_embeds_ada_norm": 3, **TRANSFORMER}, 5 * 16 * 16 * 13 * 4),
        ({"_class_name": "UNetExpert", "in_channels": 3, "out_channels": 3, **UNET}, 5 * 64 * 32 * 13 * 4),
    ],
)
def test_activations_are_counted_in_tensors_of_the_residual_stream(network: dict[str, Any], expected: int) -> None:
    """Five rows of 3 x 8 x 8 in float32."""
    assert activation_bytes(build(read_network(network)), (3, 8, 8), rows=5, itemsize=4) == expected


MEASURE = """
import gc, json, sys
import torch, atoll
from atoll.ensemble import memory_plan
from atoll.experts.batch_conditions import BatchConditions
from atoll.nets import Condition, DiT, DiTConfig
torch.set_num_threads(1)
run, limit, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def memory(field):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))

ensemble = atoll.load(run, max_loaded_experts=limit, dtype=dtype)
plan = memory_plan.plan_memory(ensemble, 64, 64, guided=False).to_dict()
text = torch.randn(64, 12, 384)
with torch.no_grad():  # libraries are loaded with the first network
    DiT(DiTConfig(width=32, depth=1, heads=2, size=8)).eval()(torch.zeros(64, 4, 8, 8), torch.zeros(1))
gc.collect()
before = memory("VmRSS:")
open("/proc/self/clear_refs", "w").write("5")  # resets the peak
conditions = BatchConditions.of(Condition(text, torch.ones(64, 12, dtype=torch.bool)), torch.arange(64), reused=True)
for step in range(4):
    with torch.no_grad():
        ensemble.ensemble.velocity(torch.randn(64, *ensemble.ensemble.shape), 1 - step / 4, conditions, routing="full")
print(json.dumps({"measured": memory("VmHWM:") - before, "plan": plan}))
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three experts of 60 MB."""
    network = {**SMALL, "width": 512, "depth": 4, "heads": 8}
    return write_run(tmp_path_factory.mktemp("big") / "run", ("flow-matching",) * 3, (network,))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measured through /proc")
@pytest.mark.parametrize(
    ("limit", "dtype"),
    [
        (1, "float32"),
        pytest.param(3, "float32", marks=pytest.mark.slow),
        pytest.param(2, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_memory_plan_agrees_with_the_measured_peak(big: Path, limit: int, dtype: str) -> None:
    """The peak memory of a process, minus what it had before the first expert."""
    command = [sys.executable, "-c", MEASURE, str(big), str(limit), dtype]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout.splitlines()[-1])
    parts = printed["plan"]["parts"]
    before = sum(parts[name] for name in ("router", "text encoder"))  # loaded before the measurement
    assert printed["plan"]["max_loaded_experts"] == limit
    assert printed["measured"] == pytest.approx(printed["plan"]["total"] - before, rel=0.25), printed


def test_a_run_conditioned_on_classes_has_a_memory_plan(
    conditioned_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", str(conditioned_run), "--labels", "circle", "--plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"]["one evaluation of an expert"] > 0
