"""The EMA that becomes the result: the best of several on held-out images."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.core import config
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT, ROUTER
from atoll.experts.run import expert_of_run
from atoll.experts.validation import validate
from atoll.nets import load_network
from atoll.nets.io import WEIGHTS_FILE
from atoll.train import build_task, resolve_job, train_job
from atoll.train.tasks import as_expert
from train.conftest import Copy

EMAS = {"ema": 10_000.0, "middle": 4.0, "short": 1.0}


def validated(run: Path, weights: dict[str, torch.Tensor]) -> float | None:
    """Return the held-out loss of a flow-matching expert with these weights."""
    task = build_task(resolve_job(run, config.load(run), "expert", expert=0))
    task.network.load_state_dict(weights, strict=False)
    velocity = as_expert(task, task.conditioning, task.objective.bridge()).velocity
    return validate(velocity, task.held_out, seed=task.seed, conditioning=task.conditioning).mean


def test_the_result_is_the_best_ema_on_held_out_images(new_run: Copy) -> None:
    """While the loss still falls, a shorter EMA is better. The longest is the first."""
    run = new_run(train={"total_images": 64, "ema": EMAS})
    train_job(resolve_job(run, config.load(run), "expert", expert=0))
    final = Artifact(run, "experts/000/final")
    content, names = final.read(EXPERT), list(config.load(run).train.ema)
    assert content.loss_by_ema is not None
    assert set(content.loss_by_ema) == set(names)
    assert content.ema == min(names, key=lambda name: content.loss_by_ema[name]) != names[0]
    assert content.held_out_loss == content.loss_by_ema[content.ema]
    assert {file.name for file in final.folder.glob("ema-*")} == {
        f"ema-{name}.safetensors" for name in names if name != content.ema
    }
    for name in names:
        file = WEIGHTS_FILE if name == content.ema else f"ema-{name}.safetensors"
        measured = validated(run, load_file(final.folder / file))
        assert measured == pytest.approx(content.loss_by_ema[name], rel=1e-6), name
    # What sampling, evaluation, students and exports open.
    opened, stored = expert_of_run(run, "experts/000").open(), load_file(final.folder / WEIGHTS_FILE)
    assert all(torch.equal(weight, stored[name]) for name, weight in opened.named_parameters())


def test_a_router_has_the_temperature_of_the_chosen_ema(new_run: Copy) -> None:
    run = new_run(train={"total_images": 64, "ema": EMAS})
    train_job(resolve_job(run, config.load(run), "router"))
    final = Artifact(run, "router/final")
    content = final.read(ROUTER)
    assert content.loss_by_ema is not None
    assert content.held_out_loss == min(content.loss_by_ema.values()) == content.loss_by_ema[content.ema]
    assert load_network(final.folder).temperature.item() == pytest.approx(content.temperature)


def test_without_a_choice_the_first_ema_is_the_result_and_measured_once(new_run: Copy) -> None:
    run = new_run(train={"total_images": 16})
    spec = resolve_job(run, config.load(run, {"train.ema": "{only: 100}"}), "expert", expert=0)
    assert list(spec.settings.ema) == ["only"]
    train_job(spec)
    content = Artifact(run, "experts/000/final").read(EXPERT)
    assert (content.ema, content.loss_by_ema) == ("only", None)
    assert content.held_out_loss is not None


def test_the_settings_can_name_the_ema(new_run: Copy) -> None:
    """The other one is not measured."""
    run = new_run(train={"total_images": 16})
    chosen = config.load(run, {"train.ema": "{long: 1e9, short: 1}", "train.result_ema": "long"})
    train_job(resolve_job(run, chosen, "expert", expert=0))
    content = Artifact(run, "experts/000/final").read(EXPERT)
    assert (content.ema, content.loss_by_ema) == ("long", None)
    assert (run / "experts/000/final/ema-short.safetensors").is_file()
    with pytest.raises(AtollError, match=r"result_ema is 'middle'; expected best or one of long, short"):
        config.load(run, {"train.ema": "{long: 1e9, short: 1}", "train.result_ema": "middle"})
