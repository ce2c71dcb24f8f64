"""Hostile contributions: each is refused with a reason, and none of its files remains."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from safetensors.torch import load_file

import atoll
from atoll.apps.share.admission import DENSITY_FILE, Contribution, check_declaration, review
from atoll.apps.share.pull import pull
from atoll.apps.share.remote_run import RemoteRun
from atoll.apps.share.store import Store
from atoll.apps.share.transfer import fetch, read_manifest
from atoll.core.artifacts import Artifact, sha256_of
from atoll.core.manifests import EXPERT, SHARDS
from atoll.data.prepare import prepare
from atoll.nets.io import weights_digest
from atoll.train import resolve_job, train_job
from atoll.verify.trust import Policy
from atoll.verify.untrusted import Refused
from shapes import write_run
from share.offers import HOSTILE, NAME, WEIGHTS, Offer
from share.shared import network_by, person, publishers, remote, share
from train.workers import TINY

JOB = "experts/001"


def test_the_density_of_another_cluster_is_refused(
    opened: RemoteRun, offer: Offer, reference: Path, tmp_path: Path
) -> None:
    offer.files[DENSITY_FILE] = (reference / "data/shards/cluster_002" / DENSITY_FILE).read_bytes()
    with pytest.raises(Refused, match="not the density in the shards of cluster 1"):
        review(opened, JOB, offer.put(opened), quarantine=tmp_path / "quarantine")


def test_a_density_of_shards_without_one_is_refused(reference: Path) -> None:
    """A cluster of very few images has none, because it would reveal them."""
    shards = Artifact(reference, "data/shards/cluster_001").open(SHARDS)
    files = {file: entry for file, entry in shards.files.items() if file != DENSITY_FILE}
    few, manifest = replace(shards, files=files), Artifact(reference, NAME).open(EXPERT)
    offered = replace(manifest, made_from={**manifest.made_from, "data": [few.digest]})
    with pytest.raises(Refused, match="not the density in the shards of cluster 1"):
        check_declaration(Contribution(JOB, offered, (few,), Policy()))
    without = {file: entry for file, entry in offered.files.items() if file != DENSITY_FILE}
    check_declaration(Contribution(JOB, replace(offered, files=without), (few,), Policy()))


def test_a_valid_contribution_is_admitted(opened: RemoteRun, offer: Offer, tmp_path: Path) -> None:
    digest = offer.put(opened)
    network = review(opened, JOB, digest, quarantine=tmp_path / "quarantine")
    assert (network.manifest, network.publisher) == (digest, person("ann").public)
    assert network.weights == weights_digest(sorted(offer.tensors().items()))


@pytest.mark.parametrize("claim", [0.0, None, 1e9])
def test_the_admitter_records_its_own_figure_and_not_the_claim(
    claim: float | None, opened: RemoteRun, offer: Offer, reference: Path, tmp_path: Path
) -> None:
    offer.content["validation_loss"] = claim
    network = review(opened, JOB, offer.put(opened), quarantine=tmp_path / "quarantine")
    true = Artifact(reference, NAME).read(EXPERT).validation_loss
    assert network.error == pytest.approx(true, rel=0.2)


def test_the_validation_loss_of_an_expert_on_scaled_latents_is_measured_with_the_moments_of_its_data(
    shapes: Path, tmp_path: Path
) -> None:
    """Its bridge shrinks toward the mean of the data; without the mean, another loss would be measured."""
    run, one = tmp_path / "run", {"clusters": {"count": 1}, "text": {"encoder": "none"}}
    changes = {**TINY, **one, "latents": {"normalization": "scale"}, "experts": {"default": "ddpm"}}
    config = write_run(run, shapes, **changes)
    prepare(run, config)
    made = train_job(resolve_job(run, config, "expert", expert=0))
    store = Store.open(f"memory://{uuid4().hex}")
    share(run, store)
    assert made.content["statistics"]["data_mean"][0] > 0.3
    network = review(remote(store), "experts/000", made.digest, quarantine=tmp_path / "quarantine")
    assert network.error == pytest.approx(made.content["validation_loss"], rel=0.2)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_contribution_is_refused(name: str, opened: RemoteRun, offer: Offer, tmp_path: Path) -> None:
    corrupt, reason = HOSTILE[name]
    corrupt(offer)
    digest = offer.put(opened)
    with pytest.raises(Refused, match=reason):
        review(opened, JOB, digest, quarantine=tmp_path / "quarantine")
    assert not (tmp_path / "quarantine").exists()
    assert not Path("/tmp/atoll-was-here").exists()
    assert not list(tmp_path.glob("*escaped*"))


@pytest.mark.hostile
def test_a_run_with_a_refused_expert_samples_with_the_others(reference: Path, offer: Offer, tmp_path: Path) -> None:
    """Two valid experts are pulled, a hostile third one is refused, and the model samples with two."""
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    shutil.rmtree(run / "experts/001")
    store = Store.open(f"memory://{uuid4().hex}")
    share(run, store, publishers=publishers("ann"))
    HOSTILE["not a number"][0](offer)
    owner = remote(store, by="owner")
    # A careless admitter lists it without a review.
    owner.write_snapshot({JOB: network_by(remote(store, by="ann"), JOB, offer.put(owner))})
    verdicts = pull(remote(store, tmp_path / "model"), tmp_path / "model")
    assert verdicts["experts/000"] == verdicts["experts/002"] == "fetched"
    assert re.search("refused: .* values that are not finite", verdicts["experts/001"])
    assert not (tmp_path / "model/experts/001").exists()
    model = atoll.load(tmp_path / "model", routing="nearest")
    assert model.missing == ("experts/001",)
    assert len(model.sample(["a circle"], num_inference_steps=2, seed=0)) == 1


def test_a_local_symlink_is_not_followed_out_of_an_artifact(opened: RemoteRun, offer: Offer, tmp_path: Path) -> None:
    """A link at the target path of a download is replaced, not followed."""
    manifest = read_manifest(opened.store, NAME, offer.put(opened))
    assert manifest is not None
    target, outside = Artifact(tmp_path / "run", NAME), tmp_path / "outside.txt"
    outside.write_text("mine")
    target.folder.mkdir(parents=True)
    target.path(WEIGHTS).symlink_to(outside)
    fetch(opened.store, NAME, manifest, target=target)
    assert outside.read_text() == "mine"
    assert not target.path(WEIGHTS).is_symlink()
    assert sha256_of(target.path(WEIGHTS)) == manifest.files[WEIGHTS].sha256
    assert load_file(target.path(WEIGHTS))
