"""A shared run whose experts begin with a shared start: its owner publishes it, and contributors verify it."""

import json
import shutil
from pathlib import Path

import pytest

import atoll
from atoll import cli
from atoll.apps.share.admission import Contribution, check_declaration
from atoll.apps.share.owners import push
from atoll.apps.share.pull import pull
from atoll.apps.share.status import status
from atoll.apps.share.store import Store
from atoll.core import config
from atoll.core.artifacts import Artifact, Manifest
from atoll.core.manifests import EXPERT, SHARDS
from atoll.train import resolve_job, train_job
from atoll.train.merge import merge
from atoll.train.spec import shared_start
from atoll.verify.trust import Policy
from atoll.verify.untrusted import Refused
from share.shared import key_file, person, publishers, remote, share
from train.conftest import Copy
from train.workers import assert_same_weights


def states(store: Store) -> dict[str, str]:
    return {line.job: line.state for line in status(store, remote(store))}


def test_experts_of_a_shared_run_begin_with_the_start_that_its_owner_published(
    new_run: Copy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can join before. Then a contributor trains the same expert as the owner would, bit for bit."""
    settings = {"shared_start": {"flops_share": 0.25}, "train": {"total_images": 480}}
    run, store = new_run(**settings), Store.open(tmp_path / "shared")
    url = f"{store.url}#sha256={share(run, store, publishers=publishers('ann'))}"
    monkeypatch.setenv("ATOLL_KEY", str(key_file("ann", tmp_path)))
    join = ["join", url, "--expert", "1", "--folder", str(tmp_path / "ann")]
    assert cli.main(join) == 2
    assert (
        "has no shared start yet, with which the experts of this run begin; its owner trains it with atoll train"
        in (capsys.readouterr().err)
    )
    assert states(store)["start"] == "missing"

    train_job(resolve_job(run, config.load(run), "start"))
    assert "start/final" in push(run, store, person("owner"))[1]
    assert states(store)["start"] == "done"
    assert cli.main([*join, "--network", "DiT-S/2"]) == 2
    assert "begin with its shared start, so they have its network" in capsys.readouterr().err
    assert cli.main(join) == 0
    assert not (tmp_path / "ann/data/shards/cluster_000").exists(), "only the shards of its cluster"
    owner_key = ("--key", str(key_file("owner", tmp_path)))
    capsys.readouterr()
    assert cli.main(["admit", url, "--json", "--folder", str(tmp_path / "o"), *owner_key]) == 0
    assert json.loads(capsys.readouterr().out) == {"experts/001": "admitted"}

    for expert in range(3):
        train_job(resolve_job(run, config.load(run), "expert", expert=expert))
    assert_same_weights(run / "experts/001/final", tmp_path / "ann/experts/001/final")
    shutil.rmtree(run / "experts/001")  # its time of training differs, and the run has the one of ann
    fetched = pull(remote(store, run), run)
    assert (fetched["experts/001"], fetched["start"]) == ("fetched", "up to date")
    merge(run, config.load(run))
    assert "merged/final" in push(run, store, person("owner"))[1]
    model = tmp_path / "model"
    verdicts = pull(remote(store, model), model)
    assert verdicts == dict.fromkeys([*(f"experts/00{k}" for k in range(3)), "merged", "start"], "fetched")
    assert len(atoll.load(model, "merged").sample(["a circle"], num_inference_steps=2, seed=0)) == 1


def test_an_expert_of_another_start_is_refused(new_run: Copy) -> None:
    """Its manifest must declare the start of the run and its cost, in its inputs and in its content."""
    run = new_run(shared_start={"flops_share": 0.25}, train={"total_images": 32})
    for kind, expert in (("start", None), ("expert", 0)):
        train_job(resolve_job(run, config.load(run), kind, expert=expert))
    manifest, start = Artifact(run, "experts/000/final").open(EXPERT), shared_start(run)
    shards = (Artifact(run, "data/shards/cluster_000").open(SHARDS),)

    def check(changed: Manifest, expected: object = start) -> None:
        check_declaration(Contribution("experts/000", changed, shards, Policy(), expected))

    def changed(inputs: dict, content: dict) -> Manifest:
        return Manifest(
            manifest.kind, {**manifest.made_from, **inputs}, {**manifest.content, **content}, manifest.files
        )

    check(manifest)
    other = {**manifest.content["start"], "manifest": "0" * 64}
    cheap = {**manifest.content["start"], "compute": {"images": 1, "parameters": 1, "flops": 1, "seconds": 0.0}}
    for wrong in (
        changed({"start": "0" * 64}, {"start": other}),
        changed({"start": "0" * 64}, {}),
        changed({}, {"start": cheap}),
        changed({}, {"start": None}),
    ):
        with pytest.raises(Refused, match="it did not begin with the shared start of this run"):
            check(wrong)
    with pytest.raises(Refused, match="it declares a shared start"):
        check(manifest, None)
