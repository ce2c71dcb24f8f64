"""The whole evaluation of a small run: it resumes, stores its protocol, and agrees with its parts."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll import cli
from atoll.apps.evaluate import diagnostics
from atoll.apps.evaluate.cache import cached
from atoll.apps.evaluate.distances import Gaussian, frechet, kernel_distance, precision_recall
from atoll.apps.evaluate.evaluation import evaluate
from atoll.apps.evaluate.feature_sets import generated_features, reference_features
from atoll.apps.evaluate.generated import generate, prompts_of
from atoll.apps.evaluate.models import EvaluatedModel, evaluated_models
from atoll.apps.evaluate.options import EvaluationOptions
from atoll.apps.evaluate.results import Coverage, EvaluationResult, KernelDistance, ModelResult
from atoll.apps.evaluate.table import tables
from atoll.apps.report.page import steps_charts
from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact, sha256_of
from atoll.core.distributed import DistContext
from atoll.core.errors import AtollError
from atoll.core.manifests import SHARDS
from atoll.core.options import LoadOptions
from atoll.data.dataset import Shards
from atoll.ensemble import SampleSettings, load
from atoll.experts.expert import condition_of
from atoll.experts.validation import ValidationSet

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
def result(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    assert cli.main(["evaluate", str(trained), *SMALL, "--json"]) == 0
    found: dict[str, Any] = json.loads((trained / "evaluation" / "latest.json").read_text())
    return found


def files(run: Path) -> dict[str, str]:
    return {str(path): sha256_of(path) for path in (run / "evaluation").rglob("*") if path.is_file()}


def test_every_model_and_routing_has_metrics_with_their_protocol(result: dict[str, Any]) -> None:
    labels = [model["label"] for model in result["models"]]
    assert labels == ["experts top-1", "experts full", "experts oracle", "experts drawn", "monolith", "student"]
    for model in result["models"]:
        found = model["metrics"][EXTRACTOR]
        protocol = found["protocol"]
        assert (protocol["num_images"], protocol["steps"], protocol["guidance_scale"], protocol["seed"]) == (
            12,
            3,
            4.0,
            0,
        )
        assert protocol.get("routing") == model["routing"]
        assert protocol["reference"] == {"source": "train", "num_images": 24, "resolution": 32}
        assert len(protocol["weights_sha256"]) == len(protocol["reference_fingerprint"]) == 64
        assert found["frechet"] > found["real_baseline"]["frechet"] > 0
        assert found["real_baseline"]["num_images"] == 12
        assert found["kid"]["standard_error"] > 0
        assert model["diversity"]["items"] == 2
        assert "not LPIPS" in model["diversity"]["protocol"]["extractor"]
        assert model["trajectory"]["steps"] == [3, 6]
        assert model["trajectory"]["refinement"] > 0


def test_the_cost_of_sampling_is_counted(trained: Path, result: dict[str, Any]) -> None:
    by_label = {model["label"]: model for model in result["models"]}
    named = (by_label[f"experts {routing}"] for routing in ("top-1", "full", "oracle", "drawn"))
    top_1, full, oracle, drawn = named
    assert top_1["sampling"]["network_evaluations"] == 3 * 2
    assert full["sampling"]["network_evaluations"] == pytest.approx(3 * 2 * 3)
    assert full["sampling"]["flops"] > 2 * top_1["sampling"]["flops"]
    # The oracle needs no router, so it costs the same as a dense model of this size.
    assert oracle["sampling"]["flops"] == by_label["monolith"]["sampling"]["flops"] < top_1["sampling"]["flops"]
    # The router runs at each of three steps, but once for `drawn`. Unconditioned, it runs once per step under guidance.
    router = EvaluatedModel(trained, "experts", "top-1")._costs()["router"].forward_flops
    assert top_1["sampling"]["flops"] == pytest.approx(oracle["sampling"]["flops"] + 3 * router)
    assert drawn["sampling"]["flops"] == pytest.approx(oracle["sampling"]["flops"] + router)
    assert oracle["training"]["images"] == 3 * 160
    assert top_1["training"]["images"] == 4 * 160
    for model in result["models"]:
        assert model["sampling"]["seconds"] > 0
        assert model["sampling"]["memory_bytes"] > model["sampling"]["weights_bytes"] / 2
        assert model["training"]["flops"] > 0


def test_costs_follow_solver_and_guidance(trained: Path) -> None:
    model = EvaluatedModel(trained, "monolith")
    assert model.sampling(SampleSettings(steps=3, solver="heun", guidance_scale=1.0), 1.0).network_evaluations == 5
    late = SampleSettings(steps=4, guidance_scale=3.0, guidance_interval=(0.0, 0.5))  # at 1, 0.75, 0.5 and 0.25
    assert model.sampling(late, 1.0).network_evaluations == 4 + 2
    # Autoguidance runs the weak network as often, but needs no second pass of the router.
    auto = replace(late, guidance="autoguidance")
    assert model.sampling(auto, 1.0) == model.sampling(late, 1.0)
    experts = EvaluatedModel(trained, "experts", "top-1")
    separate, shared = experts.sampling(late, 1.0), experts.sampling(replace(late, guidance_weights="conditional"), 1.0)
    assert experts.sampling(auto, 1.0).flops == shared.flops <= separate.flops


def test_all_options_of_guidance_reach_the_sampler() -> None:
    how = {"guidance": "autoguidance", "guidance_interval": (0.2, 0.8), "rescale": 0.5, "guidance_scale": 2.0}
    (settings,) = EvaluationOptions(**how).sampling()
    assert {name: getattr(settings, name) for name in how} == how
    with pytest.raises(AtollError, match="a guidance interval in"):
        EvaluationOptions(guidance_interval=(0.8, 0.2))


def test_cached_results_depend_on_the_prompts_and_the_router(trained: Path, tmp_path: Path) -> None:
    config = configuration.load(trained)
    how: dict[str, Any] = {"models": ("experts",), "routings": ("nearest",), "num_trajectories": 3, "num_val": 6}
    how |= {"without": ("metrics", "diversity"), "steps": (2,)}
    shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation"))
    held, seen = (
        evaluate(tmp_path / "run", config, EvaluationOptions(**how, prompts=split)) for split in ("validation", "train")
    )
    paths = [result.models[0].trajectory.refinement for result in (held, seen)]
    assert paths[0] != paths[1]
    assert held.diagnostics.experts.router is not None
    shutil.rmtree(tmp_path / "run/router")
    assert evaluate(tmp_path / "run", config, EvaluationOptions(**how)).diagnostics.experts.router is None


def test_expert_weights_sum_to_one_at_every_time(result: dict[str, Any]) -> None:
    by_label = {model["label"]: model for model in result["models"]}
    assert "expert_use" not in by_label["monolith"]
    for label in ("experts top-1", "experts full", "experts oracle"):
        use = by_label[label]["expert_use"]
        assert len(use["t"]) == 3
        assert torch.tensor(use["weight"]).sum(1).allclose(torch.ones(3))
        assert torch.tensor(use["lead_share"]).sum(1).allclose(torch.ones(3))
    # Prompts have the cluster proportions of the training data, and the oracle uses the clusters of the prompts.
    prompts = prompts_of(Path(result["run"]), 3, 12)
    shares = torch.bincount(torch.tensor(prompts.clusters), minlength=3) / 12
    assert torch.tensor(by_label["experts oracle"]["expert_use"]["mean_lead_share"]).allclose(shares)


def test_the_same_command_again_computes_nothing(
    trained: Path, result: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(trained)
    monkeypatch.setattr("atoll.ensemble.sampler.Sampler.generate", None)
    monkeypatch.setattr("atoll.apps.evaluate.diagnostics.measure", None)
    monkeypatch.setattr("atoll.apps.evaluate.diagnostics.validate", None)
    monkeypatch.setattr("atoll.apps.evaluate.feature_sets.open_configured", None)
    assert cli.main(["evaluate", str(trained), *SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result
    assert files(trained) == before
    assert cli.main(["evaluate", str(trained), *SMALL]) == 0
    assert "monolith" in capsys.readouterr().out


ALONE: dict[str, Any] = {"load": LoadOptions(), "processes": DistContext(0, 1, torch.device("cpu"))}


def test_metrics_can_be_computed_again_from_the_stored_images(trained: Path, result: dict[str, Any]) -> None:
    config, model = configuration.load(trained), EvaluatedModel(trained, "experts", "top-1")
    prompts = prompts_of(trained, 3, 12)
    settings = SampleSettings(routing="top-1", steps=3)
    images = generate(model, prompts, settings, purpose="metrics", batch_size=64, **ALONE)
    generated = generated_features(trained, images, EXTRACTOR)
    real = reference_features(trained, config, "train", num_real=24, vision=EXTRACTOR)
    found = result["models"][0]["metrics"][EXTRACTOR]
    distance = frechet(Gaussian.of(generated.features()), Gaussian.of(real.features()))
    assert distance == pytest.approx(found["frechet"], rel=1e-9)
    assert kernel_distance(generated.features(), real.features()).value == pytest.approx(
        found["kid"]["value"], rel=1e-9
    )
    pixels = np.concatenate(list(images.chunks()))
    assert pixels.shape == (12, 32, 32, 3)
    assert pixels.dtype == np.uint8
    assert (images.artifact.folder / "sheet.png").is_file()


def test_statistics_of_others_are_a_reference(trained: Path, tmp_path: Path) -> None:
    config = configuration.load(trained)

    def measured(reference: str) -> dict[str, Any]:
        arguments = [
            "--num-images",
            "6",
            "--num-real",
            "8",
            "--steps",
            "3",
            "--models",
            "experts",
            "--routings",
            "top-1",
        ]
        arguments += ["--without", "diversity", "diagnostics", "trajectories", "--allow-small"]
        assert cli.main(["evaluate", str(trained), *arguments, "--reference", reference]) == 0
        found = json.loads((trained / "evaluation" / "latest.json").read_text())
        metrics: dict[str, Any] = found["models"][0]["metrics"]["inception"]
        return metrics

    # The same eight images as a split of the run, and as a file in ADM's layout with moments from numpy.
    split = measured("train")
    real = reference_features(trained, config, "train", num_real=8, vision="inception")
    features = real.features().double().numpy()
    moments = {"mu": features.mean(0), "sigma": np.cov(features, rowvar=False)}
    images = np.concatenate([np.stack(batch) for _, batch in real.batches([0])])
    np.savez(tmp_path / "adm.npz", arr_0=images, mu_s=np.zeros(2023), **moments)
    np.savez(tmp_path / "moments.npz", **moments)
    whole, alone = measured(str(tmp_path / "adm.npz")), measured(str(tmp_path / "moments.npz"))
    assert whole["frechet"] == pytest.approx(split["frechet"], rel=1e-5)
    assert alone["frechet"] == whole["frechet"]
    assert whole["kid"]["value"] == pytest.approx(split["kid"]["value"], rel=1e-5)
    assert whole["protocol"]["reference"]["num_images"] == 8
    assert not {"kid", "precision_recall", "real_baseline"} & alone.keys()
    # Others are refused before anything is generated.
    np.savez(tmp_path / "other.npz", mu=np.zeros(64), sigma=np.zeros((64, 64)))
    for name, reason in (("other.npz", "expected mu"), ("missing.npz", "not an .npz file")):
        options = EvaluationOptions(reference=str(tmp_path / name), allow_small=True)
        with pytest.raises(AtollError, match=reason):
            evaluate(trained, config, options)


def test_an_interrupted_set_resumes_and_has_the_same_images(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.apps.evaluate.generated.CHUNK", 4)
    prompts, model = prompts_of(trained, 3, 10), EvaluatedModel(trained, "experts", "top-2")
    settings = SampleSettings(routing="top-2", steps=2)
    whole = generate(model, prompts, settings, purpose="whole", batch_size=64, **ALONE)
    pixels = np.concatenate(list(whole.chunks()))
    shutil.copytree(whole.artifact.folder, tmp_path / "kept")
    (whole.artifact.folder / "manifest.json").unlink()
    (whole.artifact.folder / "000001.safetensors").unlink()
    again = generate(model, prompts, settings, purpose="whole", batch_size=3, **ALONE)
    # The missing images were sampled with another batch size, whose rounding may change a pixel by one.
    assert np.abs(np.concatenate(list(again.chunks())).astype(int) - pixels.astype(int)).max() <= 1
    kept = "000002.safetensors"
    assert sha256_of(tmp_path / "kept" / kept) == sha256_of(again.artifact.path(kept))


def test_too_few_images_are_an_error_unless_allowed(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [argument for argument in SMALL if argument != "--allow-small"]
    assert cli.main(["evaluate", str(trained), *arguments]) == 2
    message = capsys.readouterr().err
    assert "12 generated and 24 real images are too few" in message
    assert "the Frechet distance needs 1,281" in message
    assert "--allow-small" in message


@pytest.mark.parametrize(
    ("options", "removed", "message"),
    [
        ((), "", "24 real images are too few"),
        (
            ("--allow-small",),
            "router",
            "experts top-1: .*router/final is missing; train it with: atoll train .* --router",
        ),
        (("--allow-small", "--models", "expert:1"), "experts/001", "train it with: atoll train .* --expert 1"),
        (("--allow-small",), "experts/002/final/config.json", "config.json is missing although the manifest lists it"),
        (("--allow-small", "--extractors", "inception:missing.pt"), "", "missing.pt"),
        (("--allow-small", "--lpips", "missing.pt"), "", "missing.pt"),
    ],
)
def test_what_would_stop_the_evaluation_stops_it_before_any_work(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    removed: str,
    message: str,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("evaluation"))
    if removed:
        (shutil.rmtree if (run / removed).is_dir() else Path.unlink)(run / removed)
    small = [argument for argument in SMALL if argument != "--allow-small"]
    assert cli.main(["evaluate", str(run), *small, *options]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (run / "evaluation").exists(), "it has computed something"


def test_mixed_velocities_of_the_diagnostics_are_those_of_the_ensemble(trained: Path) -> None:
    """The error of a routing, mixed from the velocities of the experts, is that of the ensemble's velocity."""
    model, shards = load(trained).ensemble, Shards.open(trained, [0, 1, 2], "validation")
    routings = ["top-1", "top-2", "full", "oracle", "drawn", "sample-1", "threshold-0.4"]
    measured = diagnostics.measure(model, shards, routings, limit=5, seed=3)
    assert len(measured.t) == 10 * sum(min(5, size) for size in shards.cluster_sizes())
    for routing in routings:
        errors = []
        for part in ValidationSet(shards, 3, 5).batches(model.device):
            noised, cluster, draw = part.noised, part.batch.cluster, diagnostics.draw_of(part, 3)
            condition = condition_of(part.batch, model.conditioning)
            with torch.no_grad():
                v = model.velocity(noised.input, noised.t, condition, routing=routing, cluster=cluster, draw=draw)
            weight = (noised.t / 0.05).square().clamp(max=1)
            errors.append(weight * (v - noised.target).square().flatten(1).mean(1))
        assert torch.cat(errors).allclose(measured.routed[routing], rtol=1e-4, atol=1e-6)
    own = measured.errors.gather(1, measured.cluster[:, None])[:, 0]
    assert own.allclose(measured.routed["oracle"])
    assert measured.nearest is not None
    accuracy = diagnostics.summarize(measured).nearest.accuracy.mean
    assert accuracy == pytest.approx((measured.nearest.argmax(1) == measured.column).double().mean().item())


