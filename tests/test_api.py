"""The verbs as functions of Python: `atoll.prepare`, `train`, `launch`, `sample`, `evaluate`, `export`."""

import inspect
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import atoll
from atoll import api, cli
from atoll.core import config as configuration
from atoll.core.progress import Update
from shapes import draw, write_run
from train.conftest import Copy, copier
from train.workers import TINY

FUNCTIONS = ("prepare", "train", "launch", "sample", "evaluate", "export")
PRINTING = {"json", "dry_run", "gpus", "print", "plan", "out", "save_routing"}
"""Options of the command line alone: about printing, and about the files that a verb writes."""
WITHOUT = ("metrics", "diversity", "diagnostics")
QUIET = {"models": ("expert:0",), "steps": (2,), "num_trajectories": 2, "without": WITHOUT}


@pytest.fixture
def new_run(prepared: Path, tmp_path: Path) -> Copy:
    return copier(prepared, tmp_path, TINY)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_and_its_verb_have_one_declaration(name: str) -> None:
    """The same fields with the same defaults; the verb adds options of printing only."""
    own, verb = vars(api)[f"{name.title()}Arguments"], cli.VERBS[name]
    shared = {field.name: (field.type, field.default, field.kw_only) for field in fields(own)}
    options = {field.name: (field.type, field.default, field.kw_only) for field in fields(verb)}
    assert {key: options.pop(key) for key in shared} == shared
    assert set(options) <= PRINTING
    signature = inspect.signature(getattr(atoll, name))
    assert list(signature.parameters) == list(inspect.signature(own).parameters)
    assert not any("_ArgConfig" in str(part) for part in signature.parameters.values())


def test_python_only_arguments_are_no_options_and_settings_need_no_quotes() -> None:
    for name in FUNCTIONS:
        assert not {"--progress", "--images", "--overrides"} & set(cli.verb_help(name).split())
    given = {"train.lr": 1e-5, "train.compile": False, "data.buckets": ["32x32", "48x24"], "text.encoder": "none"}
    texts = api.TrainArguments("run", expert=0, overrides=given).texts
    config = configuration.resolve({}, texts)
    assert (config.train.lr, config.train.compile, config.text.encoder) == (1e-5, False, "none")
    assert config.data.buckets == ["32x32", "48x24"]


def test_atoll_train_is_the_function_after_the_package_was_imported() -> None:
    code = (
        "import sys, atoll; from atoll.train import resolve_job; from importlib import import_module\n"
        "assert import_module('atoll.train').resolve_job is resolve_job\n"
        "assert callable(atoll.train) and not hasattr(atoll.train, 'resolve_job')\n"
        "assert dir(atoll) == sorted(atoll.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_type_checker_knows_the_arguments_and_the_results(tmp_path: Path) -> None:
    """mypy --strict, for a user of the installed package."""
    file = tmp_path / "user.py"
    file.write_text(
        "import atoll\n"
        "made = atoll.train('runs/mine', expert=0, overrides={'train.lr': 1e-4}, progress=print)\n"
        "reveal_type(made.digest)\n"
        "reveal_type(atoll.sample('runs/mine', ['a panda'], steps=3).images)\n"
        "atoll.sample('runs/mine', step=3)\n"
        "atoll.launch('runs/mine', on='moon')\n"
    )
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(file)], capture_output=True, text=True, check=False
    )
    lines = [line.partition(": ")[2] for line in checked.stdout.splitlines()]
    assert lines[0] == 'note: Revealed type is "str"', checked.stdout
    assert "list[PIL.Image.Image]" in lines[1]
    assert 'Unexpected keyword argument "step"' in lines[2]
    assert 'Argument "on"' in lines[-2]


def test_training_reports_every_step_and_prints_nothing(new_run: Copy, capfd: pytest.CaptureFixture[str]) -> None:
    run, updates = new_run(train={"total_images": 64}), list[Update]()
    made = atoll.train(run, expert=0, overrides={"train.lr": 2e-3}, progress=updates.append)
    assert made.content["job"] == "experts/000"
    steps = [update for update in updates if update.what]
    assert [(step.what, step.done, step.total, step.unit) for step in steps] == [
        ("experts/000", images, 64, "images") for images in range(8, 72, 8)
    ]
    assert "loss" in steps[-1].text
    assert [update.text for update in updates if not update.what] == [f"experts/000: done, {run}/experts/000/final"]
    assert json.loads((run / "experts/000/metrics.jsonl").read_text().splitlines()[-1])["lr"] == pytest.approx(2e-3)
    assert atoll.train(str(run), expert=0, overrides={"train.lr": 2e-3}).digest == made.digest, "nothing to do"
    assert capfd.readouterr() == ("", "")


def test_a_wrong_choice_is_an_error_before_any_work(new_run: Copy) -> None:
    run = new_run()
    with pytest.raises(atoll.AtollError, match="choose what to train"):
        atoll.train(run, expert=0, router=True)
    with pytest.raises(atoll.AtollError, match=r"did you mean 'train.lr'"):
        atoll.train(run, expert=0, overrides={"train.lrr": 1})


