"""The estimates of a dry run. The memory itself is compared with torch's allocator in tests/nullgpu/test_memory.py."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll import cli
from atoll.core import config
from atoll.core.config_sections import TrainSection
from atoll.core.networks import NetworkConfig, read_network
from atoll.data.shapes import DataShapes, TextShape
from atoll.ensemble.memory_plan import HEAP
from atoll.experts.cost import Product, image_cost, measured_rate, parameter_count
from atoll.flow import objective
from atoll.train import resolve_job
from atoll.train.estimate import WORKSPACE, JobCosts, job_bytes
from train.conftest import Copy

SHAPES = DataShapes((4, 16, 16), TextShape(8, 32, 32), ())
WIDTH, DEPTH, TOKENS = 64, 3, 64
GPU = torch.device("cuda")
"""Not used: the estimate needs no GPU."""


def network(size: int = 16, **fields: object) -> NetworkConfig:
    return read_network(
        {
            "_class_name": "DiT", "patch": 2, "width": WIDTH, "depth": DEPTH, "heads": 2, "channels": 4, "size": size,
            "out_channels": 4, "text_width": 32, **fields,
        }
    )  # fmt: skip


def estimate(settings: TrainSection, **options: object) -> int:
    return job_bytes(network(), SHAPES, settings, **{"device": GPU, **options})


def settings(**fields: object) -> TrainSection:
    return TrainSection(**{"batch_size": 64, "sample_every": 0, "precision": "float32", **fields})


def test_activations_of_attention_grow_with_the_tokens_and_not_with_their_square() -> None:
    """Fused attention stores no matrix (tokens, tokens), which would grow sixteenfold."""
    shapes = DataShapes((4, 64, 64), SHAPES.text, ())
    few, many = (
        [job_bytes(network(size), sizes, settings(batch_size=batch), device=GPU) for batch in (8, 16)]
        for size, sizes in ((32, replace(shapes, latents=(4, 32, 32))), (64, shapes))
    )
    assert (many[1] - many[0]) / (few[1] - few[0]) == pytest.approx(4, rel=0.02)


def test_gradients_are_kept_between_micro_batches_and_by_ddp() -> None:
    """Two processes with DDP keep the gradients as two micro-batches of one process do: the same bytes."""
    weights = 4 * parameter_count(network())
    kept = estimate(settings(batch_size=128, grad_accum_steps=2))
    assert estimate(settings(batch_size=128), processes=2) == kept
    assert 0.9 * weights < kept - estimate(settings(batch_size=64)) <= 1.1 * weights


def test_each_ema_costs_the_weights_once_more() -> None:
    one, two = (estimate(settings(ema=dict.fromkeys(names, 1000.0))) for names in ("a", "ab"))
    assert two - one == 4 * parameter_count(network())


def test_half_precision_and_checkpointing_need_less_memory() -> None:
    plain = estimate(settings())
    assert estimate(settings(precision="bfloat16")) < 0.8 * plain
    assert estimate(settings(activation_checkpointing=True)) < 0.6 * plain


def test_on_a_cpu_a_checkpoint_is_written_from_a_copy_of_the_state() -> None:
    """One more state than on a GPU, whose copy is in the host's memory; and the holes of the heap."""
    state = 4 * 4 * parameter_count(network())
    activations = estimate(settings()) - WORKSPACE - state
    assert estimate(settings(), device=torch.device("cpu")) == 2 * state + int(HEAP * activations)


def test_fsdp2_divides_the_state() -> None:
    """With tiny batches most of the memory is the state: weights, moments, EMA and gradients."""
    wide = network(width=512, heads=8)
    alone, eight = (
        job_bytes(
            wide, SHAPES, settings(batch_size=8, parallel="fsdp2", grad_accum_steps=accumulated), device=GPU,
            processes=processes,
        )
        for processes, accumulated in ((1, 8), (8, 1))
    )  # fmt: skip
    assert eight < 0.6 * alone


@pytest.mark.parametrize(("name", "count"), [("flow-matching", 64), ("ddpm", 2)])
def test_a_preview_counts_if_it_needs_more_than_a_step(name: str, count: int) -> None:
    """Half of 64 images at a time, with two rows for each; or 64 images on which the bridge of DDPM is calibrated."""
    spec, rows = objective(name).spec, 64
    step = estimate(settings(batch_size=1), objective=spec)
    preview = estimate(settings(batch_size=1, sample_every=1, sample_count=count), objective=spec)
    # At the peak at least the residual stream, and the hidden layer of the MLP before and after its activation.
    assert preview - step > 4 * (rows * TOKENS * (1 + 4 + 4) * WIDTH - parameter_count(network()))
    assert estimate(settings(sample_every=1, sample_count=2)) == estimate(settings()), "a step of 64 needs more"


def test_the_largest_product_is_that_of_the_mlp() -> None:
    assert image_cost(network(), SHAPES).largest_product == Product(TOKENS, WIDTH, 4 * WIDTH)
    assert Product(2, 3, 5).flops == 60


def test_a_measured_rate_counts_the_flops_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that advances by 8 ms between two readings, whatever happens in between."""
    clock = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: 0.008 * next(clock))
    product = Product(1000, 16, 32)
    # Rows are doubled from 256 to all 1,000. Three products fill the 20 ms of a measurement, as far as the clock shows.
    assert measured_rate(torch.device("cpu"), torch.float32, product) == pytest.approx(3 * product.flops / 0.008)


def test_a_dry_run_for_gpus_assumes_their_precision(new_run: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(train={"batch_size": 64})
    found = {}
    for precision in ("auto", "bfloat16", "float32"):
        options = ("--dry-run", "--gpus", "1", "--train.precision", precision, "--json")
        assert cli.main(["train", str(run), "--expert", "0", *options]) == 0
        found[precision] = json.loads(capsys.readouterr().out)["bytes"]
    assert found["auto"] == found["bfloat16"] < found["float32"]


def test_the_memory_of_a_student_includes_a_teacher(trained_experts: Path) -> None:
    student, monolith = (
        JobCosts.of(resolve_job(trained_experts, config.load(trained_experts), kind))
        for kind in ("student", "monolith")
    )
    assert student.parameters == monolith.parameters, "its teachers have the same network"
    assert student.bytes - monolith.bytes == 4 * student.parameters, "on a CPU teachers are in float32"
