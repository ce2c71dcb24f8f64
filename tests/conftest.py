"""Fixtures shared by all tests."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from ensemble.runs import write_run as write_networks
from shapes import rewrite, write_run, write_shapes
from sized import SETTINGS, write_sized
from train.conftest import merge
from train.workers import TINY

# Tests run in two workers on two cores: with one thread each, they do not compete for cores.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shapes(tmp_path_factory.mktemp("source") / "shapes")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, shapes: Path) -> Path:
    """A run with every stage done. Tests must not change it."""
    from atoll.data.prepare import prepare

    run = tmp_path_factory.mktemp("prepared") / "run"
    prepare(run, write_run(run, shapes))
    return run


@pytest.fixture(scope="session")
def with_patches(tmp_path_factory: pytest.TempPathFactory, prepared: Path, shapes: Path) -> Path:
    """Like `prepared`, with patch features and flips. Tests must not change it."""
    run = tmp_path_factory.mktemp("patches") / "run"
    stages = ("ingest", "features", "clusters", "latents", "text")
    return rewrite(prepared, run, shapes, stages=stages, features={"patch_dimensions": 64}, data={"flip": True})


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three experts of three objectives and two sizes, conditioned on text. Tests must not change it."""
    return write_networks(tmp_path_factory.mktemp("ensemble") / "run")


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, run: Path) -> Path:
    """The export of `run`, with a text encoder. Tests must not change it."""
    from atoll.apps.models.export import export

    folder = tmp_path_factory.mktemp("exported") / "pipeline"
    export(run, folder)
    return folder


@pytest.fixture(scope="session")
def sized_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experts, router and monolith on images of five sizes, hardly trained. Tests must not change it."""
    from atoll.core import config as configuration
    from atoll.train import resolve_job, train_job

    few = {"total_images": 16}
    changes = {"train": {**SETTINGS["train"], **few}, "router": {**SETTINGS["router"], **few}}
    run = write_sized(tmp_path_factory.mktemp("sized") / "run", **changes)
    config = configuration.load(run)
    for kind, expert in (("expert", 0), ("expert", 1), ("router", None), ("monolith", None)):
        train_job(resolve_job(run, config, kind, expert=expert))
    return run


@pytest.fixture(scope="session")
def conditioned_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like `run`, conditioned on classes: no text encoder, so its export is small. Tests must not change it."""
    return write_networks(tmp_path_factory.mktemp("conditioned") / "run", conditioning=("label",))


@pytest.fixture(scope="session")
def conditioned_export(tmp_path_factory: pytest.TempPathFactory, conditioned_run: Path) -> Path:
    """The export of `conditioned_run`. Tests must not change it."""
    from atoll.apps.models.export import export

    folder = tmp_path_factory.mktemp("conditioned export") / "pipeline"
    export(conditioned_run, folder)
    return folder


@pytest.fixture(scope="session")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with everything trained. Tests add to its `evaluation` folder and change nothing else."""
    from atoll import cli

    run = tmp_path_factory.mktemp("evaluated") / "run"
    shutil.copytree(prepared / "data", run / "data")
    values = merge(yaml.safe_load((prepared / "atoll.yaml").read_text()), TINY)
    values["experts"] = {"default": "flow-matching", 1: "ddpm"}
    (run / "atoll.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    for job in (["--expert", "0"], ["--expert", "1"], ["--expert", "2"], ["--router"], ["--monolith"], ["--student"]):
        assert cli.main(["train", str(run), *job]) == 0
    return run
