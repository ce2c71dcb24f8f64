"""Muon against an SVD, closed forms and torch.optim.Muon; and jobs that are trained with it."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from atoll.core import config
from atoll.core.artifacts import Artifact
from atoll.core.config_sections import TrainSection
from atoll.core.distributed import DistContext
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT
from atoll.core.networks import read_network
from atoll.data.shapes import DataShapes
from atoll.experts.cost import image_cost, parameter_count
from atoll.nets import Condition, build
from atoll.nets.blocks import NEWTON_SCHULZ_STEPS, HiddenMatrix, hidden_matrices
from atoll.train import muon as module
from atoll.train import resolve_job
from atoll.train.estimate import job_bytes
from atoll.train.loop import make_optimizer
from atoll.train.muon import Muon, newton_schulz, shares_of, stacks_of
from train.conftest import Copy
from train.test_parallel import ENVIRONMENT, assert_close_weights, losses, run_two
from train.workers import assert_same_weights, finish, kill_at, weights

ALONE = DistContext(0, 1, torch.device("cpu"))
MUON = {"optimizer": "muon", "total_images": 96}
DIFFUSERS = {
    "PixArtExpert": {"caption_channels": 8, "cross_attention_dim": 16, "sample_size": 8},
    "DiTExpert": {"num_embeds_ada_norm": 3, "sample_size": 8},
    "SD3Expert": {"joint_attention_dim": 8, "caption_projection_dim": 16, "pooled_projection_dim": 8, "sample_size": 8},
}
SHAPE = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "in_channels": 4, "out_channels": 4}


def tiny(**fields: object) -> nn.Module:
    torch.manual_seed(0)
    parts = {"patch": 4, "width": 32, "depth": 2, "heads": 2, "channels": 4, "size": 8, "out_channels": 4}
    return build(read_network({"_class_name": "DiT", **parts, "text_width": 8, **fields}))


def with_gradients(network: nn.Module, seed: int = 1) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for weight in network.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator)
    return network


def names_of(network: nn.Module) -> set[str]:
    hidden = {matrix.weight for matrix in hidden_matrices(network)}
    return {name for name, weight in network.named_parameters() if weight in hidden}


@pytest.mark.parametrize("shape", [(3, 24, 24), (2, 16, 64), (2, 64, 16)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_newton_schulz_keeps_singular_vectors_and_brings_singular_values_near_one(
    shape: tuple[int, int, int], dtype: torch.dtype, error: float
) -> None:
    """The polynomial, applied five times to the singular values in float64, is the exact result."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    values = s / s.square().sum(1, keepdim=True).sqrt()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    found = newton_schulz(matrices.float(), dtype).double()
    assert (found - u * values[:, None] @ v).abs().max() < error
    largest = s / s.square().sum(1, keepdim=True).sqrt() > 0.01
    band = torch.linalg.svdvals(found)[largest]
    assert band.min() > 0.65, "the known band of the published coefficients"
    assert band.max() < 1.25


def test_a_gradient_of_zero_gives_no_update() -> None:
    assert not newton_schulz(torch.zeros(2, 4, 6), torch.float32).any()


def test_the_update_of_a_matrix_has_the_rms_of_adamw() -> None:
    """The RMS of an orthogonal matrix is 1/sqrt(larger side); that of the update 0.2 within the band around 1."""
    network = with_gradients(tiny(width=64, heads=4))
    before = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    make_optimizer(network, TrainSection(optimizer="muon", lr=1.0), ALONE).step()
    for name in names_of(network):
        change = network.get_parameter(name).detach() - before[name]
        assert 0.65 * 0.2 < change.square().mean().sqrt() < 1.25 * 0.2, name


def test_hidden_matrices_are_the_linear_weights_of_the_blocks() -> None:
    parts = ("attention.qkv", "attention.out", "cross.query", "cross.key_value", "cross.out", "mlp.inner", "mlp.outer")
    expected = {f"blocks.{block}.{part}.weight" for block in (0, 1) for part in parts}
    assert names_of(tiny()) == expected
    assert names_of(tiny(modulation="zero", qk_norm=True)) == expected, "without modulation and norms"
    counts = [matrix.count for matrix in hidden_matrices(tiny(depth=1))]
    assert sorted(counts) == [1, 1, 1, 1, 1, 2, 3]


