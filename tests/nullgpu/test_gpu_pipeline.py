"""The pipeline spreads its components over devices as diffusers does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if "NULLGPU" not in os.environ:
    pytest.skip("THE GPU CODE IS NOT TESTED: it needs the null GPU; run make test-gpu", allow_module_level=True)

pytestmark = pytest.mark.slow
CODE = """
import json, sys
import nullgpu
from verbs import assume_finite_results
from atoll.apps.models.pipeline import AtollPipeline
from atoll.apps.models.export import export
from pathlib import Path

assume_finite_results()
folder = Path(sys.argv[2])
export(Path(sys.argv[1]), folder)
found = {}

def generate(name, pipe):
    devices = [str(expert.device) for expert in pipe.experts]
    with nullgpu.watch() as seen:
        images = pipe("a red circle", num_inference_steps=2, routing="top-2").images
    found[name] = {"devices": devices, "images": len(images), "launches": seen.counts["launch"]}

generate("balanced", AtollPipeline.from_pretrained(folder, device_map="balanced"))
generate("cuda", AtollPipeline.from_pretrained(folder, device_map="cuda"))
generate("moved", AtollPipeline.from_pretrained(folder).to("cuda:1"))
offloaded = AtollPipeline.from_pretrained(folder)
offloaded.enable_model_cpu_offload()
generate("offloaded", offloaded)
print(json.dumps(found))
"""


def test_components_go_where_diffusers_puts_them(trained_run: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "FAKE_CUDA_DEVICES": "4",
        "NULL_CUDA_READ_ZEROS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", CODE, str(trained_run), str(tmp_path / "exported")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(case["images"] == 1 and case["launches"] > 100 for case in found.values())
    assert len(set(found["balanced"]["devices"])) == 2
    assert set(found["cuda"]["devices"]) == {"cuda:0"}
    assert set(found["moved"]["devices"]) == {"cuda:1"}
    assert set(found["offloaded"]["devices"]) == {"cpu"}
