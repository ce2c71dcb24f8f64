"""The router: confident on clean images, the prior on pure noise, and a warning if it is at chance."""

import math
import shutil
from pathlib import Path

import pytest
import torch

from atoll.core import config
from atoll.core.artifacts import Artifact
from atoll.core.manifests import ROUTER
from atoll.data.prepare import prepare
from atoll.experts.validation import by_time
from atoll.nets import load_network
from atoll.train.tasks import best_temperature
from shapes import write_run
from train.conftest import Copy
from train.workers import TINY, finish, metrics

LONGER = {
    "total_images": 4096,
    "batch_size": 32,
    "lr": 2e-3,
    "warmup_images": 128,
    "log_every": 1024,
    "save_every": 4096,
}


def test_a_router_recognizes_clusters_and_returns_the_prior_for_noise(new_run: Copy) -> None:
    run = new_run(train=LONGER)
    assert finish(run, "--router") == 0, (run / "log.txt").read_text()
    declared = Artifact(run, "router/final").open(ROUTER).content
    assert declared["accuracy_by_time"][0] > 0.9
    assert declared["loss_by_time"][0] < 0.5 * declared["prior_entropy"]
    assert not declared["at_chance"]
    assert declared["prior_entropy"] == pytest.approx(math.log(3), abs=0.01)
    router = load_network(run / "router/final")
    noise = torch.randn(512, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        posterior = router.logits(noise, torch.full((512,), 1000.0)).softmax(1).mean(0)
    sizes = torch.tensor(declared["cluster_sizes"], dtype=torch.float32)
    torch.testing.assert_close(posterior, sizes / sizes.sum(), rtol=0, atol=0.1)
    assert router.temperature.item() == pytest.approx(declared["temperature"])
    assert "accuracy" in metrics(run, "router")[-1]
    assert len(metrics(run, "router")[-1]["accuracy_by_time"]) == 10


def test_on_a_random_partition_the_router_is_at_chance_with_a_warning(prepared: Path, tmp_path: Path) -> None:
    """The same images in random clusters: only the prior can be learned."""
    source = config.load(prepared).data.source
    run = tmp_path / "random"
    changes = {**TINY, "train": {**TINY["train"], **LONGER, "total_images": 1024}, "clusters": {"method": "random"}}
    settings = write_run(run, Path(source), **changes)
    for stage in ("ingest", "features", "latents", "text"):
        shutil.copytree(prepared / "data" / stage, run / "data" / stage)
    prepare(run, settings)
    assert finish(run, "--router") == 0, (run / "log.txt").read_text()
    declared = Artifact(run, "router/final").open(ROUTER).content
    assert declared["at_chance"]
    assert declared["validation_loss"] > 0.9 * declared["prior_entropy"]
    assert "the router is at chance" in (run / "log.txt").read_text()


def test_the_temperature_corrects_overconfidence() -> None:
    """Logits of a known posterior, times three: the best temperature is three."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50_000, 4, generator=generator)
    clusters = torch.multinomial(logits.softmax(1), 1, generator=generator).flatten()
    assert best_temperature(3 * logits, clusters) == pytest.approx(3.0, rel=0.03)


def test_means_by_time() -> None:
    t = torch.tensor([0.0, 0.05, 0.95, 1.0])
    means = by_time(torch.tensor([1.0, 3.0, 5.0, 7.0]), t)
    assert means == (2.0, *[None] * 8, 6.0)