def test_a_cluster_without_validation_images_gives_no_prompts(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained / "data" / "shards", tmp_path / "data" / "shards")
    shards = Artifact(tmp_path, "data/shards/cluster_001")
    manifest = shards.open(SHARDS)
    kept = {file: shards.path(file).read_bytes() for file in manifest.files if not file.startswith("validation")}
    shutil.rmtree(shards.folder)
    shards.begin(SHARDS, dict(manifest.made_from))
    for file, content in kept.items():
        shards.write(file, content)
    shards.commit({**manifest.content, "rows": {**manifest.content["rows"], "validation": 0}})
    prompts = prompts_of(tmp_path, 3, 12)
    assert len(prompts.clusters) == 12
    assert set(prompts.clusters) == {0, 2}
    assert "no prompts for cluster 1: it has no validation images" in capsys.readouterr().out
    assert set(prompts_of(tmp_path, 3, 12, split="train").clusters) == {0, 1, 2}


def test_all_models_have_validation_errors(result: dict[str, Any]) -> None:
    found = result["diagnostics"]
    assert set(found["dense"]) == {"monolith", "student"}
    assert set(found["experts"]["velocity_error"]) == {"top-1", "full", "oracle", "drawn"}
    for errors in [*found["dense"].values(), *found["experts"]["velocity_error"].values()]:
        assert len(errors["by_time"]) == 10
        assert 0.1 < errors["mean"] < 10
    matrix = torch.tensor(found["experts"]["expert_on_cluster"]["mean"])
    assert matrix.shape == (3, 3)


