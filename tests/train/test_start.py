"""The shared start of the experts, and the average of experts that began with it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import atoll
from atoll import cli
from atoll.apps.evaluate.models import EvaluatedModel, evaluated_models
from atoll.apps.models.model_card import CardData, model_card
from atoll.apps.report import report
from atoll.core import config as configuration
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT, SHARDS, ExpertContent
from atoll.data.dataset import Shards
from atoll.experts.expert import DeviceOptions, open_expert
from atoll.experts.run import expert_of_run
from atoll.experts.validation import validate
from atoll.train import Requeue, build_task, resolve_job, train_job
from atoll.train.estimate import estimate_run
from atoll.train.merge import merge
from atoll.train.spec import expert_flops
from train.conftest import Copy
from train.conftest import merge as merge_settings
from train.workers import TINY, assert_same_weights

SHARE = {"shared_start": {"flops_share": 0.25}}
WEIGHTS = "diffusion_pytorch_model.safetensors"


def train(run: Path, kind: Any, expert: int | None = None, callback: Any = None, **overrides: str) -> None:
    config = configuration.load(run, {key.replace("__", "."): value for key, value in overrides.items()})
    train_job(resolve_job(run, config, kind, expert=expert), callback)


def content(run: Path, job: str) -> ExpertContent:
    return Artifact(run, f"{job}/final").read(EXPERT)


@pytest.fixture(scope="session")
def started(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a shared start, three experts and their average. Tests must not change it."""
    run = tmp_path_factory.mktemp("started") / "run"
    shutil.copytree(prepared / "data", run / "data")
    values = merge_settings(merge_settings(yaml.safe_load((prepared / "atoll.yaml").read_text()), TINY), SHARE)
    (run / "atoll.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    train(run, "start")
    for expert in range(3):
        train(run, "expert", expert)
    merge(run, configuration.load(run))
    return run


@pytest.mark.parametrize(
    ("share", "images", "count", "expected"),
    [
        (0.25, 160, 3, (120, 120)),
        (0.25, 80, 8, (64, 128)),  # 7.5 of 10 steps are rounded to 8
        (0.001, 160, 3, (152, 24)),  # the start has at least one step of each expert
        (0.999, 160, 3, (8, 456)),  # and an expert has at least one step
        (0.0, 160, 3, (160, 160)),
    ],
)
def test_start_and_experts_share_the_budget(share: float, images: int, count: int, expected: tuple[int, int]) -> None:
    """Counted in steps of 8 images: K experts and the start see as many images as K experts without a start."""
    config = configuration.resolve(
        {
            "shared_start": {"flops_share": share},
            "train": {"total_images": images, "batch_size": 8},
            "clusters": {"count": count},
        }
    )
    assert (config.total_images("expert"), config.total_images("start")) == expected
    if share:
        assert count * expected[0] + expected[1] == count * images
    assert config.total_images("router") == config.total_images("monolith") == images


def test_the_cost_of_the_start_counts_once(started: Path) -> None:
    """Start and experts have the FLOPs of three experts of 160 images, in every account of them."""
    config = configuration.load(started)
    plain = configuration.load(started, {"shared_start.flops_share": "0"})
    start, experts = content(started, "start"), [content(started, f"experts/00{k}") for k in range(3)]
    assert start.compute
    each = start.compute.flops // 120
    assert start.clusters == (0, 1, 2)
    assert [one.compute.images for one in (start, *experts) if one.compute] == [120] * 4
    assert expert_flops(started) == 480 * each
    assert resolve_job(started, config, "monolith", match_flops=started).settings.total_images == 480
    with_start, without = estimate_run(started, config), estimate_run(started, plain)
    assert [job.job for job in with_start.jobs] == ["start", *(job.job for job in without.jobs)]
    assert (with_start.flops, with_start.parameters) == (without.flops, without.parameters)
    spent = EvaluatedModel(started, "experts", "nearest").training(config)
    assert (spent.images, spent.flops, spent.parameters) == (480, 480 * each, 3 * start.compute.parameters)
    assert EvaluatedModel(started, "expert:1").training(config).flops == 240 * each
    merged = EvaluatedModel(started, "merged").training(config)
    assert (merged.images, merged.flops, merged.parameters) == (480, 480 * each, start.compute.parameters)
    assert merged.longest_job_seconds == spent.longest_job_seconds < merged.seconds == spent.seconds
    card = model_card(CardData(started, "name", "experts", experts, None, None))
    assert f"In total: {480 * each:.3g} FLOPs" in card
    assert "includes the shared start of the experts, once" in card


def test_the_report_compares_the_monolith_with_experts_and_start(started: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(started, run)
    train(run, "monolith", monolith__total_images="240")
    settings = configuration.load(run)
    shutil.rmtree(run / "experts/002")  # two experts and the start have 360 images
    page = report(run, settings, prompts=("a circle",), routings=("nearest",), steps=1).read_text()
    assert "used 66.7% of the training FLOPs of all experts together (with their shared start," in page
    for text in ("Shared start", "average of the experts", f"atoll train {run} --start", f"atoll merge {run}"):
        assert text in page


def test_an_expert_begins_with_the_ema_weights_of_the_start(started: Path) -> None:
    given = load_file(started / "start/final" / WEIGHTS)
    task = build_task(resolve_job(started, configuration.load(started), "expert", expert=1))
    assert given.keys() == task.network.state_dict().keys()
    assert all(torch.equal(tensor, given[key]) for key, tensor in task.network.state_dict().items())
    found = content(started, "experts/001").start
    assert found is not None
    assert found.manifest == Artifact(started, "start/final").open(EXPERT).digest
    assert found.compute == content(started, "start").compute


def test_an_expert_needs_only_its_shards_and_the_final_start(new_run: Copy, started: Path) -> None:
    alone, damaged = new_run("alone", only=[1], **SHARE), new_run("damaged", **SHARE)
    for cluster in (0, 2):
        for file in (damaged / f"data/shards/cluster_{cluster:03d}").iterdir():
            file.write_bytes(b"not what it was")
    for run in (alone, damaged):
        shutil.copytree(started / "start/final", run / "start/final")
        before = {path: path.stat().st_mtime_ns for path in (run / "start").rglob("*")}
        train(run, "expert", 1)
        assert_same_weights(started / "experts/001/final", run / "experts/001/final")
        assert before == {path: path.stat().st_mtime_ns for path in (run / "start").rglob("*")}
        assert [path.name for path in (run / "experts").iterdir()] == ["001"]


class StopAt:
    """Stops a job after some images."""

    def __init__(self, images: int) -> None:
        self.images = images

    def on_step(self, images: int) -> bool:
        return images >= self.images

    def on_checkpoint(self, checkpoint: Artifact) -> None:
        del checkpoint


@pytest.mark.parametrize(("kind", "expert", "job"), [("start", None, "start"), ("expert", 2, "experts/002")])
def test_an_interrupted_job_resumes_to_the_same_weights(
    kind: str, expert: int | None, job: str, new_run: Copy, started: Path
) -> None:
    run = new_run(**SHARE)
    if kind == "expert":
        shutil.copytree(started / "start", run / "start")
    with pytest.raises(Requeue):
        train(run, kind, expert, StopAt(64))
    train(run, kind, expert)
    assert_same_weights(started / job / "final", run / job / "final")


def test_a_changed_start_is_noticed(new_run: Copy, started: Path) -> None:
    """Neither checkpoints nor the result of another start are continued."""
    run = new_run(**SHARE)
    shutil.copytree(started / "start", run / "start")
    with pytest.raises(Requeue):
        train(run, "expert", 0, StopAt(64))
    shutil.copytree(started / "experts/001", run / "experts/001")
    shutil.rmtree(run / "start")
    with pytest.raises(
        AtollError, match=r"has no finished shared start, which experts begin with: atoll train .* --st"
    ):
        train(run, "expert", 0)
    train(run, "start", shared_start__lr="0.5")
    for expert in (0, 1):
        with pytest.raises(AtollError, match=r"start was \w+…, now \w+…"):
            train(run, "expert", expert)
    with (run / "start/final" / WEIGHTS).open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\x07")
    with pytest.raises(AtollError, match="SHA-256"):
        train(run, "expert", 2)


def test_impossible_settings_are_errors(new_run: Copy, started: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AtollError, match=r"networks.1: with shared_start, all experts have the network"):
        configuration.resolve({**SHARE, "networks": {1: "DiT-S/2"}})
    with pytest.raises(AtollError, match="experts start from it; give one folder for the start"):
        configuration.resolve({**SHARE, "train": {"init_from": {"default": "a", 1: "b"}}})
    with pytest.raises(AtollError, match=r"shared_start.batch_size 3 is not a multiple"):
        configuration.resolve({"shared_start": {"batch_size": 3}, "train": {"grad_accum_steps": 2}})
    with pytest.raises(AtollError, match="another network than the shared start it begins with: depth was 2, now 3"):
        resolve_job(started, configuration.load(started, {"networks.default.depth": "3"}), "expert", expert=0)
    assert cli.main(["train", str(new_run()), "--start"]) == 2
    assert "this run has no shared start; set shared_start.flops_share" in capsys.readouterr().err


def test_init_from_is_that_of_the_start(started: Path) -> None:
    folder = str(started / "experts/000/final")
    config = configuration.load(started, {"train.init_from": folder})
    assert resolve_job(started, config, "start").init_from == folder
    assert resolve_job(started, config, "expert", expert=1).init_from is None


def test_the_start_has_settings_of_its_own(started: Path) -> None:
    config = configuration.load(started, {"shared_start.batch_size": "32", "shared_start.lr": "0.01"})
    settings = resolve_job(started, config, "start").settings
    assert (settings.batch_size, settings.lr, settings.total_images) == (32, 0.01, 128)
    assert resolve_job(started, config, "expert", expert=0).settings.batch_size == 8


def test_an_expert_of_another_objective_begins_with_the_same_start(new_run: Copy, started: Path) -> None:
    run = new_run(**SHARE, experts={1: "ddpm"})
    shutil.copytree(started / "start", run / "start")
    train(run, "expert", 1)
    found = content(run, "experts/001")
    assert found.objective.prediction == "epsilon"
    assert found.start == content(started, "experts/001").start


# The average of the experts


def test_the_merged_network_is_the_mean_weighted_by_images(started: Path) -> None:
    rows = [Artifact(started, f"data/shards/cluster_00{k}").read(SHARDS).rows["train"] for k in range(3)]
    assert len(set(rows)) > 1, "equal clusters would not show the weights"
    experts = [load_file(started / f"experts/00{k}/final" / WEIGHTS) for k in range(3)]
    for name, tensor in load_file(started / "merged/final" / WEIGHTS).items():
        stacked = torch.stack([expert[name] for expert in experts]).double()
        shares = (torch.tensor(rows, dtype=torch.float64) / sum(rows)).view(-1, *[1] * tensor.ndim)
        torch.testing.assert_close(tensor.double(), (shares * stacked).sum(0), rtol=1e-6, atol=1e-9)
    assert any(not torch.equal(experts[0][name], experts[1][name]) for name in experts[0])


def test_the_merged_network_is_declared_and_validated(started: Path) -> None:
    found = content(started, "merged")
    digests = tuple(Artifact(started, f"experts/00{k}/final").open(EXPERT).digest for k in range(3))
    assert (found.job, found.clusters, found.sources, found.start) == ("merged", (0, 1, 2), digests, None)
    validation = Shards.open(started, [0, 1, 2], "validation")
    opened = open_expert(expert_of_run(started, "merged", verify=True), validation.statistics, DeviceOptions())
    error = validate(opened.velocity, validation, seed=0, conditioning=opened.conditioning).mean
    assert found.validation_loss == pytest.approx(error, rel=1e-5)


def test_the_merged_network_is_a_model_like_the_student(started: Path) -> None:
    models = evaluated_models(started, (), ("nearest",))
    assert [model.label for model in models] == ["experts nearest", "merged"]
    images = atoll.load(started, "merged").sample(["a circle"], num_inference_steps=2, seed=0)
    assert images[0].size == (32, 32)
    assert "average of the weights" in model_card(
        CardData(started, "name", "merged", [content(started, "merged")], None, None)
    )


def test_merge_prints_the_error_and_does_nothing_twice(
    started: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(started, run, ignore=shutil.ignore_patterns("merged"))
    assert cli.main(["merge", str(run)]) == 0
    error = content(started, "merged").validation_loss
    assert f"merged: done, validation error {error:.4f}, {run / 'merged/final'}" in capsys.readouterr().out
    assert Artifact(run, "merged/final").open(EXPERT).digest == Artifact(started, "merged/final").open(EXPERT).digest
    assert cli.main(["merge", str(run)]) == 0
    assert "exists already" in capsys.readouterr().out


def other_start(run: Path) -> None:
    shutil.rmtree(run / "start")
    shutil.rmtree(run / "experts/002")
    train(run, "start", shared_start__lr="0.5")
    train(run, "expert", 2)


def other_objective(run: Path) -> None:
    shutil.rmtree(run / "experts/002")
    train(run, "expert", 2, experts__2="ddpm")


def no_start(run: Path) -> None:
    shutil.rmtree(run / "experts/002")
    train(run, "expert", 2, shared_start__flops_share="0")


REFUSED = {
    "experts/002 and experts/000 did not begin with the same shared start": (other_start, no_start),
    "experts/002 and experts/000 have different objectives": (other_objective,),
    "has no finished experts/001/final, experts/002/final": (
        lambda run: [shutil.rmtree(run / f"experts/00{k}") for k in (1, 2)],
    ),
}


@pytest.mark.parametrize(
    ("change", "message"), [(change, message) for message, changes in REFUSED.items() for change in changes]
)
def test_what_cannot_be_averaged_is_refused(
    change: Callable[[Path], object], message: str, started: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(started, run, ignore=shutil.ignore_patterns("merged"))
    change(run)
    with pytest.raises(AtollError, match=message):
        merge(run, configuration.load(run))
    assert not (run / "merged").exists()


def test_a_missing_merged_network_is_an_error_with_its_command(new_run: Copy) -> None:
    run = new_run()
    with pytest.raises(AtollError, match=rf"is missing; merge it with: atoll merge {run}"):
        atoll.load(run, "merged")
