"""The validation error in a manifest equals the one of `atoll evaluate`."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll import cli
from atoll.apps.evaluate import diagnostics
from atoll.apps.evaluate.evaluation import evaluate
from atoll.apps.evaluate.options import EvaluationOptions
from atoll.apps.evaluate.results import Diagnostics
from atoll.core import config as configuration
from atoll.core.artifacts import Artifact
from atoll.experts.validation import IMAGES
from train.conftest import merge
from train.posterior import give_posterior
from train.workers import TINY

ROUNDING = 1e-5
"""Relative tolerance: the ensemble evaluates an expert with other batch sizes than training."""


def diagnose(run: Path, **options: Any) -> Diagnostics:
    settings = {"steps": (2,), "seed": 5}  # the sampling seed must not affect validation
    without = ("metrics", "diversity", "trajectories")
    chosen = EvaluationOptions(routings=("top-1", "oracle"), **settings, without=without, **options)
    found = evaluate(run, configuration.load(run), chosen).diagnostics
    assert found is not None
    return found


def declared(run: Path, job: str) -> dict[str, Any]:
    manifest = Artifact(run, f"{job}/final").manifest()
    assert manifest is not None
    return dict(manifest.content)


def test_the_validation_error_of_a_manifest_equals_the_one_of_evaluate(trained: Path) -> None:
    found = diagnose(trained)
    matrix = found.experts.expert_on_cluster
    for expert in range(3):
        content = declared(trained, f"experts/{expert:03d}")
        assert matrix.mean[expert][expert] == pytest.approx(content["validation_loss"], rel=ROUNDING)
        by_time = [table[expert][expert] for table in matrix.by_time]
        assert by_time == pytest.approx(content["loss_by_time"], rel=ROUNDING)
    for model in ("monolith", "student"):
        content = declared(trained, model)
        assert found.dense[model].mean == pytest.approx(content["validation_loss"], rel=ROUNDING)
        assert found.dense[model].by_time == pytest.approx(content["loss_by_time"], rel=ROUNDING)
    router = declared(trained, "router")
    assert found.experts.router.cross_entropy.mean == pytest.approx(router["validation_loss"], rel=ROUNDING)
    assert found.experts.router.accuracy.by_time == pytest.approx(router["accuracy_by_time"])


def test_fewer_validation_images_give_another_error(trained: Path) -> None:
    """`--num-val` limits the images of each cluster, so fewer than in training give another error."""
    found = diagnose(trained, num_val=2)
    assert found.num_images == 6
    own = found.experts.expert_on_cluster.mean[0][0]
    assert own != pytest.approx(declared(trained, "experts/000")["validation_loss"], rel=1e-3)


def test_diagnostics_of_another_definition_are_computed_again(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors under the old definition must not be reported beside new ones, for dense models too."""
    diagnose(trained, num_val=3)
    before = set((trained / "evaluation/diagnostics").iterdir())
    diagnose(trained, num_val=3)
    assert set((trained / "evaluation/diagnostics").iterdir()) == before
    monkeypatch.setattr(diagnostics, "DEFINITION_VERSION", diagnostics.DEFINITION_VERSION + 1)
    diagnose(trained, num_val=3)
    new = {folder.name.split("-")[0] for folder in set((trained / "evaluation/diagnostics").iterdir()) - before}
    assert new == {"experts", "monolith", "student"}


def test_evaluate_and_training_use_the_same_number_of_validation_images_by_default() -> None:
    assert EvaluationOptions().num_val == IMAGES


def test_the_errors_agree_if_latents_are_samples_of_a_posterior(prepared: Path, tmp_path: Path) -> None:
    """With the posterior mean instead of a sample, the error would be much lower here."""
    give_posterior(prepared, tmp_path, std=1.0)
    values = merge(yaml.safe_load((prepared / "atoll.yaml").read_text()), TINY)
    (tmp_path / "atoll.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    assert cli.main(["train", str(tmp_path), "--expert", "0", "--train.total_images", "16"]) == 0
    found = diagnose(tmp_path).experts.expert_on_cluster
    assert found.mean[0][0] == pytest.approx(declared(tmp_path, "experts/000")["validation_loss"], rel=ROUNDING)
