"""Hostile contributions: each is refused with a reason, and none of its files remains."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from safetensors.torch import load_file, save_file

import atoll
from atoll.core.artifacts import Artifact, sha256_of, to_json
from atoll.core.manifests import EXPERT, SHARDS
from atoll.core.policy import Policy
from atoll.core.signing import Signer
from atoll.core.untrusted import Refused
from atoll.data.prepare import prepare
from atoll.islands.admission import DENSITY_FILE, Contribution, _check_density, review
from atoll.islands.remote_run import pull, push
from atoll.islands.safetensors_headers import safetensors_header
from atoll.islands.store import Store
from atoll.islands.transfer import fetch, read_manifest
from atoll.train import resolve_job, train_job
from islands.hostile_files import FILES, NAME, WEIGHTS, Offer, not_a_number
from islands.hostile_manifests import CLAIMS
from shapes import write_run
from train.workers import TINY

HOSTILE = FILES | CLAIMS


@pytest.fixture(scope="session")
def ann(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return Signer.open(tmp_path_factory.mktemp("keys") / "ann.pem")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return Signer.open(tmp_path_factory.mktemp("keys") / "stranger.pem")


@pytest.fixture
def shared(reference: Path, tmp_path: Path) -> Store:
    """A store with the shards of a run and no expert."""
    run = tmp_path / "run"
    shutil.copytree(reference / "data", run / "data")
    shutil.copy(reference / "atoll.yaml", run / "atoll.yaml")
    store = Store.open(f"memory://{uuid4().hex}")
    push(run, store)
    return store


@pytest.fixture
def offer(reference: Path, ann: Signer) -> Offer:
    """A valid contribution."""
    artifact = Artifact(reference, NAME)
    manifest = artifact.open(EXPERT)
    files = {name: artifact.path(name).read_bytes() for name in manifest.files}
    plain = json.loads(manifest.to_json())
    return Offer(files, "expert", plain["made_from"], plain["content"], signer=ann)


assert len(HOSTILE) >= 25


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([3.0, 4.0], None),
        ([1e6, 1.0], "images with a class; there are"),
        ([-1.0, 2.0], "classes is not positive"),
        ([1.0, 1.0, 1.0], "does not hold a density"),
        (None, "does not hold a density"),
    ],
)
def test_the_classes_of_a_density_must_match_the_data(
    reference: Path, tmp_path: Path, classes: list[float] | None, message: str | None
) -> None:
    shards = Artifact(reference, f"data/shards/cluster_{NAME.split('/')[1]}").open(SHARDS)
    labelled = replace(shards, content={**shards.content, "labels": ["circle", "square"]})
    contribution = Contribution(0, Artifact(reference, NAME).open(EXPERT), labelled, Policy())
    tensors, file = load_file(reference / NAME / DENSITY_FILE), tmp_path / DENSITY_FILE
    save_file(tensors | ({} if classes is None else {"classes": torch.tensor(classes)}), file)
    with pytest.raises(Refused, match=message) if message else nullcontext():
        _check_density(contribution, safetensors_header(file), file)


@pytest.fixture
def policy(ann: Signer) -> Policy:
    return Policy(
        publishers={"ann": ann.public},
        objectives=["flow-matching", "ddpm"],
        max_parameters=10_000_000,
        max_bytes=1 << 30,
        max_held_out_loss=50.0,
    )


def test_a_valid_contribution_is_admitted(shared: Store, offer: Offer, policy: Policy, tmp_path: Path) -> None:
    digest = offer.put(shared)
    artifact = review(shared, 1, digest, policy=policy, quarantine=tmp_path / "quarantine")
    assert artifact.open(EXPERT, verify=True).digest == digest


def test_the_held_out_loss_of_an_expert_on_scaled_latents_is_measured_with_the_moments_of_its_data(
    shapes: Path, tmp_path: Path
) -> None:
    """Its bridge shrinks toward the mean of the data; without the mean, another loss would be measured."""
    run, one = tmp_path / "run", {"clusters": {"count": 1}, "text": {"encoder": "none"}}
    changes = {**TINY, **one, "latents": {"normalization": "scale"}, "experts": {"default": "ddpm"}}
    config = write_run(run, shapes, **changes)
    prepare(run, config)
    train_job(resolve_job(run, config, "expert", expert=0))
    store = Store.open(f"memory://{uuid4().hex}")
    push(run, store)
    artifact = review(store, 0, None, policy=Policy(), quarantine=tmp_path / "quarantine")
    assert artifact.open(EXPERT).content["statistics"]["data_mean"][0] > 0.3


@pytest.mark.parametrize("corrupt", HOSTILE, ids=lambda corrupt: corrupt.__name__)
def test_a_hostile_contribution_is_refused(
    corrupt: Callable[[Offer], None], shared: Store, offer: Offer, policy: Policy, tmp_path: Path
) -> None:
    corrupt(offer)
    digest = offer.put(shared)
    with pytest.raises(Refused, match=HOSTILE[corrupt]):
        review(shared, 1, digest, policy=policy, quarantine=tmp_path / "quarantine")
    assert not (tmp_path / "quarantine").exists()
    assert not Path("/tmp/atoll-was-here").exists()
    assert not list(tmp_path.glob("*escaped*"))


def test_a_signature_with_an_unlisted_key_is_refused(
    shared: Store, offer: Offer, policy: Policy, stranger: Signer, tmp_path: Path
) -> None:
    offer.signer = stranger
    with pytest.raises(Refused, match="signed by a key that the policy does not list"):
        review(shared, 1, offer.put(shared), policy=policy, quarantine=tmp_path / "quarantine")


def test_a_run_with_a_refused_expert_samples_with_the_others(
    reference: Path, offer: Offer, policy: Policy, ann: Signer, tmp_path: Path
) -> None:
    """Two valid experts are pulled, a hostile third one is refused, and the model samples with two."""
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    shutil.rmtree(run / "experts/001")
    (run / "policy.json").write_bytes(to_json(policy.model_dump(mode="json")))
    store = Store.open(f"memory://{uuid4().hex}")
    push(run, store, ann)
    not_a_number(offer)
    offer.put(store)
    verdicts = pull(store, tmp_path / "model")
    assert verdicts["experts/000"] == verdicts["experts/002"] == "fetched"
    assert verdicts["experts/001"].startswith("refused: ")
    notice = json.loads((tmp_path / "model/quarantine/experts-001.json").read_text())
    assert "values that are not finite" in notice["reason"]
    assert not (tmp_path / "model/experts/001").exists()
    model = atoll.load(tmp_path / "model", routing="nearest")
    assert model.missing == ("experts/001",)
    assert len(model.sample(["a circle"], steps=2, seed=0)) == 1


def test_a_local_symlink_is_not_followed_out_of_an_artifact(
    shared: Store, offer: Offer, policy: Policy, tmp_path: Path
) -> None:
    """A link at the target path of a download is replaced, not followed."""
    offer.put(shared)
    manifest = read_manifest(shared, NAME)
    assert manifest is not None
    target, outside = Artifact(tmp_path / "run", NAME), tmp_path / "outside.txt"
    outside.write_text("mine")
    target.folder.mkdir(parents=True)
    target.path(WEIGHTS).symlink_to(outside)
    fetch(shared, NAME, manifest, target=target)
    assert outside.read_text() == "mine"
    assert not target.path(WEIGHTS).is_symlink()
    assert sha256_of(target.path(WEIGHTS)) == manifest.files[WEIGHTS].sha256
    assert load_file(target.path(WEIGHTS))
