"""Students in few steps and of their cluster: training, FLOPs, and sampling with the command line and an export."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import atoll
from atoll import cli, flow
from atoll.apps.evaluate.models import evaluated_models
from atoll.apps.models.export import export
from atoll.apps.models.pipeline import AtollPipeline
from atoll.apps.share.status import status
from atoll.apps.share.store import Store
from atoll.core import config
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT
from atoll.ensemble import SampleSettings
from atoll.nets import Condition, DiT, DiTConfig
from atoll.nets.student import StudentNetwork, for_cluster, plain_weights
from atoll.train import build_task, resolve_job, train_job
from atoll.train.estimate import JobCosts
from atoll.train.few_steps import FewStepTask
from atoll.train.job import training_flops
from atoll.train.tasks import TrainingInputs

FEW = {"student.steps": "2", "student.total_images": "32"}


def micro_batch(task: FewStepTask) -> TrainingInputs:
    return next(iter(task.stream(0, atoll.core.distributed.ALONE)))


@pytest.fixture(scope="module")
def distilled(trained_experts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a two-step student of each expert, and one of all clusters that is told the cluster."""
    run = tmp_path_factory.mktemp("distilled") / "run"
    shutil.copytree(trained_experts, run)
    for expert in range(3):
        train_job(resolve_job(run, config.load(run, FEW), "student", expert=expert))
    train_job(resolve_job(run, config.load(run, {**FEW, "student.cluster": "true"}), "student"))
    return run


@pytest.mark.slow  # processes of their own; tests/launch/test_plan.py has the plan
def test_a_launch_trains_students_in_any_order(distilled: Path, trained_experts: Path, tmp_path: Path) -> None:
    """Each is trained as by `atoll train --student --expert`: the same bits, whatever ran before it."""
    run = tmp_path / "run"
    shutil.copytree(trained_experts, run)
    options = [word for key, value in FEW.items() for word in (f"--{key}", value)]
    for chosen in (["2"], ["0", "1", "2"]):
        assert cli.main(["launch", str(run), "--jobs", "students", "--experts", *chosen, *options]) == 0
    for number in range(3):
        name = f"students/00{number}/final/diffusion_pytorch_model.safetensors"
        ours, theirs = load_file(run / name), load_file(distilled / name)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_status_shows_the_students_that_were_started(distilled: Path, trained_experts: Path) -> None:
    lines = {line.job: line.state for line in status(Store.open(distilled))}
    assert [lines[f"students/00{number}"] for number in range(3)] == ["done"] * 3
    assert not any(line.job.startswith("students") for line in status(Store.open(trained_experts)))


