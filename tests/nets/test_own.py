"""Networks outside Atoll: trained and sampled in a local run, and never imported for anybody else's files."""

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml

import atoll
from atoll.apps.share.shared_settings import read_shared, shared_part
from atoll.core import config as configuration
from atoll.core.errors import AtollError
from atoll.core.networks import OwnConfig, read_network
from atoll.nets import Expert, build, own
from own_networks import ConvExpert
from train.conftest import Copy, copier
from train.workers import TINY

CHOICE = {"class": "own_networks:ConvExpert", "width": 8}
SMALL = {"networks": {"default": CHOICE}, "train": {"total_images": 16}}


@pytest.fixture
def new_run(prepared: Path, tmp_path: Path) -> Copy:
    return copier(prepared, tmp_path, TINY)


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "_allowed", set())


def settings(run: Path, choice: object) -> configuration.Config:
    values = yaml.safe_load((run / "atoll.yaml").read_text())
    values["networks"] = {"default": choice}
    (run / "atoll.yaml").write_text(yaml.safe_dump(values))
    return configuration.load(run)


def canary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a module that leaves a file when it is imported."""
    (folder / "evil_network.py").write_text(f"open({str(folder / 'imported')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "evil_network", raising=False)
    return folder / "imported"


def test_a_run_trains_samples_and_evaluates_it(new_run: Copy) -> None:
    run = new_run(**SMALL)
    run_config = yaml.safe_load((run / "atoll.yaml").read_text())
    run_config["networks"] = {"default": CHOICE}
    (run / "atoll.yaml").write_text(yaml.safe_dump(run_config))
    declared = atoll.train(run, expert=0).content["network"]
    expected = {"_class_name": "OwnNetwork", **CHOICE, "channels": 3, "text_width": 384}
    assert declared == expected, "the manifest says that the class is not one of Atoll"
    own._allowed.clear()
    sampler = atoll.load(run, "expert:0")
    network = sampler.ensemble.references[0].open()
    assert isinstance(network, ConvExpert)
    assert isinstance(network, Expert)
    assert network.config == OwnConfig.from_dict(expected)
    one, two = (atoll.sample(run, [text], model="expert:0", steps=2) for text in ("a red circle", "a square"))
    assert one.images[0].size == (32, 32)
    assert not torch.equal(one.latents, two.latents), "it is conditioned on the text"
    result = atoll.evaluate(run, models=("expert:0",), without=("metrics", "diversity", "diagnostics"), steps=(2,),
                            num_trajectories=2)  # fmt: skip
    assert result is not None
    assert result.models[0].trajectory is not None
    # The manifest and config.json are equal, so the network can be opened again from its files.
    stored = json.loads((run / "experts/000/final/config.json").read_text())
    assert stored == expected


def test_a_manifest_alone_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = canary(tmp_path, monkeypatch)
    config = read_network({"_class_name": "OwnNetwork", "class": "evil_network:Net"})
    with pytest.raises(AtollError, match=r"evil_network:Net, code outside Atoll\. It is not imported"):
        build(config)
    assert not imported.exists()


def test_what_is_no_network_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = tmp_path / "called"
    (tmp_path / "evil_network.py").write_text(f"def program(**fields): open({str(called)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "evil_network", raising=False)
    own._allowed.add("evil_network:program")
    with pytest.raises(AtollError, match=r"is no torch\.nn\.Module"):
        build(read_network({"_class_name": "OwnNetwork", "class": "evil_network:program"}))
    assert not called.exists()


def test_only_the_classes_of_the_own_configuration_are_imported(
    new_run: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that was put into a run, with a class that its atoll.yaml does not name."""
    imported = canary(tmp_path, monkeypatch)
    run = new_run()
    settings(run, CHOICE)
    atoll.train(run, expert=0, overrides={"train.total_images": 8})
    final = run / "experts/000/final"
    for name in ("config.json", "manifest.json"):
        file = final / name
        file.write_text(file.read_text().replace("own_networks:ConvExpert", "evil_network:ConvExpert"))
    with pytest.raises(AtollError, match="evil_network:ConvExpert, code outside Atoll"):
        atoll.sample(run, ["a"], model="expert:0", steps=1)
    assert not imported.exists()


def test_an_export_and_a_shared_run_refuse_it(new_run: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = canary(tmp_path, monkeypatch)
    run = new_run()
    config = settings(run, CHOICE)
    atoll.train(run, expert=0, overrides={"train.total_images": 8})
    with pytest.raises(AtollError, match="experts/000 is a own_networks:ConvExpert, code outside Atoll; an export"):
        atoll.export(run, tmp_path / "out", model="expert:0")
    with pytest.raises(AtollError, match="code outside Atoll, which a shared run cannot have"):
        shared_part(config)
    hostile = yaml.safe_dump({"networks": {"default": {"class": "evil_network:Net"}}}).encode()
    with pytest.raises(AtollError, match="names a class outside Atoll"):
        read_shared(hostile, "its atoll.yaml")
    assert not imported.exists()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"class": "os.system"}, "expected package.module:Class"),
        ({"class": "own_networks:Conv Expert"}, "expected package.module:Class"),
        ({"class": ["own_networks:ConvExpert"]}, "expected package.module:Class"),
    ],
)
def test_a_wrong_class_is_an_error_of_the_configuration(choice: dict[str, object], message: str) -> None:
    with pytest.raises(AtollError, match=message):
        configuration.resolve({"networks": {"default": choice}})


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"class": "own_networks:Missing"}, "cannot be imported: .*Missing"),
        ({"class": "no_such_module:Net"}, "cannot be imported: No module named 'no_such_module'"),
        ({**CHOICE, "depth": 3}, "does not take its fields: .*depth"),
        ({**CHOICE, "channels": 4}, "channels is 4, but the prepared data needs 3"),
        ({"class": "collections:OrderedDict"}, "is no torch.nn.Module"),
    ],
)
def test_a_class_that_does_not_work_is_an_error_before_training(
    new_run: Copy, choice: dict[str, object], message: str
) -> None:
    run = new_run()
    settings(run, choice)
    with pytest.raises(AtollError, match=message):
        atoll.train(run, expert=0)
    assert not (run / "experts").exists()
