"""The EMA that becomes the result, and those that are stored beside it."""

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
    velocity = as_expert(task, task.conditioning, task.objective.bridge()).velocity
    error = validate(velocity, task.held_out, seed=task.seed, conditioning=task.conditioning).mean
    assert error == pytest.approx(content.held_out_loss, rel=1e-6)
    # So early in training, half-lives differ only below 5 % of the images.
    other = load_file(final.folder / f"ema-{names[0] if chosen else 'short'}.safetensors")
    assert any(not torch.equal(weight, stored[key]) for key, weight in other.items())
    # What sampling, evaluation, students and exports open.
    opened = expert_of_run(run, "experts/000").open()
    assert all(torch.equal(weight, stored[name]) for name, weight in opened.named_parameters())


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
