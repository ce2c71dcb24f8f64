"""Compare opening a signed copy of a shared run of eight experts with opening the same run without signatures.

Each opening is a process of its own, the two sides in turn. An opening is `atoll.load`, every network in memory, and
one pass over the weights, because unsigned files are memory-mapped and would not be read otherwise. The time of hashing
the weights is measured in the process of the signed side and subtracted. A second core hides the time of reading behind
that of hashing; the processor time of all threads shows both.
"""

import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import atoll
from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.nets.io import WEIGHTS_FILE
from atoll.verify.local_trust import save_root, save_snapshot
from atoll.verify.signing import Signer
from atoll.verify.trust import Network, Root, RootChain, Signed, Snapshot
from harness import Row, run

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from ensemble.runs import SMALL, write_run

EXPERTS = 8
NETWORK = {**SMALL, "width": 384, "depth": 12, "heads": 6}
"""The network of DiT-S/2: 130 MB in float32."""


def sign(folder: Path) -> None:
    """Write a root and a snapshot of all networks into a run."""
    signer = Signer(Ed25519PrivateKey.generate())
    zero, run_id, expires = "0" * 64, "0" * 32, date.today() + timedelta(days=1)
    owners = {"owner": signer.public}
    root = Root(
        run=run_id, version=1, previous=None, expires=expires, owners=owners, publishers={}, settings=zero, shards=()
    )
    save_root(folder, Signed(root, signer.sign(root.statement())))
    trust, networks = RootChain((root,)), {}
    for job in layout.jobs(folder):
        manifest = Artifact(folder, layout.final(job)).manifest()
        assert manifest is not None
        signature = signer.sign(trust.statement("publish", layout.final(job), manifest.digest))
        networks[job] = Network(manifest=manifest.digest, signature=signature)
    snapshot = Snapshot(run=trust.run, root=1, version=1, networks=networks)
    save_snapshot(folder, Signed(snapshot, signer.sign(snapshot.statement())))


def open_run(folder: Path, dtype: str) -> tuple[float, float]:
    """Return the seconds and the processor seconds of opening a run and reading all weights of its experts."""
    start, processor = time.perf_counter(), time.process_time()
    cache = atoll.load(folder, device="cpu", dtype=dtype).ensemble.cache
    for number in range(EXPERTS):
        for weights in cache.get(number).expert.network.parameters():
            weights.detach().sum()
    return time.perf_counter() - start, time.process_time() - processor


def open_here(folder: Path, dtype: str) -> tuple[float, float, float]:
    """Return the seconds and processor seconds of opening a run in this process, and those of hashing its weights."""
    open_run(folder.parent / "small", dtype)  # imports what the measured opening needs
    seconds, processor = open_run(folder, dtype)
    files = [folder / layout.final(layout.expert_job(number)) / WEIGHTS_FILE for number in range(EXPERTS)]
    hashing = 0.0
    for file in files:
        data = file.read_bytes()
        before = time.process_time()
        hashlib.sha256(data).digest()
        hashing += time.process_time() - before
    return seconds, processor, hashing


def measure(folder: Path, dtype: str) -> tuple[float, float, float]:
    """Open a run in a new process; seconds as above."""
    command = [sys.executable, __file__, "--open", str(folder), dtype]
    seconds, processor, hashing = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return seconds, processor, hashing


def rows(quick: bool) -> Iterator[Row]:
    """Measure float32, in which nothing is copied, and bfloat16, the precision of accelerators."""
    with tempfile.TemporaryDirectory() as scratch:
        small, plain, signed = (Path(scratch) / name for name in ("small", "plain", "signed"))
        write_run(small, ("flow-matching",) * EXPERTS, (SMALL,))
        sign(small)
        write_run(plain, ("flow-matching",) * EXPERTS, (SMALL if quick else NETWORK,))
        shutil.copytree(plain, signed)
        sign(signed)
        for dtype in ("float32", "bfloat16"):
            pairs = []
            for turn in range(2 if quick else 7):
                # The order alternates, so drift of the machine affects both sides equally.
                sides = [measure(side, dtype) for side in ((plain, signed) if turn % 2 else (signed, plain))]
                pairs.append(sides if turn % 2 else sides[::-1])
            hashing = statistics.median(pair[1][2] for pair in pairs)
            for kind, name in enumerate(("seconds", "processor seconds")):
                unsigned, opened = (statistics.median(pair[side][kind] for pair in pairs) for side in (0, 1))
                target = 1.1 if kind == 0 else None
                value = (opened - hashing) / unsigned
                yield Row(f"signed opening without hashing / unsigned, {name}, {dtype}", value, target, "lower")
                yield Row(f"unsigned opening, {name}, {dtype}", unsigned)
            yield Row(f"hashing, seconds, {dtype}", hashing)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--open"]:
        torch.set_num_threads(1)  # waiting threads would count as processor time
        print(json.dumps(open_here(Path(sys.argv[2]), sys.argv[3])))
    else:
        run("Trust", rows)
