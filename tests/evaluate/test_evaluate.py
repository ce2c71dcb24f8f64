"""The whole evaluation of a small run: resumes, keeps its protocol, and agrees with the parts it is made of."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll import cli
from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact, sha256_of
from atoll.core.errors import AtollError
from atoll.core.manifests import SHARDS
from atoll.ensemble import Settings, load
from atoll.evaluate import Options, diagnostics, evaluate
from atoll.evaluate.cache import cached
from atoll.evaluate.distances import Gaussian, frechet, kernel_distance
from atoll.evaluate.features import of_reference, of_samples
from atoll.evaluate.generated import draw, prompts_of
from atoll.evaluate.models import Subject, subjects
from atoll.evaluate.results import EvaluationResult, Spread

EXTRACTOR = "efficientnet-lite0"
SMALL = ["--num-images", "12", "--steps", "3", "--num-real", "24", "--extractors", EXTRACTOR, "--diversity", "2", "2"]
SMALL += [
    "--num-val",
    "6",
    "--num-trajectories",
    "3",
    "--routings",
    "top-1",
    "full",
    "oracle",
    "drawn",
    "--allow-small",
]


@pytest.fixture(scope="module")
def answer(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    assert cli.main(["evaluate", str(trained), *SMALL, "--json"]) == 0
    found: dict[str, Any] = json.loads((trained / "evaluation" / "latest.json").read_text())
    return found


def files(run: Path) -> dict[str, str]:
    return {str(path): sha256_of(path) for path in (run / "evaluation").rglob("*") if path.is_file()}


def test_every_model_and_routing_has_its_figures_with_their_protocol(answer: dict[str, Any]) -> None:
    labels = [model["label"] for model in answer["models"]]
    assert labels == ["experts top-1", "experts full", "experts oracle", "experts drawn", "monolith", "student"]
    for model in answer["models"]:
        found = model["metrics"][EXTRACTOR]
        protocol = found["protocol"]
        assert (protocol["samples"], protocol["steps"], protocol["guidance_scale"], protocol["seed"]) == (12, 3, 4.0, 0)
        assert protocol.get("routing") == model["routing"]
        assert protocol["reference"] == {"split": "train", "pictures": 24, "resolution": 32}
        assert len(protocol["weights_sha256"]) == len(protocol["reference_fingerprint"]) == 64
        assert found["frechet"]["value"] > found["floor"]["frechet"] > 0
        assert found["floor"]["real_pictures"] == 12
        assert found["kid"]["standard_error"] > 0
        assert model["diversity"]["items"] == 2
        assert "not LPIPS" in model["diversity"]["protocol"]["distance"]
        assert model["trajectory"]["steps"] == [3, 6]
        assert model["trajectory"]["refinement"] > 0


def test_what_samples_cost_is_counted(trained: Path, answer: dict[str, Any]) -> None:
    by_label = {model["label"]: model for model in answer["models"]}
    named = (by_label[f"experts {routing}"] for routing in ("top-1", "full", "oracle", "drawn"))
    top_1, full, oracle, drawn = named
    assert top_1["sampling"]["network_evaluations"] == 3 * 2
    assert full["sampling"]["network_evaluations"] == pytest.approx(3 * 2 * 3)
    assert full["sampling"]["flops"] > 2 * top_1["sampling"]["flops"]
    # The oracle asks no router: it costs what the dense model of the same size costs.
    assert oracle["sampling"]["flops"] == by_label["monolith"]["sampling"]["flops"] < top_1["sampling"]["flops"]
    # The router answers at each of three steps, once for a drawn expert; told nothing, it does not count twice.
    router = Subject(trained, "experts", "top-1")._costs()["router"].forward_flops
    assert top_1["sampling"]["flops"] == pytest.approx(oracle["sampling"]["flops"] + 3 * router)
    assert drawn["sampling"]["flops"] == pytest.approx(oracle["sampling"]["flops"] + router)
    assert oracle["training"]["samples"] == 3 * 160
    assert top_1["training"]["samples"] == 4 * 160
    for model in answer["models"]:
        assert model["sampling"]["seconds"] > 0
        assert model["sampling"]["bytes"] > model["sampling"]["weights_bytes"] / 2
        assert model["training"]["flops"] > 0


def test_costs_follow_solver_and_guidance(trained: Path) -> None:
    subject = Subject(trained, "monolith")
    assert subject.sampling(Settings(steps=3, solver="heun", guidance_scale=1.0), 1.0).network_evaluations == 5
    late = Settings(steps=4, guidance_scale=3.0, guidance_interval=(0.0, 0.5))  # at 1, 0.75, 0.5 and 0.25
    assert subject.sampling(late, 1.0).network_evaluations == 4 + 2


def test_what_is_kept_is_of_these_prompts_and_this_router(trained: Path, tmp_path: Path) -> None:
    config = configuration.load(trained)
    how: dict[str, Any] = {"models": ("experts",), "routings": ("nearest",), "followed": 3, "held_out": 6}
    how |= {"skip": ("metrics", "diversity"), "settings": Settings(steps=2)}
    shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation"))
    held, seen = (evaluate(tmp_path / "run", config, Options(**how, prompts=split)) for split in ("held-out", "train"))
    paths = [answer.models[0].trajectory.refinement for answer in (held, seen)]
    assert paths[0] != paths[1]
    assert held.diagnostics.experts.router is not None
    shutil.rmtree(tmp_path / "run/router")
    assert evaluate(tmp_path / "run", config, Options(**how)).diagnostics.experts.router is None


def test_expert_use_sums_to_one_at_every_time(answer: dict[str, Any]) -> None:
    by_label = {model["label"]: model for model in answer["models"]}
    assert by_label["monolith"]["expert_use"] is None
    for label in ("experts top-1", "experts full", "experts oracle"):
        use = by_label[label]["expert_use"]
        assert len(use["t"]) == 3
        assert torch.tensor(use["weight"]).sum(1).allclose(torch.ones(3))
        assert torch.tensor(use["lead_share"]).sum(1).allclose(torch.ones(3))
    # Prompts follow the clusters' shares of the training data, and the oracle follows the prompts.
    prompts = prompts_of(Path(answer["run"]), 3, 12)
    shares = torch.bincount(torch.tensor(prompts.clusters), minlength=3) / 12
    assert torch.tensor(by_label["experts oracle"]["expert_use"]["mean_lead_share"]).allclose(shares)


def test_the_same_command_again_computes_nothing(
    trained: Path, answer: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(trained)
    monkeypatch.setattr("atoll.ensemble.sampler.Sampler.generate", None)
    monkeypatch.setattr("atoll.evaluate.diagnostics.noisy", None)
    monkeypatch.setattr("atoll.evaluate.diagnostics.validate", None)
    monkeypatch.setattr("atoll.evaluate.features.open_configured", None)
    assert cli.main(["evaluate", str(trained), *SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answer
    assert files(trained) == before
    assert cli.main(["evaluate", str(trained), *SMALL]) == 0
    assert "monolith" in capsys.readouterr().out


def test_figures_can_be_taken_again_from_what_is_kept(trained: Path, answer: dict[str, Any]) -> None:
    config, subject = configuration.load(trained), Subject(trained, "experts", "top-1")
    prompts = prompts_of(trained, 3, 12)
    samples = draw(
        subject, prompts, Settings(routing="top-1", steps=3), what="samples", batch=64, max_loaded_experts=None
    )
    made, real = (
        of_samples(trained, samples, EXTRACTOR),
        of_reference(trained, config, "train", count=24, vision=EXTRACTOR),
    )
    found = answer["models"][0]["metrics"][EXTRACTOR]
    distance = frechet(Gaussian.of(made.features()), Gaussian.of(real.features()))
    assert distance == pytest.approx(found["frechet"]["value"], rel=1e-9)
    assert kernel_distance(made.features(), real.features()).value == pytest.approx(found["kid"]["value"], rel=1e-9)
    pictures = np.concatenate(list(samples.chunks()))
    assert pictures.shape == (12, 32, 32, 3)
    assert pictures.dtype == np.uint8
    assert (samples.artifact.folder / "sheet.png").is_file()


def test_a_set_that_was_interrupted_continues_to_the_same_pictures(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.evaluate.generated.CHUNK", 4)
    prompts, subject = prompts_of(trained, 3, 10), Subject(trained, "experts", "top-2")
    settings = Settings(routing="top-2", steps=2)
    whole = draw(subject, prompts, settings, what="whole", batch=64, max_loaded_experts=None)
    pictures = np.concatenate(list(whole.chunks()))
    shutil.copytree(whole.artifact.folder, tmp_path / "kept")
    (whole.artifact.folder / "manifest.json").unlink()
    (whole.artifact.folder / "000001.safetensors").unlink()
    again = draw(subject, prompts, settings, what="whole", batch=3, max_loaded_experts=None)
    # The missing images were made in batches of another size, whose rounding may change a pixel by one.
    assert np.abs(np.concatenate(list(again.chunks())).astype(int) - pictures.astype(int)).max() <= 1
    kept = "000002.safetensors"
    assert sha256_of(tmp_path / "kept" / kept) == sha256_of(again.artifact.path(kept))


def test_too_few_samples_are_refused_unless_allowed(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [argument for argument in SMALL if argument != "--allow-small"]
    assert cli.main(["evaluate", str(trained), *arguments]) == 2
    message = capsys.readouterr().err
    assert "12 samples against 24 real pictures are too few" in message
    assert "the Frechet distance needs 1,281" in message
    assert "--allow-small" in message


def test_mixed_answers_are_the_ensembles_own_velocity(trained: Path) -> None:
    """The error under a routing, mixed from the experts' answers, is that of the ensemble's velocity."""
    model, shards = load(trained).ensemble, diagnostics.held_out(trained, 3)
    routings = ["top-1", "top-2", "full", "oracle", "drawn", "sample-1", "threshold-0.4"]
    answers = diagnostics.ask(model, shards, routings, limit=5, seed=3)
    assert len(answers.t) == 10 * sum(min(5, size) for size in shards.cluster_sizes())
    for routing in routings:
        errors = []
        for sample in diagnostics.noisy(shards, 5, 3, device=model.device):
            condition, cluster = sample.condition(model.conditioning), sample.batch.cluster
            with torch.no_grad():
                v = model.velocity(sample.x, sample.t, condition, routing=routing, cluster=cluster, draw=sample.draw)
            errors.append((v - sample.target).square().flatten(1).mean(1))
        assert torch.cat(errors).allclose(answers.routed[routing], rtol=1e-4, atol=1e-6)
    own = answers.errors.gather(1, answers.cluster[:, None])[:, 0]
    assert own.allclose(answers.routed["oracle"])
    assert answers.nearest is not None
    accuracy = diagnostics.report(answers).nearest.accuracy.mean
    assert accuracy == pytest.approx((answers.nearest.argmax(1) == answers.column).double().mean().item())


def test_a_cluster_without_held_out_samples_gives_no_prompts(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained / "data" / "shards", tmp_path / "data" / "shards")
    shards = Artifact(tmp_path, "data/shards/cluster_001")
    made = shards.open(SHARDS)
    kept = {file: shards.path(file).read_bytes() for file in made.files if not file.startswith("held-out")}
    shutil.rmtree(shards.folder)
    shards.begin(SHARDS, dict(made.made_from))
    for file, content in kept.items():
        shards.write(file, content)
    shards.commit({**made.content, "rows": {**made.content["rows"], "held-out": 0}})
    prompts = prompts_of(tmp_path, 3, 12)
    assert len(prompts.clusters) == 12
    assert set(prompts.clusters) == {0, 2}
    assert "no held-out sample, so no prompt, is of cluster 1" in capsys.readouterr().out
    assert set(prompts_of(tmp_path, 3, 12, split="train").clusters) == {0, 1, 2}


def test_held_out_errors_of_all_models_are_of_the_same_samples(answer: dict[str, Any]) -> None:
    found = answer["diagnostics"]
    assert set(found["dense"]) == {"monolith", "student"}
    assert set(found["experts"]["velocity_error"]) == {"top-1", "full", "oracle", "drawn"}
    for errors in [*found["dense"].values(), *found["experts"]["velocity_error"].values()]:
        assert len(errors["by_time"]) == 10
        assert 0.1 < errors["mean"] < 10
    matrix = torch.tensor(found["experts"]["expert_on_cluster"]["mean"])
    assert matrix.shape == (3, 3)


def test_what_there_is_is_evaluated_and_what_is_not_is_said(trained: Path, tmp_path: Path) -> None:
    assert [subject.label for subject in subjects(trained, ["singles"], [])] == ["expert:0", "expert:1", "expert:2"]
    with pytest.raises(AtollError, match="did you mean 'student'"):
        subjects(trained, ["studnt"], [])
    with pytest.raises(AtollError, match="no trained network"):
        subjects(tmp_path, [], ["top-1"])
    with pytest.raises(AtollError, match="did you mean 'metrics'"):
        Options(skip=("metric",))


def test_parts_can_be_left_out(trained: Path) -> None:
    config = configuration.load(trained)
    options = Options(
        models=("expert:1",), settings=Settings(steps=2), followed=2, skip=("metrics", "diversity", "diagnostics")
    )
    result = evaluate(trained, config, options)
    assert EvaluationResult.read(trained) == result
    assert result.models[0].label == "expert:1"
    (model,) = json.loads((trained / layout.LATEST_EVALUATION).read_text())["models"]
    assert set(model) == {"model", "routing", "label", "training", "trajectory"}


def test_a_stored_result_of_another_form_is_computed_anew(tmp_path: Path) -> None:
    computed: list[Spread] = []

    def compute() -> Spread:
        computed.append(Spread.of(torch.tensor([1.0, 3.0])))
        return computed[-1]

    def find() -> Spread:
        return cached(tmp_path, "figures", "spread", made_from={}, result=Spread, compute=compute)

    found = find()
    assert (find(), len(computed)) == (found, 1)
    (file,) = tmp_path.rglob("figures.json")
    text = file.read_bytes()
    for other in ({"mean": 2.0}, {**json.loads(text), "median": 2.0}):
        file.write_text(json.dumps(other))
        assert find() == found
        assert file.read_bytes() == text
    assert (find(), len(computed)) == (found, 3)


def test_an_evaluation_of_another_form_is_refused_with_its_command(tmp_path: Path) -> None:
    assert EvaluationResult.read(tmp_path) is None
    (tmp_path / "evaluation").mkdir()
    (tmp_path / layout.LATEST_EVALUATION).write_text('{"models": []}')
    with pytest.raises(AtollError, match=f"another version of Atoll; .*atoll evaluate {tmp_path}"):
        EvaluationResult.read(tmp_path)