@pytest.mark.parametrize("kind", DIFFUSERS)
def test_hidden_matrices_of_diffusers_networks_have_gradients_and_exclude_norms_and_embedders(kind: str) -> None:
    network = build(read_network({"_class_name": kind, **SHAPE, **DIFFUSERS[kind], "patch_size": 2})).train()
    condition = Condition(text=torch.randn(2, 5, 8), pooled=torch.randn(2, 8), label=torch.tensor([0, 1]))
    if kind == "DiTExpert":
        condition = Condition(label=torch.tensor([0, 1]))
    network(torch.randn(2, 4, 8, 8), torch.tensor([10.0, 20.0]), condition).square().mean().backward()
    found = list(hidden_matrices(network))
    assert len(found) >= 2 * 6, "attention and MLP of two blocks"
    assert all(matrix.weight.grad is not None and matrix.count == 1 for matrix in found)
    assert not [name for name in names_of(network) if "norm" in name or "emb" in name or "table" in name]
    before = [weight.detach().clone() for weight in network.parameters()]
    make_optimizer(network, TrainSection(optimizer="muon"), ALONE).step()
    assert any(not torch.equal(old, new) for old, new in zip(before, network.parameters(), strict=True))


def test_steps_equal_those_of_torch_muon_and_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps, with weights of one matrix each, and torch's steps in float32 too."""
    monkeypatch.setattr("atoll.nets.blocks.FUSED", {})
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    ours, theirs = tiny(), tiny()
    settings = TrainSection(optimizer="muon", lr=0.01, weight_decay=0.1)
    hidden = names_of(theirs)
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, weight in theirs.named_parameters():
        groups[name in hidden].append(weight)
    optimizer = make_optimizer(ours, settings, ALONE)
    references = [
        torch.optim.AdamW(groups[0], lr=0.01, betas=(0.9, settings.beta2), weight_decay=0.1, fused=True),
        torch.optim.Muon(groups[1], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
    ]
    for step in range(3):
        before = {name: weight.detach().clone() for name, weight in theirs.named_parameters()}
        with_gradients(ours, step)
        with_gradients(theirs, step)
        for one in (optimizer, *references):
            one.step()
        for name, weight in ours.named_parameters():
            other = theirs.get_parameter(name)
            if name not in hidden:
                assert torch.equal(weight, other), name
                continue
            update = (other - before[name]).norm()
            assert (weight - other).norm() < 1e-4 * update, name


def test_queries_keys_and_values_are_orthogonalized_separately() -> None:
    network = with_gradients(tiny())
    before = network.blocks[0].attention.qkv.weight.detach().clone()
    gradient = network.blocks[0].attention.qkv.weight.grad.view(3, 32, 32)
    make_optimizer(network, TrainSection(optimizer="muon", lr=0.5), ALONE).step()
    expected = newton_schulz(gradient.clone(), torch.float32) * -0.5 * 0.2 * math.sqrt(32)
    change = network.blocks[0].attention.qkv.weight.detach() - before
    torch.testing.assert_close(change.view(3, 32, 32), expected, atol=1e-5, rtol=1e-4)


def test_gate_and_value_of_a_swiglu_are_two_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As two weights of torch.optim.Muon, in float32 too; and their initial range is that of two matrices."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    network = tiny(mlp="swiglu")
    inner = network.blocks[0].mlp.inner.weight  # (2 · 88, 32)
    assert inner.abs().max().item() == pytest.approx(math.sqrt(6 / (88 + 32)), rel=0.01), "Xavier of (88, 32)"
    parts = [nn.Parameter(part.detach().clone()) for part in inner.chunk(2)]
    reference = torch.optim.Muon(parts, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    optimizer = make_optimizer(network, TrainSection(optimizer="muon", lr=0.01, weight_decay=0.1), ALONE)
    for step in range(2):
        before = inner.detach().clone()
        with_gradients(network, step)
        for part, gradient in zip(parts, inner.grad.chunk(2), strict=True):
            part.grad = gradient.clone()
        optimizer.step()
        reference.step()
        assert (inner - torch.cat(parts)).norm() < 1e-4 * (inner - before).norm()


def test_stacks_are_limited_and_do_not_change_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = []
    for limit in (1, 3 * 4 * 32 * 32, 1 << 30):
        monkeypatch.setattr(module, "STACK_BYTES", limit)
        network = with_gradients(tiny())
        changes.append((len(stacks_of(hidden_matrices(network))), network))
        make_optimizer(network, TrainSection(optimizer="muon"), ALONE).step()
    assert [count for count, _ in changes] == [14, 11, 3], "one for each weight, some, and one for each shape"
    for weights_of in zip(*(network.parameters() for _, network in changes), strict=True):
        torch.testing.assert_close(weights_of[0], weights_of[1], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(weights_of[0], weights_of[2], atol=1e-6, rtol=1e-5)


def test_a_step_that_is_not_finite_changes_neither_weights_nor_moments() -> None:
    network = with_gradients(tiny())
    optimizer = make_optimizer(network, TrainSection(optimizer="muon", weight_decay=0.1), ALONE)
    assert isinstance(optimizer, Muon)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()

    def state() -> list[torch.Tensor]:
        moments = [tensor for moments in optimizer.state.values() for tensor in moments.values()]
        return [tensor.detach().clone() for tensor in (*network.parameters(), *moments)]

    before = state()
    for weight in network.parameters():
        weight.grad.fill_(torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, state(), strict=True))
    with_gradients(network, 2)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert not any(torch.equal(old, new) for old, new in zip(before, state(), strict=True)), "the next one does"


def test_flops_are_those_of_the_products() -> None:
    """Counted by torch for one update of all matrices, and shared between the images of a batch."""
    network, shapes = with_gradients(tiny()), DataShapes((4, 8, 8), None, ())
    optimizer = make_optimizer(network, TrainSection(optimizer="muon"), ALONE)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    cost = image_cost(network.config, shapes)
    assert cost.muon_flops == counter.get_total_flops() == sum(matrix.flops for matrix in hidden_matrices(network))
    weight = HiddenMatrix(nn.Parameter(torch.empty(64, 16)), 2)  # two matrices of 32 x 16
    assert weight.flops == 2 * NEWTON_SCHULZ_STEPS * 2 * (16 * 16 * 32 + 16 * 16 * 16 + 16 * 16 * 32)
    muon, adamw = (cost.training_flops(TrainSection(optimizer=name, batch_size=8)) for name in ("muon", "adamw"))
    assert muon - adamw == cost.muon_flops // 8


def test_the_memory_has_one_moment_and_the_stacks() -> None:
    """With one small image the update needs more than the activations: a few copies of the largest stack."""
    network, shapes = tiny(width=256, heads=4), DataShapes((4, 8, 8), None, ())
    hidden = 4 * sum(matrix.weight.numel() for matrix in hidden_matrices(network))
    largest = max(stack.momentum.nbytes for stack in stacks_of(hidden_matrices(network)))
    cuda = torch.device("cuda")
    muon, adamw = (
        job_bytes(
            network.config,
            shapes,
            TrainSection(optimizer=name, batch_size=1, sample_every=0, precision="float32"),
            device=cuda,
        )
        for name in ("muon", "adamw")
    )
    assert hidden < 4 * parameter_count(network.config)
    assert 2 * largest < muon - (adamw - hidden) <= 3 * largest


def test_unet_and_fsdp2_are_refused(new_run: Copy) -> None:
    run = new_run(
        train=MUON,
        networks={0: {"_class_name": "UNetExpert", "sample_size": 32, "in_channels": 3, "out_channels": 3}},
    )
    values = config.load(run)
    with pytest.raises(AtollError, match=r"networks\.0: muon trains .* a UNetExpert has none; set train\.optimizer"):
        resolve_job(run, values, "expert", expert=0)
    with pytest.raises(AtollError, match="muon needs whole matrices, and fsdp2 shards them; set parallel: ddp"):
        config.load(run, {"train.parallel": "fsdp2"})


def test_an_expert_with_muon_needs_only_its_shards(new_run: Copy) -> None:
    alone, together = new_run("alone", only=[1], train=MUON), new_run("together", train=MUON)
    for run in (alone, together):
        assert finish(run, "--expert", "1") == 0, (run / "log.txt").read_text()
    assert_same_weights(alone / "experts/001/final", together / "experts/001/final")
    content = Artifact(alone, "experts/001/final").read(EXPERT)
    spec = resolve_job(alone, config.load(alone), "expert", expert=1)
    cost = image_cost(spec.network, spec.shapes)
    assert content.compute is not None
    assert content.compute.flops == 96 * (3 * cost.forward_flops + cost.muon_flops // 8)


@pytest.mark.parametrize("job", [("--expert", "1"), ("--router",)])
def test_a_killed_job_with_muon_resumes_to_the_same_weights(job: tuple[str, ...], new_run: Copy) -> None:
    """Weights and all three EMAs, bit for bit."""
    settings = {**MUON, "ema": {"ema": 2.0, "short": 4.0, "long": 6.0}}
    straight, broken = new_run("straight", train=settings), new_run("broken", train=settings)
    folder = "router" if job == ("--router",) else "experts/001"
    assert finish(straight, *job) == 0, (straight / "log.txt").read_text()
    kill_at(broken, 32, *job)
    stored = weights(max((broken / folder / "checkpoints").glob("*/manifest.json")).parent)
    assert {key.split(":")[1].split(".")[1] for key in stored if ":optimizer." in key} == {
        "momentum_buffer", "exp_avg", "exp_avg_sq",
    }  # fmt: skip
    assert finish(broken, *job) == 0
    assert len(list((straight / folder / "final").glob("ema-*.safetensors"))) == 2
    assert_same_weights(straight / folder / "final", broken / folder / "final")


def test_shares_have_about_the_same_flops_and_every_matrix_once() -> None:
    network = tiny(mlp="swiglu", depth=5)
    matrices = list(hidden_matrices(network))
    for processes in (1, 2, 3, 8, 64):
        shares = shares_of(network, processes)
        weights_of = [[weight for stack in share for weight, _ in stack.views()] for share in shares]
        assert len(shares) == processes
        assert sorted(id(weight) for share in weights_of for weight in share) == sorted(id(m.weight) for m in matrices)
        flops = {id(matrix.weight): matrix.flops for matrix in matrices}
        totals = [sum(flops[id(weight)] for weight in share) for share in weights_of]
        assert max(totals) - min(totals) <= max(flops.values())


STEPS_OF_TWO = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode
from atoll.core.config_sections import TrainSection
from atoll.core.distributed import init_distributed
from atoll.train.loop import make_optimizer
from train.test_muon import three_steps, tiny

with init_distributed(torch.device("cpu")) as processes:
    network = tiny(mlp="swiglu")
    settings = TrainSection(optimizer="muon", lr=0.01, weight_decay=0.1)
    with FlopCounterMode(display=False) as counter:
        three_steps(network, make_optimizer(network, settings, processes))
    found = {name: weight.detach() for name, weight in network.named_parameters()}
    save_file(found | {"flops": torch.tensor(counter.get_total_flops())}, f"{sys.argv[1]}/{processes.rank}.safetensors")
"""


def three_steps(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take three steps, of which the second is not finite."""
    for step in range(3):
        with_gradients(network, step)
        if step == 1:
            for weight in network.parameters():
                weight.grad.fill_(torch.nan)
        optimizer.found_inf = torch.tensor(float(step == 1))
        optimizer.step()


def test_two_processes_share_newton_schulz_and_have_the_weights_of_one(tmp_path: Path) -> None:
    """What both do together is what is counted: the products of one process, once."""
    script = tmp_path / "steps.py"
    script.write_text(STEPS_OF_TWO)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        [sys.executable, *launcher, str(script), str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=3600, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    first, second = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    alone = tiny(mlp="swiglu")
    flops = [int(found.pop("flops")) for found in (first, second)]
    assert sum(flops) == 3 * image_cost(alone.config, DataShapes((4, 8, 8), None, ())).muon_flops
    assert min(flops) > 0.4 * sum(flops)
    three_steps(alone, make_optimizer(alone, TrainSection(optimizer="muon", lr=0.01, weight_decay=0.1), ALONE))
    for name, weight in alone.named_parameters():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], weight.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_two_processes_with_muon_equal_one(new_run: Copy) -> None:
    one, two = new_run("one", train=MUON), new_run("two", train=MUON)
    assert finish(one, "--expert", "0") == 0
    run_two(two, "--expert", "0")
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    assert_close_weights(two, one)
