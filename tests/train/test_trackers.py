"""Trackers, each for real: TensorBoard, Trackio and Weights & Biases (offline) get metrics, samples and routing.

Trackio needs an older Pillow than Atoll is tested with, so both have an environment of their own, `.venv-track`, which
sees the packages of this one. Where they cannot be installed, the tests are skipped with the reason.
"""

import json
import os
import sqlite3
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from train.conftest import Copy
from train.workers import metrics

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-track"
PREVIEWS = {"total_images": 32, "log_every": 16, "sample_every": 16, "sample_count": 4, "sample_guidance_scale": 1}
WANDB_HISTORY = """
import json, sys
from wandb.proto import wandb_internal_pb2

data, at, record, lines = open(sys.argv[1], "rb").read(), 7, b"", []
assert data[:4] == b":W&B"
while at + 7 <= len(data):
    if 32768 - at % 32768 < 7:
        at += 32768 - at % 32768
        continue
    size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
    record += data[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in (1, 4):
        parsed = wandb_internal_pb2.Record.FromString(record)
        record = b""
        if parsed.WhichOneof("record_type") == "history":
            items = parsed.history.item
            lines.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
print(json.dumps(lines))
"""
"""Prints the history of an offline run: a log in the format of LevelDB, whose records only wandb can parse. A block has
32 KiB, and a part of a record 7 bytes (checksum, size, kind) before its content; kinds 1 and 4 end a record."""


@pytest.fixture(scope="session")
def python() -> str:
    """Return the interpreter of an environment with wandb and trackio."""
    python = ENVIRONMENT / "bin" / "python"
    if not (ENVIRONMENT / ".ready").exists():
        packages = ENVIRONMENT / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        commands = [
            [sys.executable, "-m", "venv", str(ENVIRONMENT)],
            [str(python), "-m", "pip", "install", "--quiet", "wandb>=0.20", "trackio>=0.20"],
        ]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"NOT TESTED: trackers cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
        # After its own packages, those of this environment; the paths of .pth files inside of it are not followed.
        shared = [path for path in sys.path if path and Path(path).name in ("site-packages", "src")]
        (packages / "zz_shared.pth").write_text("\n".join(shared) + "\n")
        (ENVIRONMENT / ".ready").touch()
    return str(python)


def train(python: str, run: Path, *arguments: str) -> None:
    environment = {
        **os.environ, "WANDB_MODE": "offline", "TRACKIO_DIR": str(run / "trackio"), "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [python, "-m", "atoll.cli", "train", str(run), *arguments]
    done = subprocess.run(command, env=environment, cwd=run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def pixels(file: Path) -> np.ndarray:
    return np.asarray(Image.open(file).convert("RGB"))


JOBS = {"experts/000": (("--expert", "0"), "samples"), "router": (("--router",), "routing")}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_trackio_gets_metrics_and_images(python: str, new_run: Copy, job: str) -> None:
    run, (arguments, name) = new_run(train={**PREVIEWS, "trackers": ["trackio"]}), JOBS[job]
    train(python, run, *arguments)
    rows = sqlite3.connect(run / "trackio" / "atoll.db").execute("SELECT step, metrics FROM metrics ORDER BY id")
    logged = [(step, json.loads(text)) for step, text in rows]
    losses = [(step, values["loss"]) for step, values in logged if "loss" in values]
    assert losses == [(line["images"], pytest.approx(line["loss"])) for line in metrics(run, job)]
    images = {step: values[name] for step, values in logged if name in values}
    assert sorted(images) == [16, 32]
    for step, image in images.items():
        stored = run / "trackio" / "media" / image["file_path"]
        assert np.array_equal(pixels(stored), pixels(run / job / f"grids/{step:012d}.png"))


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_wandb_gets_metrics_and_images_offline(python: str, new_run: Copy, job: str) -> None:
    run, (arguments, name) = new_run(train={**PREVIEWS, "trackers": ["wandb"]}), JOBS[job]
    train(python, run, *arguments)
    (folder,) = (run / job / "wandb").glob("offline-run-*")
    (file,) = folder.glob("run-*.wandb")
    read = subprocess.run([python, "-c", WANDB_HISTORY, str(file)], capture_output=True, text=True, check=True)
    history = json.loads(read.stdout)
    losses = [(line["_step"], line["loss"]) for line in history if "loss" in line]
    assert losses == [(line["images"], pytest.approx(line["loss"])) for line in metrics(run, job)]
    images = {line["_step"]: line for line in history if any(key.partition(".")[0] == name for key in line)}
    assert sorted(images) == [16, 32]
    stored = {int(path.stem.split("_")[1]): path for path in (folder / "files/media/images").glob(f"{name}_*.png")}
    assert sorted(stored) == [16, 32]
    for step, path in stored.items():
        assert np.array_equal(pixels(path), pixels(run / job / f"grids/{step:012d}.png"))
