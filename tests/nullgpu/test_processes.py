"""Budgets of a training step of several processes, each with its own null GPU, over gloo."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

if "NULLGPU" not in os.environ:
    pytest.skip("THE GPU CODE IS NOT TESTED: it needs the null GPU; run make test-gpu", allow_module_level=True)

pytestmark = pytest.mark.slow
RANKS = 2
CODE = """
import json, sys
from pathlib import Path
import pytest
import nullgpu
from test_training import train_steps
from atoll.core import distributed

# NCCL needs a real GPU. Its own waits would not be Atoll's; gloo's are counted apart, as they have no line of Atoll.
distributed.group_options = lambda device: {"backend": "gloo", "timeout": distributed.STEP_TIMEOUT}
steps = train_steps(Path(sys.argv[1]), "expert", train__parallel=sys.argv[2], train__optimizer=sys.argv[3])
print(json.dumps([[step.synchronizations, step.pageable_copies] for step in steps]))
"""


@pytest.mark.parametrize(("parallel", "optimizer"), [("ddp", "adamw"), ("fsdp2", "adamw"), ("ddp", "muon")])
def test_a_step_of_two_processes_waits_once(own_run: Path, parallel: str, optimizer: str) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    processes = []
    for rank in range(RANKS):
        environment = {
            **os.environ,
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }  # fmt: skip
        command = [sys.executable, "-c", CODE, str(own_run), parallel, optimizer]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=3600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * RANKS
    steps = json.loads(outputs[0].splitlines()[-1])  # the main process counts its steps
    assert steps
    for synchronizations, pageable in steps:
        assert sum(synchronizations.values()) <= 1, synchronizations
        assert pageable == {}
