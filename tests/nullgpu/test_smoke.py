"""The smoke test for one GPU: on the null GPU every stage runs but those that compile, whose failure it reports."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if "NULLGPU" not in os.environ:
    pytest.skip("THE GPU CODE IS NOT TESTED: it needs the null GPU; run make test-gpu", allow_module_level=True)

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "scripts/smoke_gpu.py"
IN_EVERY_PROCESS = """
import os
if os.environ["FAKE_CUDA_DEVICES"] != "0":
    import nullgpu  # turns cuDNN off
    import verbs
    verbs.assume_finite_results()
"""


def test_a_failed_stage_does_not_end_the_others(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(IN_EVERY_PROCESS)
    command = [sys.executable, str(SCRIPT), "--small", "--folder", str(tmp_path / "smoke")]
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "NULL_CUDA_READ_ZEROS": "1", "FAKE_CUDA_DEVICES": "0"}
    # The null GPU computes no latents.
    subprocess.run([*command, "prepare"], env=environment, check=True)
    stages = ["train", "resume", "compile", "launch", "sample", "sample_compiled", "export", "serve"]
    done = subprocess.run(
        [*command, *stages], env=environment | {"FAKE_CUDA_DEVICES": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    # Code generation for GPUs needs more of the driver than the null GPU has.
    results = dict(re.findall(r"^(\w+) +[\d.]+ s  (ok|FAILED)", done.stdout, re.MULTILINE))
    failed = {"compile", "sample_compiled"}
    assert results == {stage: "FAILED" if stage in failed else "ok" for stage in stages}, done.stdout
    assert "device: NVIDIA H100 (null), 80.0 GiB" in done.stdout
    assert "sample: peak memory" in done.stdout
