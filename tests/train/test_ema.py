"""The EMA that becomes the result, and those that are stored beside it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import atoll
from atoll.apps.models.export import export
from atoll.core import config, layout
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT, ROUTER
from atoll.experts.run import expert_of_run
from atoll.experts.validation import validate
from atoll.nets import load_network
from atoll.nets.io import WEAK_FILE, WEIGHTS_FILE
from atoll.train import build_task, resolve_job, train_job
from atoll.train.loop import Requeue
from atoll.train.spec import job_settings
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


class StopAt:
    """Stops a job after some images."""

    def __init__(self, images: int) -> None:
        self.images = images

    def on_step(self, images: int) -> bool:
        return images >= self.images

    def on_checkpoint(self, checkpoint: Artifact) -> None:
        pass


def test_the_weak_network_is_the_result_of_a_shorter_job(new_run: Copy, tmp_path: Path) -> None:
    """Also if the job was interrupted after the weak network was complete."""
    settings = {"total_images": 64, "ema": EMAS, "result_ema": "short", "weak_share": 0.5}
    whole, parted = new_run("whole", train=settings), new_run("parted", train=settings)
    shorter = new_run("shorter", train={**settings, "total_images": 32, "weak_share": 0.0})
    for run in (whole, shorter):
        train_job(resolve_job(run, config.load(run), "expert", expert=0))
    spec = resolve_job(parted, config.load(parted), "expert", expert=0)
    with pytest.raises(Requeue):
        train_job(spec, StopAt(48))
    train_job(spec)
    stored = load_file(shorter / "experts/000/final" / WEIGHTS_FILE)
    for run in (whole, parted):
        weak = load_file(run / "experts/000/final" / WEAK_FILE)
        assert weak.keys() <= stored.keys()
        assert all(torch.equal(part, stored[name]) for name, part in weak.items())
        reference = expert_of_run(run, "experts/000")
        opened = reference.weak.open().state_dict()
        assert all(torch.equal(part, stored[name]) for name, part in opened.items())
        assert any(not torch.equal(part, opened[name]) for name, part in reference.open().state_dict().items())
    assert expert_of_run(shorter, "experts/000").weak is None
    # An export has no weak networks, and sampling from it names the option.
    export(whole, tmp_path / "exported", "expert:0")
    assert not list((tmp_path / "exported").rglob(WEAK_FILE))
    how = {"num_images": 1, "num_inference_steps": 2, "guidance_scale": 2.0, "guidance": "autoguidance"}
    with pytest.raises(AtollError, match=r"train\.weak_share"):
        atoll.load(tmp_path / "exported").generate(**how)
    assert atoll.load(whole, "expert:0").generate(**how).latents.isfinite().all()


def test_only_experts_and_the_monolith_have_a_weak_network(new_run: Copy) -> None:
    settings = config.load(new_run(train={"weak_share": 0.2}))
    kinds = ("expert", "monolith", "router", "start", "student")
    assert [job_settings(settings, kind).weak_share for kind in kinds] == [0.2, 0.2, 0, 0, 0]


def test_an_ema_of_the_name_of_the_weak_network_is_an_error(new_run: Copy) -> None:
    with pytest.raises(AtollError, match="the weak network has the name weak"):
        config.load(new_run(), {"train.ema": "{weak: 1.0}", "train.result_ema": "null", "train.weak_share": "0.5"})