def test_samples_are_those_of_the_model(conditioned_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    updates: list[Update] = []
    samples = atoll.sample(
        conditioned_run, labels=["circle", "square"], steps=3, seed=5, routing="top-2", progress=updates.append
    )
    expected = atoll.load(conditioned_run).generate(
        label=["circle", "square"], num_inference_steps=3, seed=5, routing="top-2", guidance_scale=4.0
    )
    assert capfd.readouterr().out == ""
    assert torch.equal(samples.latents, expected.latents)
    assert samples.trace is not None
    assert samples.trace.weights.shape == (3, 2, 3)
    assert [(update.done, update.total) for update in updates if update.what == "sampling"][-1] == (3, 3)
    one = atoll.sample(str(conditioned_run), labels="circle", steps=3, seed=5, guidance_scale=1)
    assert len(one.images) == 1, "one text is not a sequence of letters"
    with pytest.warns(UserWarning, match="not conditioned on prompts"):
        atoll.sample(conditioned_run, "a red circle", steps=1)
    assert not (conditioned_run / "samples").exists(), "a function writes no files that nobody asked for"


def test_launch_runs_jobs_in_processes(new_run: Copy, capfd: pytest.CaptureFixture[str]) -> None:
    run, updates = new_run(train={"total_images": 16}), list[Update]()
    state = atoll.launch(run, jobs=("experts",), experts=(1,), progress=updates.append)
    assert [step.name for group in state.to_submit for step in group.steps] == ["experts/001"]
    assert (run / "experts/001/final/manifest.json").is_file()
    bars = [(update.done, update.total) for update in updates if update.what == "launch"]
    assert bars[-1] == (16, 16)
    assert capfd.readouterr() == ("", "")
    result = atoll.evaluate(run, models=("expert:1",), **{key: QUIET[key] for key in QUIET if key != "models"})
    assert result is not None
    assert result.models[0].model == "expert:1"
    assert capfd.readouterr() == ("", "")


def test_export_returns_the_manifest(conditioned_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = atoll.export(conditioned_run, tmp_path / "out", model="expert:1", license="mit")
    assert made.content["model"] == "expert:1"
    assert "license: mit" in (tmp_path / "out/README.md").read_text()
    assert capfd.readouterr() == ("", "")


# Images of a Python program


def pairs(count: int = 24) -> Iterator[tuple[Image.Image, str | dict[str, object]]]:
    rng = random.Random(0)
    for number in range(count):
        kind = ("circle", "square", "triangle")[number % 3]
        image = draw(kind, rng)
        yield (
            (image, f"a {kind} with the number {number}")
            if number % 2
            else (
                image,
                {"caption": f"a {kind}", "label": kind, "license": "CC0", "id": f"shape-{number}"},
            )
        )


def new(run: Path) -> Path:
    write_run(run, run.parent)
    values = yaml.safe_load((run / "atoll.yaml").read_text())
    values["text"]["encoder"] = "none"
    (run / "atoll.yaml").write_text(yaml.safe_dump(values))
    return run


def test_images_of_an_iterator_become_the_source_of_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from atoll.data.dataset import Shards
    from atoll.data.stages.ingest import open_configured

    run, updates = new(tmp_path / "run"), list[Update]()
    atoll.prepare(run, pairs(), progress=updates.append)
    assert capfd.readouterr() == ("", "")
    assert [update.done for update in updates if update.what == "images"] == list(range(1, 25))
    source = list(open_configured(configuration.load(run).data).images())
    assert [image.id for image in source] == [f"{number:09d}" for number in range(24)]
    assert (source[0].caption, source[0].label, source[0].attributes["license"]) == ("a circle", "circle", "CC0")
    assert (source[1].caption, source[1].label) == ("a square with the number 1", None)
    for stored, (image, _) in zip(source, pairs(), strict=True):
        assert np.array_equal(np.asarray(Image.open(BytesIO(stored.read()))), np.asarray(image)), "lossless"
    assert sum(len(Shards.open(run, [0, 1, 2], split)) for split in ("train", "validation")) == 24
    with pytest.raises(atoll.AtollError, match=r"images exists: its images are stored; go on without images="):
        atoll.prepare(run, pairs())
    updates.clear()
    atoll.prepare(run, progress=updates.append)
    assert {"ingest: already done", "shards: already done"} <= {update.text for update in updates}


def test_an_interrupted_iterator_leaves_no_source(tmp_path: Path) -> None:
    run = new(tmp_path / "run")

    def broken() -> Iterator[tuple[Image.Image, str]]:
        yield from ((image, "a") for image, _ in pairs(3))
        raise ConnectionError("the third image never came")

    before = (run / "atoll.yaml").read_text()
    with pytest.raises(ConnectionError, match="never came"):
        atoll.prepare(run, broken())
    assert not (run / "images").exists()
    assert (run / "atoll.yaml").read_text() == before
    with pytest.raises(atoll.AtollError, match="has no image"):
        atoll.prepare(run, [])
    atoll.prepare(run, pairs(12), stage=("ingest",))
    assert (run / "data/ingest/manifest.json").is_file()