def test_the_models_to_evaluate(trained: Path, tmp_path: Path) -> None:
    assert [model.label for model in evaluated_models(trained, ["singles"], [])] == ["expert:0", "expert:1", "expert:2"]
    with pytest.raises(AtollError, match="did you mean 'student'"):
        evaluated_models(trained, ["studnt"], [])
    with pytest.raises(AtollError, match="no trained network"):
        evaluated_models(tmp_path, [], ["top-1"])
    with pytest.raises(AtollError, match="did you mean 'metrics'"):
        EvaluationOptions(without=("metric",))


def test_parts_can_be_left_out(trained: Path) -> None:
    config = configuration.load(trained)
    options = EvaluationOptions(
        models=("expert:1",),
        steps=(2,),
        num_trajectories=2,
        without=("metrics", "diversity", "diagnostics"),
    )
    result = evaluate(trained, config, options)
    assert EvaluationResult.read(trained) == result
    assert result.models[0].label == "expert:1"
    (model,) = json.loads((trained / layout.LATEST_EVALUATION).read_text())["models"]
    assert set(model) == {"model", "routing", "label", "training", "trajectory"}


def test_a_cached_result_with_other_fields_is_computed_again(tmp_path: Path) -> None:
    computed: list[Coverage] = []

    def compute() -> Coverage:
        computed.append(precision_recall(torch.rand(8, 2), torch.rand(8, 2)))
        return computed[0]

    def find() -> Coverage:
        return cached(tmp_path, "metrics", "coverage", made_from={}, result=Coverage, compute=compute)

    found = find()
    assert (find(), len(computed)) == (found, 1)
    (file,) = tmp_path.rglob("metrics.json")
    text = file.read_bytes()
    for other in ({"precision": 2.0}, {**json.loads(text), "median": 2.0}):
        file.write_text(json.dumps(other))
        assert find() == found
        assert file.read_bytes() == text
    assert (find(), len(computed)) == (found, 3)