def test_a_third_of_the_monoliths_flops(trained_experts: Path) -> None:
    """DDM's protocol: equal steps, a quarter of the batch, one forward pass of the teacher for each image."""
    wide = {"train.batch_size": "32", "monolith.total_images": "640"}
    narrow = {"student.batch_size": "8", "student.total_images": "160"}
    monolith = resolve_job(trained_experts, config.load(trained_experts, wide), "monolith")
    student = resolve_job(trained_experts, config.load(trained_experts, narrow), "student")
    steps = [spec.settings.total_images // spec.settings.batch_size for spec in (monolith, student)]
    assert steps == [20, 20]
    assert training_flops(build_task(monolith)) == 3 * training_flops(build_task(student))


def test_the_flops_of_a_few_step_student(trained_experts: Path) -> None:
    """Forward and backward are 3 passes, the derivative 2, the steps before 3/2 on average, the guided teacher 2."""
    few = {"student.steps": "4", "student.total_images": "160"}
    plain = build_task(resolve_job(trained_experts, config.load(trained_experts), "student", expert=None))
    forward = training_flops(plain) // (4 * 160)
    # A quarter with corrections: 3 passes, three steps before, 3 of the online velocity, and those of the teacher.
    for scale, share, passes in (("1", "0", 7.5), ("2", "0", 8.5), ("1", "0.25", 0.75 * 7.5 + 0.25 * 10)):
        values = config.load(trained_experts, {**few, "student.guidance_scale": scale, "student.corrector": share})
        spec = resolve_job(trained_experts, values, "student", expert=0)
        assert training_flops(build_task(spec)) == passes * forward * 160 == JobCosts.of(spec).flops


def test_the_account_of_students_states_their_teachers_too(
    distilled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without and with the training of the teachers: in a dry run, an evaluation and the card of an export."""
    costs = {
        kind: sum(
            json.loads((distilled / kind / f"00{number}/final/manifest.json").read_text())["content"]["compute"][
                "flops"
            ]
            for number in range(3)
        )
        for kind in ("students", "experts")
    }
    dense = json.loads((distilled / "student/final/manifest.json").read_text())["content"]["compute"]["flops"]
    few = [word for key, value in FEW.items() for word in (f"--{key}", value)]
    assert (
        cli.main(["train", str(distilled), "--student", *few, "--student.cluster", "true", "--dry-run", "--json"]) == 0
    )
    estimate = json.loads(capsys.readouterr().out)
    assert (estimate["flops"], estimate["teachers_flops"]) == (dense, costs["experts"])
    values = config.load(distilled, FEW)
    for model, flops in (("students", costs["students"]), ("student", dense)):
        (found,) = evaluated_models(distilled, [model], ["nearest"])
        training = found.training(values)
        assert (training.flops, training.teachers_flops) == (flops, costs["experts"])
    (experts,) = evaluated_models(distilled, ["experts"], ["nearest"])
    assert experts.training(values).teachers_flops is None
    export(distilled, tmp_path / "export", "students")
    card = (tmp_path / "export/README.md").read_text()
    assert f"In total: {costs['students']:.3g} FLOPs" in card
    assert f"with them, it is {costs['students'] + costs['experts']:.3g} FLOPs" in card


def test_a_student_begins_as_its_expert(trained_experts: Path) -> None:
    """At the start the average velocity over a step of any length is the teacher's velocity, for x0-like networks."""
    for expert in (0, 2):  # flow matching and v-prediction
        task = build_task(resolve_job(trained_experts, config.load(trained_experts, FEW), "student", expert=expert))
        assert isinstance(task, FewStepTask)
        inputs = micro_batch(task)
        x, t, cluster = inputs.noised.input, torch.full((8,), 0.6), torch.zeros(8, dtype=torch.long)
        told = {"condition": inputs.condition, "cluster": cluster}
        theirs = task.teacher_velocity(inputs.condition, cluster)(x, t)
        ours = task.velocity(task.network, x, t, **told, length=torch.linspace(0.1, 0.5, 8))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_the_steps_of_a_batch_begin_where_the_student_arrives(trained_experts: Path) -> None:
    """At the start the student is the teacher, so the loss is the change of the teacher's velocity along the step."""
    task = build_task(resolve_job(trained_experts, config.load(trained_experts, FEW), "student", expert=0))
    assert isinstance(task, FewStepTask)
    inputs = micro_batch(task)
    seen = []

    def forward(x: torch.Tensor, timestep: torch.Tensor, condition: Condition, *, length: torch.Tensor) -> torch.Tensor:
        seen.append((x, timestep, length))
        return task.network(x, timestep, condition, length=length)

    loss = task.losses(forward, inputs).loss
    (x, timestep, length), noise = seen[0], inputs.noised.input
    assert timestep.tolist() == [1000, 500] * 4
    assert bool(((length > 0) & (length <= 0.5)).all())
    first = task.velocity(
        task.network, noise, torch.ones(8), condition=inputs.condition, cluster=inputs.cluster,
        length=torch.full((8,), 0.5),
    )  # fmt: skip
    torch.testing.assert_close(x[::2], noise[::2])
    torch.testing.assert_close(x[1::2], (noise - first / 2)[1::2], atol=1e-5, rtol=1e-5)
    # Its embedding of the length is zero, so dF/dd is 0 and F is the teacher's velocity.
    teacher = task.teacher_velocity(inputs.condition, torch.zeros(8, dtype=torch.long))
    with torch.no_grad():
        t = timestep / 1000
        average = teacher(x, t)
        error = (average - teacher(x - length[:, None, None, None] * average, t - length)).square().flatten(1).mean(1)
    torch.testing.assert_close(loss, error * ((t - length) / 0.05).square().clamp(max=1), atol=1e-5, rtol=1e-3)


def test_a_quarter_of_the_images_is_corrected(trained_experts: Path) -> None:
    """At the start the online velocity is the teacher's, so only its own loss has gradients on these images."""
    values = config.load(trained_experts, FEW | {"student.corrector": "0.25"})
    task = build_task(resolve_job(trained_experts, values, "student", expert=0))
    assert isinstance(task, FewStepTask)
    assert task.auxiliary is not None
    inputs = micro_batch(task)
    found = task.losses(task.network, inputs)
    assert found.regularization is not None
    corrected = found.regularization > 0
    assert corrected.tolist() == [False] * 6 + [True] * 2
    torch.testing.assert_close(found.loss[corrected], torch.zeros(2), atol=1e-6, rtol=0)
    assert bool((found.loss[~corrected] > 0).all())
    # The velocity of noise minus sample, of which the network knows the mixture only
    found.minimized[corrected].sum().backward()
    assert all(
        parameter.grad.abs().max() < 1e-2 for parameter in task.network.parameters() if parameter.grad is not None
    )
    assert any(parameter.grad.abs().max() > 1e-2 for parameter in task.auxiliary.parameters())
    # Another online velocity moves the samples along the difference, with the mean norm of the predictions' gradients.
    with torch.no_grad():
        for parameter in task.auxiliary.parameters():
            parameter.mul_(1.5)
    again = task.losses(task.network, inputs).loss
    torch.testing.assert_close(again[~corrected], found.loss[~corrected])
    assert bool((again[corrected] > 1e-3).all())


def test_a_student_in_training_equals_its_plain_result() -> None:
    """The embedding of the length and the vector of the cluster become a part of a bias."""
    torch.manual_seed(0)
    small = DiTConfig(width=32, depth=2, heads=2, channels=3, out_channels=3, size=8)
    network = StudentNetwork(DiT(small), length=True, clusters=3)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    plain = plain_weights(network.state_dict(), 0.25)
    vectors = plain.pop("clusters.weight")
    result = DiT(small)
    result.load_state_dict(plain)
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([750.0])
    for cluster, vector in enumerate(vectors):
        expected = network(x, t, length=torch.tensor([0.25]), cluster=torch.tensor([cluster]))
        own = for_cluster(result, vector)
        torch.testing.assert_close(own(x, t), expected, atol=1e-4, rtol=1e-4)
        assert own.blocks[0].mlp.inner.weight is not None
        assert own.patch.weight.data_ptr() == result.patch.weight.data_ptr(), "all other weights are shared"


def test_students_sample_in_their_steps(distilled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line, the library, an export and the pipeline; one expert is drawn and kept."""
    out = tmp_path / "images"
    common = ["--routing", "nearest:drawn", "--save-routing", "--json", "--out", str(out)]
    assert cli.main(["sample", str(distilled), "circle", "square", "--model", "students", *common]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["steps"], settings["guidance_scale"], settings["solver"]) == (2, 1.0, "euler")
    how = {"prompt": ["circle", "square"], "routing": "nearest:drawn", "seed": 3}
    samples = atoll.load(distilled, "students").generate(**how, trace=True)
    assert samples.trace is not None
    assert samples.trace.t.tolist() == [1.0, 0.5]
    assert torch.equal(samples.trace.weights[0], samples.trace.weights[1])
    export(distilled, tmp_path / "export", "students")
    assert torch.equal(atoll.load(tmp_path / "export").generate(**how).latents, samples.latents)
    pipe = AtollPipeline.from_pretrained(tmp_path / "export")
    assert torch.equal(pipe(**how, output_type="latent").images, samples.latents)


def test_a_student_that_is_told_its_cluster_is_an_ensemble(distilled: Path, tmp_path: Path) -> None:
    how = {"prompt": ["circle"] * 3, "cluster": [0, 1, 2], "seed": 3}
    sampler = atoll.load(distilled, "student")
    assert [own.clusters for own in sampler.ensemble.declarations] == [(0,), (1,), (2,)]
    latents = sampler.generate(**how, routing="oracle").latents
    # Each is the network with the vector of its cluster, which training has moved from zero.
    alone = [atoll.ensemble.Ensemble([own]) for own in sampler.ensemble.references]
    noise = sampler.noise(3, 3)
    for row, ensemble in enumerate(alone):
        expected = flow.solve(
            lambda x, t, e=ensemble: e.velocity(x, t, sampler.encode(["circle"])), noise[row : row + 1], steps=2
        )
        torch.testing.assert_close(latents[row : row + 1], expected, atol=1e-4, rtol=1e-4)
    vectors = load_file(distilled / "student/final/told-clusters.safetensors")["clusters.weight"]
    assert vectors.shape == (3, 32)
    assert bool(vectors.abs().amax(1).gt(0).all())
    # Its densities are those of the experts, so `nearest` can choose the cluster in an export, too.
    export(distilled, tmp_path / "export", "student")
    opened = atoll.load(tmp_path / "export")
    assert [own.clusters for own in opened.ensemble.declarations] == [(0,), (1,), (2,)]
    torch.testing.assert_close(opened.generate(**how, routing="oracle").latents, latents, atol=1e-4, rtol=1e-4)
    assert opened.generate(**how, routing="nearest:drawn").settings.steps == 2


def test_a_manifest_declares_steps_and_teachers(distilled: Path) -> None:
    found = Artifact(distilled, "students/002/final").open(EXPERT, verify=True).content
    assert (found["steps"], found["clusters"], len(found["teachers"])) == (2, [2], 1)
    assert found["objective"]["prediction"] == "v_prediction"
    assert found["validation_loss"] > 0
    assert Artifact(distilled, "students/001/final").open(EXPERT).content["objective"]["prediction"] == "velocity"


def test_experts_and_few_step_students_cannot_be_mixed(distilled: Path) -> None:
    one, other = (atoll.load(distilled, model).ensemble.references for model in ("students", "experts"))
    with pytest.raises(AtollError, match="different numbers of steps"):
        atoll.ensemble.Ensemble([one[0], other[1]])


@pytest.mark.parametrize(
    ("changes", "expert", "message"),
    [
        ({}, 0, "a student of one expert has few steps"),
        ({"student.steps": "2"}, 7, "there is no expert 7"),
        ({"student.init_from": "start"}, None, "no finished shared start"),
        ({"student.corrector": "0.25"}, None, "corrector needs a few-step student of one expert"),
        ({"student.steps": "4", "student.corrector": "0.25"}, None, "corrector needs a few-step student of one expert"),
        ({"student.steps": "4", "student.corrector": "0.25"}, 0, "with 4 steps needs more than 8 images"),
        ({"student.init_from": "expert:0", "student.network": "DiT-XS/4"}, None, "another network than experts/000"),
    ],
)
def test_wrong_requests_are_errors(
    trained_experts: Path, changes: dict[str, str], expert: int | None, message: str
) -> None:
    with pytest.raises(AtollError, match=message):
        train_job(resolve_job(trained_experts, config.load(trained_experts, changes), "student", expert=expert))


def test_students_are_evaluated_with_a_routing_in_their_steps(distilled: Path) -> None:
    models = evaluated_models(distilled, ["students", "student"], ["nearest:drawn", "oracle"])
    assert [model.label for model in models] == [
        f"{model} {routing}" for model in ("students", "student") for routing in ("nearest:drawn", "oracle")
    ]
    assert [model.steps() for model in models] == [2] * 4
    assert [len(model.parts()) for model in models] == [3, 3, 1, 1]
    assert evaluated_models(distilled, ["experts"], ["top-1"])[0].steps() is None
    # Two evaluations of one network, and no guidance.
    cost = models[0].sampling(SampleSettings(routing="nearest:drawn").for_steps(2), 1.0)
    assert cost.network_evaluations == 2
