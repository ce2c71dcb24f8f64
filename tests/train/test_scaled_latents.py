"""Experts on latents that are normalized by the autoencoder's scale, as released networks need them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import atoll
from atoll import flow
from atoll.apps.models.convert import convert
from atoll.core import config
from atoll.core.errors import AtollError
from atoll.data.dataset import Shards
from atoll.data.prepare import prepare
from atoll.experts.expert import OpenExpert
from atoll.experts.run import expert_of_run
from atoll.nets import Condition
from atoll.train import build_task, resolve_job, train_job
from atoll.train.tasks import ExpertTask
from autoencoders import write_autoencoder
from models import dit_release
from shapes import COLORS, write_run
from train.workers import TINY

SCALE = 0.18215
WIDTH, HEADS, CLASSES = 48, 2, 3
HINTS = {"heads": HEADS, "num_classes": CLASSES}
FROZEN = {"train.lr": "1e-30", "train.total_images": "8", "train.warmup_images": "0"}
"""Training that changes no bit of the weights."""


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory, shapes: Path) -> Path:
    """A run of one cluster with classes, whose latents are multiplied by 0.18215. Tests must not change it."""
    folder = tmp_path_factory.mktemp("scaled")
    for kind in COLORS:
        (folder / "images" / kind).mkdir(parents=True)
        for file in shapes.glob(f"{kind}-*.png"):
            shutil.copy(file, folder / "images" / kind)
    autoencoder = write_autoencoder(folder / "vae", scaling_factor=SCALE)
    changes: dict[str, Any] = {
        **TINY,
        "data": {"resolution": 16, "val_fraction": 0.0},
        "clusters": {"count": 1},
        "text": {"encoder": "none"},
        "latents": {"autoencoder": str(autoencoder), "normalization": "scale"},
        "networks": {"default": {"name": "DiT-XS/2", "width": 32, "depth": 1, "heads": 2, "num_classes": CLASSES}},
    }
    prepare(folder / "run", write_run(folder / "run", folder / "images", **changes))
    return folder / "run"


@pytest.fixture
def release(tmp_path: Path) -> dict[str, Tensor]:
    """A checkpoint with the tensors of DiT and SiT, saved and converted as both."""
    state = dit_release.release_state(width=WIDTH, depth=2, patch=2, grid=4, classes=CLASSES, seed=0)
    for part in ("weight", "bias"):  # outputs of the size of noise, so that the bridge has no x0 to bound
        state[f"final_layer.linear.{part}"] *= 0.2
    for name in ("DiT", "SiT"):
        torch.save(state, tmp_path / f"{name}.pt")
        convert(tmp_path / f"{name}.pt", tmp_path / name, **HINTS)
    return state


def become_expert(run: Path, network: Path, objective: str, copy: Path) -> Path:
    """Copy the run, and make a converted network its expert."""
    shutil.copytree(run, copy)
    changes = {**FROZEN, "train.init_from": str(network), "experts.default": objective}
    made = train_job(resolve_job(copy, config.load(copy, changes), "expert", expert=0))
    assert made.content["network"]["normalization"] == {"scaling_factor": SCALE, "shift_factor": 0.0}
    kept = json.loads((copy / "experts/000/final/config.json").read_text())
    assert kept == made.content["network"]
    return copy


def noisy(run: Path, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Latents z as the autoencoder gives them, times 0.18215 and noised by hand; their noise, and their classes."""
    batch = Shards.open(run, [0]).read(np.arange(len(t)) * 30)
    eps = torch.randn(batch.mean.shape, generator=torch.Generator().manual_seed(1))
    wide = t[:, None, None, None]
    return (1 - wide) * SCALE * batch.mean.float() + wide * eps, eps, batch.label


