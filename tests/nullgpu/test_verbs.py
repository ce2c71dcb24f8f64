"""Every verb runs on one device and on eight: no tensor is on the wrong device."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if "NULLGPU" not in os.environ:
    pytest.skip("THE GPU CODE IS NOT TESTED: it needs the null GPU; run make test-gpu", allow_module_level=True)

pytestmark = pytest.mark.slow
WITHOUT_DEVICE = ("prepare ingest", "export")


@pytest.mark.parametrize("devices", [1, 8])
def test_verbs_run_on_the_devices(trained_run: Path, tmp_path: Path, devices: int) -> None:
    for name in ("run", "trained"):
        shutil.copytree(trained_run.parent / name, tmp_path / name)
    environment = {
        **os.environ,
        "FAKE_CUDA_DEVICES": str(devices),
        "NULL_CUDA_READ_ZEROS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, str(Path(__file__).parent / "verbs.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert "a latent channel is constant" in done.stderr, "all latents that the null GPU returned are zero"
    for verb, outcome in result["verbs"].items():
        assert outcome["code"] == (2 if verb == "prepare latents" else 0), (verb, done.stderr[-3000:])
        assert (outcome["launches"] > 0) == (verb not in WITHOUT_DEVICE), verb
    assert result["devices"] == min(devices, 2), "two experts use two devices"


PLACED = """
import json, sys
from dataclasses import replace
import torch
import nullgpu
import atoll
from atoll.ensemble import Ensemble
from atoll.experts.expert_cache import weight_bytes

sampler = atoll.load(sys.argv[1])
references = [
    replace(reference, declaration=replace(reference.declaration, clusters=(number,)))
    for number, reference in enumerate(list(sampler.ensemble.references) * 8)
]
many = Ensemble(references, device_options=sampler.ensemble.device_options)
x = torch.zeros(16, *many.shape, device=many.device)
with torch.no_grad():
    for cluster in range(16):  # on the null GPU only oracle routing is sure to use an expert
        many.velocity(x, 0.5, routing="oracle", cluster=torch.full((16,), cluster))
held = {}
for loaded in many.cache._loaded.values():
    assert {str(part.device) for part in loaded.expert.network.parameters()} == {str(loaded.device)}
    held[str(loaded.device)] = held.get(str(loaded.device), 0) + weight_bytes(loaded.expert.network)
print(json.dumps(held))
"""


def test_experts_are_spread_evenly_over_eight_devices(trained_run: Path) -> None:
    environment = {**os.environ, "FAKE_CUDA_DEVICES": "8", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PLACED, str(trained_run)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    held = json.loads(done.stdout.splitlines()[-1])
    assert len(held) == 8
    assert max(held.values()) <= 1.3 * sum(held.values()) / 8
