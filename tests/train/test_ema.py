"""The EMA that becomes the result, and those that are stored beside it."""

import pytest
import torch
from safetensors.torch import load_file

from atoll.core import config, layout
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT, ROUTER
from atoll.experts.run import expert_of_run
from atoll.experts.validation import validate
from atoll.nets import load_network
from atoll.nets.io import WEIGHTS_FILE
from atoll.train import build_task, resolve_job, train_job
from atoll.train.tasks import ExpertTask
from train.conftest import Copy
from train.workers import metrics

EMAS = {"ema": 10_000.0, "middle": 4.0, "short": 1.0}


@pytest.mark.parametrize("chosen", [None, "short"])
def test_the_result_is_the_first_ema_or_the_named_one_and_all_are_stored(new_run: Copy, chosen: str | None) -> None:
    run = new_run(train={"total_images": 64, "ema": EMAS, "result_ema": chosen})
    train_job(resolve_job(run, config.load(run), "expert", expert=0))
    final = Artifact(run, "experts/000/final")
    content, names = final.read(EXPERT), list(config.load(run).train.ema)
    assert content.ema == (chosen or names[0])
    others = {name for name in names if name != content.ema}
    assert {file.name for file in final.folder.glob("ema-*")} == {f"ema-{name}.safetensors" for name in others}
    # The validation is that of the result.
    task = build_task(resolve_job(run, config.load(run), "expert", expert=0))
    stored = load_file(final.folder / WEIGHTS_FILE)
    task.network.load_state_dict(stored, strict=False)
    assert isinstance(task, ExpertTask)
    velocity = task.as_expert(task.objective.bridge()).velocity
    error = validate(velocity, task.validation, seed=task.seed, conditioning=task.spec.conditioning).mean
    assert error == pytest.approx(content.validation_loss, rel=1e-6)
    # So early in training, half-lives differ only below 5 % of the images.
    other = load_file(final.folder / f"ema-{names[0] if chosen else 'short'}.safetensors")
    assert any(not torch.equal(weight, stored[key]) for key, weight in other.items())
    # What sampling, evaluation, students and exports open.
    opened = expert_of_run(run, "experts/000").open()
    assert all(torch.equal(weight, stored[name]) for name, weight in opened.named_parameters())


def test_training_validates_and_previews_the_ema_that_becomes_the_result(new_run: Copy) -> None:
    shown = {"total_images": 64, "validate_every": 64, "sample_every": 64, "sample_count": 1}
    several = new_run("several", train={**shown, "ema": EMAS, "result_ema": "short"})
    alone = new_run("alone", train={**shown, "ema": {"ema": EMAS["short"]}})
    errors, previews = [], []
    for run in (several, alone):
        train_job(resolve_job(run, config.load(run), "expert", expert=0))
        errors.append(metrics(run, "experts/000")[-1]["validation_loss"])
        previews.append(layout.preview(run / "experts/000", 64).read_bytes())
    assert errors[0] == errors[1]
    assert previews[0] == previews[1]
    assert errors[0] == pytest.approx(Artifact(several, "experts/000/final").read(EXPERT).validation_loss, rel=1e-6)


def test_a_router_has_the_temperature_of_the_chosen_ema(new_run: Copy) -> None:
    run = new_run(train={"total_images": 64, "ema": EMAS, "result_ema": "short"})
    train_job(resolve_job(run, config.load(run), "router"))
    final = Artifact(run, "router/final")
    content = final.read(ROUTER)
    assert content.ema == "short"
    assert load_network(final.folder).temperature.item() == pytest.approx(content.temperature)


def test_an_unknown_ema_is_an_error(new_run: Copy) -> None:
    with pytest.raises(AtollError, match=r"result_ema is 'middle'; expected one of long, short"):
        config.load(new_run(), {"train.ema": "{long: 1e9, short: 1}", "train.result_ema": "middle"})