def test_an_expert_from_a_converted_sit_has_its_velocity(
    scaled: Path, release: dict[str, Tensor], tmp_path: Path
) -> None:
    run = become_expert(scaled, tmp_path / "SiT", "flow-matching", tmp_path / "run")
    t = torch.tensor([0.02, 0.4, 0.97])
    x, _, label = noisy(run, t)
    with torch.no_grad():
        expected = -dit_release.release_forward(release, x, 1 - t, label, HEADS)[:, :4]
        got = atoll.load(run, "expert:0").ensemble.velocity(x, t, Condition(label=label))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_an_expert_from_a_converted_dit_has_its_velocity(
    scaled: Path, release: dict[str, Tensor], tmp_path: Path
) -> None:
    """By hand: the states of DDPM at three steps, epsilon from the released network, eps - x0 on the linear path."""
    run = become_expert(scaled, tmp_path / "DiT", "ddpm-linear", tmp_path / "run")
    steps = torch.tensor([20, 120, 270])  # with random weights x0 leaves the range of the data at more noise
    signal = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)[steps]
    alpha, sigma = signal.sqrt().float(), (1 - signal).sqrt().float()
    t = sigma / (alpha + sigma)
    x, _, label = noisy(run, t)
    wide_alpha, wide_sigma = alpha[:, None, None, None], sigma[:, None, None, None]
    state = x * (wide_alpha + wide_sigma)
    with torch.no_grad():
        eps = dit_release.release_forward(release, state, steps.float(), label, HEADS)[:, :4]
        got = atoll.load(run, "expert:0").ensemble.velocity(x, t, Condition(label=label))
    x0 = (state - wide_sigma * eps) / wide_alpha
    expected = eps - x0
    torch.testing.assert_close(got, expected, atol=5e-3, rtol=1e-3)
    assert expected.abs().mean() > 0.5


def test_a_converted_network_for_other_latents_is_an_error(
    scaled: Path, release: dict[str, Tensor], tmp_path: Path
) -> None:
    """Per channel, prepared or not, and with another factor; a network without declared normalization is accepted."""
    run, network = tmp_path / "run", tmp_path / "SiT"
    shutil.copytree(scaled, run)
    shutil.rmtree(run / "data/shards")
    per_channel = {"latents.normalization": "per-channel", "train.init_from": str(network)}
    words = r"SiT: this network was trained on latents normalized as z \* 0.18215.*set latents.normalization: scale"

    def described(run: Path, **changes: str) -> dict[str, Any]:
        return resolve_job(run, config.load(run, {**per_channel, **changes}), "expert", expert=0).network.to_dict()

    with pytest.raises(AtollError, match=words):  # not prepared
        described(run)
    assert described(run, **{"latents.normalization": "scale"})["normalization"]["scaling_factor"] == SCALE
    prepare(run, config.load(run, per_channel))
    with pytest.raises(AtollError, match=words):
        described(run)
    assert described(scaled, **{"latents.normalization": "scale"})["num_classes"] == CLASSES
    file = network / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "normalization": {"scaling_factor": 0.5, "shift_factor": 0.1}}))
    with pytest.raises(AtollError, match=r"normalized as \(z - 0.1\) \* 0.5, and this run normalizes them differently"):
        described(scaled, **{"latents.normalization": "scale"})
    values.pop("normalization")
    file.write_text(json.dumps(values))
    assert described(run)["normalization"] is None


def test_the_bridge_of_an_expert_has_mean_and_standard_deviation_of_its_data(tmp_path: Path, shapes: Path) -> None:
    """Pixels from -1 to 1 on white have a mean far from 0. Calibration, previews and the result shrink towards it."""
    run = tmp_path / "run"
    changes: dict[str, Any] = {
        **TINY,
        "clusters": {"count": 1},
        "latents": {"normalization": "scale"},
        "text": {"encoder": "none"},
        "experts": {"default": "ddpm"},
        "train": {**TINY["train"], "total_images": 32},
    }
    settings = write_run(run, shapes, **changes)
    prepare(run, settings)
    job = resolve_job(run, settings, "expert", expert=0)
    train_job(job)
    statistics = Shards.open(run, [0]).statistics
    mean, std = (torch.tensor(values)[:, None, None] for values in (statistics.data_mean, statistics.data_std))
    assert mean.min() > 0.3
    reference = expert_of_run(run, "experts/000")
    bridge = reference.declaration.bridge
    assert (bridge.data_mean, bridge.data_std) == (statistics.data_mean, statistics.data_std)
    assert bridge.prediction_error > 0.01
    task = build_task(job)
    assert isinstance(task, ExpertTask)
    assert task.calibrated(8).data_mean == statistics.data_mean
    # Hardly trained, it cannot estimate x0 at t = 0.999, so its x0 must be the mean of the data.
    x0 = statistics.normalize(Shards.open(run, [0], "validation").read(np.arange(8)).mean.float())
    noised = flow.Objective().corrupt(x0, seed=0, t=torch.full((8,), 0.999))
    errors = []
    for own in (bridge, replace(bridge, data_mean=0.0, data_std=1.0)):
        expert = OpenExpert(replace(reference.declaration, bridge=own), reference.open().eval(), torch.float32)
        with torch.no_grad():
            estimate = noised.input - 0.999 * expert.velocity(noised.input, noised.t)
        errors.append((estimate - mean).abs().max() / std.max())
    assert errors[0] < 0.1
    assert errors[1] > 0.5
