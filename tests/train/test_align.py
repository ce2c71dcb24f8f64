"""Alignment with patch features: its loss, its end, exact resume, costs and errors."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from atoll import cli
from atoll.core import config as configuration
from atoll.core.artifacts import Artifact
from atoll.core.distributed import DistContext
from atoll.core.errors import AtollError
from atoll.nets import build
from atoll.train import build_task, resolve_job
from atoll.train.align import AlignmentSpec, Projector, averaging
from atoll.train.checkpoints import Checkpoints
from atoll.train.estimate import job_bytes
from atoll.train.loop import train
from atoll.train.spec import TrainSpec, made_from
from train.conftest import Copy, merge
from train.test_parallel import assert_close_weights, run_two
from train.workers import TINY, assert_same_weights, finish, kill_at, metrics, weights

SETTINGS = {"train": {"align": {"weight": 0.5, "until": 0.5}}}
ALONE = DistContext(0, 1, torch.device("cpu"))
CPU = torch.device("cpu")
SPEC = AlignmentSpec(weight=0.5, block=1, images=80, width=6, patch=2, tokens=4, grid=4, steps=(0.5, 2.0, 0.1))


@pytest.fixture
def aligned(with_patches: Path, tmp_path: Path) -> Copy:
    """Return a function that copies the prepared run with patches, with alignment."""

    def copy(name: str = "run", only: tuple[int, ...] = (0, 1, 2), **changes: dict) -> Path:
        run = tmp_path / name
        values = merge(merge(yaml.safe_load((with_patches / "atoll.yaml").read_text()), TINY), SETTINGS)
        for cluster in only:
            folder = f"data/shards/cluster_{cluster:03d}"
            shutil.copytree(with_patches / folder, run / folder)
        (run / "atoll.yaml").write_text(yaml.safe_dump(merge(values, changes), sort_keys=False))
        return run

    return copy


def resolve(run: Path, kind: str = "expert", **overrides: str) -> TrainSpec:
    config = configuration.load(run, {key.replace("__", "."): value for key, value in overrides.items()})
    return resolve_job(run, config, kind, expert=0 if kind == "expert" else None)


def grid_mean(values: np.ndarray, factor: int) -> np.ndarray:
    """Average (B, n², D) over squares of a grid."""
    batch, cells, width = values.shape
    side = int(cells**0.5) // factor
    return values.reshape(batch, side, factor, side, factor, width).mean((2, 4)).reshape(batch, side**2, width)


@pytest.mark.parametrize(("tokens", "grid"), [(4, 4), (8, 4), (4, 8)])
def test_the_loss_is_the_negative_cosine_over_patches(tokens: int, grid: int) -> None:
    torch.manual_seed(0)
    projector = Projector(replace(SPEC, tokens=tokens, grid=grid))
    hidden = torch.randn(2, tokens**2, 6)
    patches = torch.randint(-127, 128, (2, grid, grid, 3), dtype=torch.int8)
    target = patches.numpy().reshape(2, -1, 3).astype(np.float64) * SPEC.steps
    x = hidden.double().numpy()
    x, target = (grid_mean(part, side // min(tokens, grid)) for part, side in ((x, tokens), (target, grid)))
    first, second, third = (layer for layer in projector.layers if isinstance(layer, torch.nn.Linear))
    for number, layer in enumerate((first, second, third)):
        x = x if number == 0 else x / (1 + np.exp(-x))  # SiLU
        x = x @ layer.weight.detach().double().numpy().T + layer.bias.detach().double().numpy()
    cosine = (x * target).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(target, axis=-1)
    torch.testing.assert_close(
        projector(hidden, patches, (tokens, tokens)).double().detach(), torch.from_numpy(-cosine.mean(1))
    )


@pytest.mark.parametrize(("fine", "coarse"), [(8, 4), (14, 4), (5, 3)])
def test_averaging_is_by_area(fine: int, coarse: int) -> None:
    """Repeated to a common multiple, the average is that of equal squares."""
    matrix, grid = averaging((fine, 6), (coarse, 4), device=CPU), torch.randn(1, 1, fine, 6)
    repeated = grid.repeat_interleave(coarse, 2).repeat_interleave(4, 3)
    expected = functional.avg_pool2d(repeated, (fine, 6))
    torch.testing.assert_close((matrix @ grid.flatten()).view(1, 1, coarse, 4), expected)


def test_a_tap_does_not_change_the_prediction_and_is_the_output_of_its_block(aligned: Copy) -> None:
    spec = resolve(aligned())
    network = build(spec.network)
    torch.nn.init.normal_(network.final.linear.weight)
    x, t = torch.randn(2, 3, 32, 32), torch.tensor([10.0, 500.0])
    kept: list[torch.Tensor] = []
    network.blocks[0].register_forward_hook(lambda *call: kept.append(call[2]))
    output, tokens = network(x, t, tap=1)
    assert torch.equal(output, network(x, t))
    assert torch.equal(tokens, kept[0])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_the_alignment_reach_the_blocks_before_it(aligned: Copy, checkpointing: bool) -> None:
    spec = resolve(aligned(), train__activation_checkpointing=str(checkpointing))
    task = build_task(spec)
    inputs = next(task.stream(0, ALONE))
    losses = task.losses(task.network, inputs)
    assert losses.regularization is not None
    assert torch.equal(losses.minimized, losses.loss + 0.5 * losses.extra["alignment"])
    losses.regularization.sum().backward()
    gradients = [sum(float(p.grad.abs().sum()) for p in block.parameters() if p.grad is not None)
                 for block in task.network.blocks]  # fmt: skip
    assert gradients[0] > 0
    assert gradients[1] == 0


def test_after_the_burn_in_training_is_the_ordinary_one(aligned: Copy, tmp_path: Path) -> None:
    """From the checkpoint at its end, a job without alignment has the same bits, and the result has no projector."""
    run = aligned(train={"save_every": 80, "keep_last": 9})
    spec, plain = resolve(run), resolve(run, train__align="null")
    assert spec.align is not None
    assert spec.align.images == 80
    inputs = made_from(spec)
    kept: list[Path] = []

    class Keep:
        def on_step(self, images: int) -> bool:
            return images < 0

        def on_checkpoint(self, checkpoint: Artifact) -> None:
            kept.append(checkpoint.folder)

    with_alignment, _ = train(build_task(spec), Checkpoints(run, "a", inputs, ALONE, 9), Keep())
    assert [folder.name for folder in kept] == [f"{images:012d}" for images in (80, 160)]
    assert any(":auxiliary.optimizer.exp_avg.layers.0.weight" in key for key in weights(kept[0]))
    shutil.copytree(kept[0], run / "b/checkpoints" / kept[0].name)
    without, _ = train(build_task(plain), Checkpoints(run, "b", inputs, ALONE))
    for name, ema in with_alignment.weights.items():
        for key, value in ema.items():
            assert torch.equal(value, without.weights[name][key]), key
    shutil.copytree(kept[0], run / "c/checkpoints" / kept[0].name)
    task = build_task(spec)
    train(task, Checkpoints(run, "c", inputs, ALONE))
    assert task.auxiliary is not None
    saved = weights(kept[0])
    for key, value in task.auxiliary.named_parameters():
        assert torch.equal(value, saved[f"state-00000.safetensors:auxiliary.network.{key}"]), "it no longer changes"


def test_the_log_has_a_column_of_the_alignment_until_its_end(aligned: Copy) -> None:
    run = aligned(train={"align": {"until": 0.55}})  # 88 of 160 images: not a multiple of log_every
    assert finish(run, "--expert", "0") == 0, (run / "log.txt").read_text()
    lines = metrics(run, "experts/000")
    assert [line["images"] for line in lines] == [32, 64, 88, 96, 128, 160]
    assert ["alignment" in line for line in lines] == [True] * 3 + [False] * 3
    assert lines[2]["alignment"] < lines[0]["alignment"] < 0.2
    assert not any("projector" in key or "layers" in key for key in weights(run / "experts/000/final"))


def test_a_killed_job_resumes_to_the_same_weights(aligned: Copy) -> None:
    """With flips; the kill is in the burn-in. The job has the shards of its cluster only."""
    straight, broken = (aligned(name, only=(1,), train={"align": {"until": 0.8}}) for name in ("straight", "broken"))
    assert finish(straight, "--expert", "1") == 0, (straight / "log.txt").read_text()
    kill_at(broken, 32, "--expert", "1")
    assert finish(broken, "--expert", "1") == 0
    assert_same_weights(straight / "experts/001/final", broken / "experts/001/final")
    found = [
        [(line["loss"], line.get("alignment")) for line in metrics(run, "experts/001")] for run in (straight, broken)
    ]
    assert found[0] == found[1]
    assert sorted(path.name for path in (straight / "data/shards").iterdir()) == ["cluster_001"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_processes_equal_one(parallel: str, aligned: Copy) -> None:
    alone, two = aligned("alone"), aligned("two", train={"parallel": parallel})
    assert finish(alone, "--expert", "0") == 0
    run_two(two, "--expert", "0")
    for key in ("loss", "alignment"):
        first, second = ([line[key] for line in metrics(run, "experts/000") if key in line] for run in (alone, two))
        assert second == pytest.approx(first, rel=1e-4, abs=1e-5)
        assert len(first) == {"loss": 6, "alignment": 3}[key]
    assert_close_weights(two, alone)


def test_gradient_accumulation_gives_the_same_losses(aligned: Copy) -> None:
    runs = [aligned("one"), aligned("four", train={"grad_accum_steps": 4})]
    for run in runs:
        assert finish(run, "--expert", "0") == 0
    one, four = ([line["loss"] for line in metrics(run, "experts/000")] for run in runs)
    assert four == pytest.approx(one, rel=1e-4)


def test_flops_are_those_of_the_products_for_the_images_of_the_burn_in(aligned: Copy) -> None:
    run = aligned()
    spec, plain = resolve(run), resolve(run, train__align="null")
    assert spec.align is not None
    for align in (spec.align, replace(spec.align, tokens=16)):
        projector = Projector(align)
        patches = torch.zeros(1, align.grid, align.grid, 64, dtype=torch.int8)
        with FlopCounterMode(display=False) as counter:
            projector(torch.zeros(1, align.tokens**2, align.width), patches, (align.tokens, align.tokens))
        averaged = 2 * align.tokens**2 * align.grid**2 * 64 if align.grid > align.tokens else 0  # needs no gradient
        assert 3 * (counter.get_total_flops() - averaged) == align.flops
        assert sum(parameter.numel() for parameter in projector.parameters()) == align.parameters
    assert finish(run, "--expert", "0") == 0
    flops = json.loads((run / "experts/000/final/manifest.json").read_text())["content"]["compute"]["flops"]
    shutil.rmtree(run / "experts")
    assert finish(run, "--expert", "0", "--train.align", "null") == 0
    without = json.loads((run / "experts/000/final/manifest.json").read_text())["content"]["compute"]["flops"]
    assert flops - without == 80 * spec.align.flops
    device = torch.device("cuda")
    sizes = [
        job_bytes(one.network, one.shapes, one.settings, device=device, objective=one.objective, align=one.align)
        for one in (spec, plain)
    ]
    # Weights, moments and gradients of the projector. Its activations are small beside those of the network.
    assert sizes[0] - sizes[1] == 16 * spec.align.parameters


def test_a_resume_needs_the_same_burn_in(aligned: Copy) -> None:
    run = aligned()
    assert made_from(resolve(run))["train"]["align"] == {"weight": 0.5, "block": 1, "images": 80}
    longer = resolve(run, train__total_images="320", train__align__until="0.25")
    assert made_from(longer) == made_from(resolve(run))
    assert made_from(resolve(run, train__total_images="320")) != made_from(resolve(run))
    for kind in ("router", "student"):
        spec = resolve(run, kind) if kind == "router" else None
        if spec is not None:
            assert spec.align is None
            assert "align" not in made_from(spec)["train"]
    assert resolve(run, "monolith").align is not None
    assert "align" not in made_from(resolve(run, train__align="null"))["train"]


UNET = (
    "{_class_name: UNetExpert, sample_size: 32, in_channels: 3, out_channels: 3, norm_num_groups: 4, "
    "block_out_channels: [8], down_block_types: [DownBlock2D], up_block_types: [UpBlock2D]}"
)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train.align.block", "3"], "train.align.block is 3, but the network has 2 blocks"),
        (["--features.patch_dimensions", "0"], "train.align needs patch features; set features.patch_dimensions: 64"),
        (
            ["--train.conditioning", "none", "--networks.default", UNET],
            "train.align needs a DiT, but the network is a UNetExpert",
        ),
        (["--train.align.until", "0"], "train.align.until"),
    ],
)
def test_impossible_alignments_are_an_error(
    arguments: list[str], words: str, aligned: Copy, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", str(aligned()), "--expert", "0", *arguments]) == 2
    assert re.search(words, capsys.readouterr().err)


def test_shards_without_patches_are_an_error(new_run: Copy) -> None:
    run = new_run(features={"patch_dimensions": 64}, **SETTINGS)
    with pytest.raises(
        AtollError, match=r"the shards have none; set features.patch_dimensions: 64 and run atoll prepare again"
    ):
        resolve(run)
