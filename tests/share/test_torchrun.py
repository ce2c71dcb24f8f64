"""`atoll join` under torchrun: two processes over gloo train an expert, and only the main one uses the store."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atoll.apps.share.admit import admit
from atoll.apps.share.pull import pull
from atoll.apps.share.store import Store
from atoll.core import config
from atoll.train import resolve_job, train_job
from share.servers import access
from share.shared import key_file, publishers, remote, share
from train.conftest import Copy
from train.workers import weights
from waiting import HOUR

JOB = "experts/001"
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 -m atoll.cli"


@pytest.mark.parametrize(("where", "parallel"), [("file", "ddp"), pytest.param("s3", "fsdp2", marks=pytest.mark.slow)])
def test_an_expert_of_a_shared_run_on_two_processes(
    where: str, parallel: str, request: pytest.FixtureRequest, new_run: Copy, tmp_path: Path
) -> None:
    """Its weights are those of one process up to rounding, and it is admitted."""
    url = str(tmp_path / "store") if where == "file" else request.getfixturevalue("bucket")
    store = Store.open(url)
    # With larger steps, the rounding of two processes grows faster.
    run = new_run(train={"lr": 3e-3, "total_images": 1280})
    fingerprint = share(run, store, publishers=publishers("ann"))
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ATOLL_KEY": str(key_file("ann", tmp_path))}
    options = ["--expert", "1", "--folder", str(tmp_path / "ann"), "--publish-every", "0", "--train.parallel", parallel]
    join = [sys.executable, *TORCHRUN.split(), "join", f"{url}#sha256={fingerprint}", *options]
    environment = {**os.environ, **access(), **settings}
    done = subprocess.run(join, env=environment, capture_output=True, text=True, timeout=HOUR, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"waiting for admission: {JOB}" in done.stdout
    assert done.stdout.count("lease acquired") == 1
    records = b"".join(store.read(entry.key) or b"" for entry in store.entries("leases"))
    assert b"parallel" not in records, "others may continue with any number of processes"
    assert admit(remote(store, by="owner"), tmp_path / "owner") == {JOB: "admitted"}
    assert pull(remote(store, tmp_path / "model"), tmp_path / "model")[JOB] == "fetched"
    train_job(resolve_job(run, config.load(run), "expert", expert=1))
    one, two = weights(run / JOB / "final"), weights(tmp_path / "model" / JOB / "final")
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-3, rtol=1e-3)