def test_an_evaluation_of_another_version_is_an_error_that_names_the_command(tmp_path: Path) -> None:
    assert EvaluationResult.read(tmp_path) is None
    (tmp_path / "evaluation").mkdir()
    (tmp_path / layout.LATEST_EVALUATION).write_text('{"models": []}')
    with pytest.raises(AtollError, match=f"another version of Atoll; .*atoll evaluate {tmp_path}"):
        EvaluationResult.read(tmp_path)


def test_several_numbers_of_steps_are_rows_with_the_images_of_each_number_alone(
    trained: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*SMALL[: SMALL.index("--steps")], *SMALL[SMALL.index("--steps") + 2 : SMALL.index("--routings")]]
    options += ["--allow-small", "--models", "experts", "monolith", "--routings", "drawn"]
    options += ["--without", "diversity", "trajectories", "--steps", "1", "3", "--solver", "euler", "heun"]
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    assert cli.main(["evaluate", str(run), *options]) == 0
    assert "evaluations" in capsys.readouterr().out
    found = EvaluationResult.read(run)
    assert found is not None
    variants = ["1 euler step", "3 euler steps", "1 heun step", "3 heun steps"]
    assert [row.label for row in found.models] == [
        f"{model}, {variant}" for model in ("experts drawn", "monolith") for variant in variants
    ]
    assert [row.sampling.network_evaluations for row in found.models if row.sampling] == [2, 6, 2, 10] * 2  # guided
    metrics = [row.metrics[EXTRACTOR] for row in found.models]
    # Three Euler steps are the set of the evaluation with this number alone; one step of Heun is one of Euler.
    alone = {model["label"]: model["metrics"][EXTRACTOR] for model in result["models"]}
    assert metrics[1].protocol.set == alone["experts drawn"]["protocol"]["set"]
    assert (metrics[1].kid, metrics[5].frechet) == (
        KernelDistance(**alone["experts drawn"]["kid"]),
        alone["monolith"]["frechet"],
    )
    assert metrics[0].kid == metrics[2].kid != metrics[1].kid
    assert len({metric.reference_fingerprint for metric in (one.protocol for one in metrics)}) == 1
    # Every row is compared with the row of most evaluations of its own model.
    quality = tables(found)[0]
    assert quality.columns.index("evaluations") == 0
    column = quality.columns.index("of its longest")
    ratios = [cells[column].value for row, cells in quality.rows if isinstance(row, ModelResult)]
    kids = [metric.kid.value for metric in metrics if metric.kid]
    assert ratios == [*(kid / kids[3] for kid in kids[:4]), *(kid / kids[7] for kid in kids[4:])]
    # The report draws them: a line for each model and solver, at its evaluations.
    (chart,) = steps_charts(found).values()
    assert [(line.name, [x for x, _ in line.points], line.dashed) for line in chart.lines] == [
        ("experts drawn euler", [2, 6], False),
        ("experts drawn heun", [2, 10], True),
        ("monolith euler", [2, 6], False),
        ("monolith heun", [2, 10], True),
    ]
    assert chart.x_ticks == [2, 4, 8]
    assert [chart.x(value) for value in (2, 10)] == [chart.LEFT, chart.WIDTH - chart.RIGHT]
    assert chart.x(20**0.5) == pytest.approx((chart.x(2) + chart.x(10)) / 2)
    assert chart.lines[0].points[0][1] == 1000 * kids[0]
    assert cli.main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "--steps 1 3 --solver euler heun" in page
    assert "--routings drawn" in page
    assert f'aria-label="{chart.alt}"' in page
    assert "<small>3 heun steps</small>" in page
