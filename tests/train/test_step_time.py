"""The time of a step on GPUs, with numbers that can be added by hand."""

from dataclasses import replace

import pytest

from atoll.core.config_sections import TrainSection
from atoll.experts.cost import Cost, Product
from atoll.train.estimate import GPUS, Gpu, step_seconds

COST = Cost(
    parameters=1_000_000_000,
    forward_flops=0,
    largest_product=Product(1, 1, 1),
    muon_flops=0,
    blocks=25,
    layer_outputs=0,
)
GPU = Gpu(flops=1e15, memory=80e9, memory_bandwidth=5e12, link=1e11)
OPTIMIZER = 52e9 / (0.8 * 5e12)
"""52 bytes a weight with one EMA: 12 for clipping, 28 for AdamW, 12 for the EMA."""
LAUNCHES = 25 * 36 * 6e-6


def seconds(flops: float, gpus: int = 1, **settings: object) -> float:
    return step_seconds(COST, flops, TrainSection.model_validate(settings), gpu=GPU, gpus=gpus)


def test_one_gpu_has_passes_and_optimizer() -> None:
    assert seconds(1e14) == pytest.approx(0.2 + OPTIMIZER)
    two = seconds(1e14, ema={"short": 1e3, "long": 1e4})
    assert two == pytest.approx(0.2 + OPTIMIZER * 64 / 52)
    assert seconds(1e14, parallel="fsdp2") == seconds(1e14), "nothing is sharded"


def test_passes_take_at_least_the_launches_of_all_micro_batches() -> None:
    assert seconds(1e9) == pytest.approx(LAUNCHES + OPTIMIZER)
    assert seconds(1e9, batch_size=32, grad_accum_steps=4) == pytest.approx(4 * LAUNCHES + OPTIMIZER)


def test_ddp_sends_gradients_twice_during_the_last_backward_pass() -> None:
    exchange = 3 / 4 * 8e9 / (0.8 * 1e11)  # 75 ms
    assert seconds(4e13, 4) == pytest.approx(0.02 + (exchange - 0.02 * 2 / 3) + OPTIMIZER)
    assert seconds(4e14, 4) == pytest.approx(0.2 + OPTIMIZER), "hidden behind the backward pass of 133 ms"
    split = seconds(4e14, 4, batch_size=32, grad_accum_steps=4)
    assert split == pytest.approx(0.2 + (exchange - 0.2 / 4 * 2 / 3) + OPTIMIZER)


def test_fsdp2_gathers_weights_twice_a_micro_batch_and_shards_the_optimizer() -> None:
    options = {"parallel": "fsdp2", "precision": "bfloat16"}
    exchange = 3 / 4 * 8e9 / (0.8 * 1e11)
    assert seconds(4e13, 4, **options) == pytest.approx(0.02 + (exchange - 0.02) + OPTIMIZER / 4)
    twice = seconds(4e13, 4, **options, batch_size=32, grad_accum_steps=2)
    assert twice == pytest.approx(0.02 + (exchange * 12 / 8 - 0.02) + OPTIMIZER / 4)
    full = seconds(4e13, 4, **options | {"precision": "float32"})
    assert full == pytest.approx(0.02 + (exchange * 12 / 8 - 0.02) + OPTIMIZER / 4)


def test_four_images_of_a_dit_xl_take_about_29_ms_on_each_of_eight_h100() -> None:
    """7 ms for the FLOPs at 41 %, 13 ms for the optimizer, 13 ms for the gradients, a third of it hidden."""
    cost = replace(COST, parameters=675_000_000, blocks=28)
    step = step_seconds(cost, 32 * 3 * 237e9, TrainSection(), gpu=GPUS["H100"], gpus=8)
    assert step == pytest.approx(28.5e-3, rel=0.05)
