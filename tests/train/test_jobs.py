"""Training jobs: isolation of experts, costs, options and errors."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import atoll
from atoll import cli, flow
from atoll.apps.models.export import export
from atoll.apps.report import report
from atoll.apps.report.gallery import choose_examples
from atoll.core import config
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT, ROUTER, SHARDS
from atoll.core.networks import DiffusersConfig
from atoll.data.dataset import Batch, Shards
from atoll.data.density import DENSITY_FILE, Density, fit_density
from atoll.data.prepare import prepare
from atoll.data.shapes import DataShapes
from atoll.experts.calibration import GRID
from atoll.experts.expert import DeviceOptions, condition_of, open_expert
from atoll.experts.run import expert_of_run
from atoll.experts.validation import TIME_BINS, validate
from atoll.nets import Condition, build, concatenate, load_network, save_network
from atoll.train import build_task, resolve_job, train_job
from atoll.train.distill import StudentTask
from atoll.train.tasks import ExpertTask, RouterTask, TrainingInputs
from shapes import write_run
from train.conftest import Copy
from train.posterior import give_posterior
from train.workers import TINY, assert_same_weights, finish, metrics


def declared(run: Path, job: str) -> dict:
    kind = ROUTER if job == "router" else EXPERT
    return Artifact(run, f"{job}/final").open(kind, verify=True).content


def test_an_expert_needs_only_its_shards_and_the_settings(new_run: Copy) -> None:
    """With its shards alone, with others, and with damaged others: the same bits."""
    alone, together, damaged = new_run("alone", only=[1]), new_run("together"), new_run("damaged")
    for cluster in (0, 2):
        for file in (damaged / f"data/shards/cluster_{cluster:03d}").iterdir():
            file.write_bytes(b"not what it was")
    for run in (alone, together, damaged):
        assert finish(run, "--expert", "1") == 0, (run / "log.txt").read_text()
    assert {path.name for path in alone.iterdir()} == {"atoll.yaml", "data", "experts", "leases", "log.txt"}
    assert [path.name for path in (alone / "experts").iterdir()] == ["001"]
    assert_same_weights(alone / "experts/001/final", together / "experts/001/final")
    assert_same_weights(alone / "experts/001/final", damaged / "experts/001/final")


def test_a_result_has_its_declaration(trained_experts: Path) -> None:
    found = declared(trained_experts, "experts/001")
    assert found["objective"]["prediction"] == "epsilon"
    assert found["clusters"] == [1]
    assert found["conditioning"] == ["text"]
    assert found["network"]["text_width"] == 384
    assert len(found["statistics"]["mean"]) == 3
    assert found["latents"]["autoencoder"] == "pixels"
    assert found["compute"]["images"] == 160
    assert found["compute"]["seconds"] > 0
    network = load_network(trained_experts / "experts/001/final")
    assert found["compute"]["parameters"] == sum(p.numel() for p in network.parameters())
    files = {path.name for path in (trained_experts / "experts/001/final").iterdir()}
    others = {"ema-short.safetensors", "ema-long.safetensors", "cluster.safetensors"}
    assert files == {"config.json", "diffusion_pytorch_model.safetensors", "manifest.json"} | others


class Labeled(Shards):
    """The same shards with images of three classes."""

    def __init__(self, shards: Shards, labels: torch.Tensor) -> None:
        self.__dict__ = {**shards.__dict__, "content": shards.content.model_copy(update={"labels": ("a", "b", "c")})}
        self.labels = labels

    def read(self, indices: np.ndarray, mirrored: torch.Tensor | None = None, *, patches: bool = False) -> Batch:
        return replace(super().read(indices, mirrored, patches=patches), label=self.labels[indices])


def test_an_expert_stores_the_density_of_its_cluster(trained_experts: Path) -> None:
    """The density of latents, captions and classes of its shards, and their number: the file of the shards."""
    density = Density.from_tensors(load_file(trained_experts / "experts/001/final" / DENSITY_FILE))
    shards = Shards.open(trained_experts, [1])
    expert = Artifact(trained_experts, "experts/001/final").open(EXPERT)
    assert expert.files[DENSITY_FILE] == shards.artifacts[0].open(SHARDS).files[DENSITY_FILE]
    batch = shards.read(np.arange(len(shards)))
    assert density.count == len(shards)
    latents = shards.statistics.normalize(batch.mean.float()).flatten(1)
    torch.testing.assert_close(density.mean, latents.mean(0), atol=1e-4, rtol=1e-4)
    assert density.caption is not None
    assert batch.pooled is not None
    torch.testing.assert_close(density.caption.mean, batch.pooled.float().mean(0), atol=1e-4, rtol=1e-4)
    assert density.classes is None
    labeled = Labeled(shards, torch.arange(len(shards)) % 4 - 1)  # a quarter has no class
    assert fit_density(labeled).classes.tolist() == [(labeled.labels == k).sum().item() for k in range(3)]


def test_flops_equal_those_of_the_matrix_products(trained_experts: Path) -> None:
    """Counted by hand for this network: 16 tokens of width 32, 12 text tokens, two blocks."""
    d, tokens, text, depth, pixels = 32, 16, 12, 2, 3 * 8 * 8
    attention = tokens * 4 * d * d + 2 * tokens * tokens * d
    cross = tokens * 2 * d * d + text * 2 * d * d + 2 * tokens * text * d
    block = attention + cross + tokens * 8 * d * d
    once = 256 * d + d * d + 6 * d * d
    forward = 2 * (depth * block + text * 384 * d + tokens * 2 * pixels * d + once)
    compute = declared(trained_experts, "experts/000")["compute"]
    assert compute["flops"] == pytest.approx(3 * forward * 160, rel=0.02)


def test_the_monolith_matches_the_experts_flops(trained_experts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_experts, run)
    assert finish(run, "--monolith", "--match-flops", str(run)) == 0
    experts = sum(declared(run, f"experts/{k:03d}")["compute"]["flops"] for k in range(3))
    monolith = declared(run, "monolith")
    assert monolith["compute"]["flops"] == pytest.approx(experts, rel=0.02)
    assert monolith["clusters"] == [0, 1, 2]


def test_a_student_declares_its_teachers_and_counts_their_flops(trained_experts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_experts, run)
    assert finish(run, "--student") == 0
    student, expert = declared(run, "student"), declared(run, "experts/000")
    assert len(student["teachers"]) == 3
    assert (student["teacher_dtype"], expert["teacher_dtype"]) == ("float32", None)
    assert student["compute"]["flops"] == pytest.approx(4 / 3 * expert["compute"]["flops"], rel=1e-6)


def test_student_targets_are_the_velocities_of_the_cluster_expert(trained_experts: Path) -> None:
    """Against the teacher of each image, evaluated one by one."""
    task = build_task(resolve_job(trained_experts, config.load(trained_experts), "student"))
    assert isinstance(task, StudentTask)
    targets = task._targets(20, 30)  # across the border of two blocks of 24
    numbers = task.shards.order(np.arange(20, 50, dtype=np.uint64), task.seed)
    seen = set()
    for i, number in enumerate(numbers):
        batch = task.shards.read(np.array([number]))
        reference = expert_of_run(trained_experts, f"experts/{int(batch.cluster):03d}")
        teacher = open_expert(reference, task.shards.statistics, DeviceOptions())
        x0 = task.shards.latents(batch, seed=task.seed, position=20 + i)
        noised = flow.Objective().corrupt(x0, seed=task.seed, position=20 + i)
        with torch.no_grad():
            expected = teacher.velocity(noised.input, noised.t, condition_of(batch, teacher.conditioning))
        torch.testing.assert_close(targets[i : i + 1], expected, rtol=1e-4, atol=1e-4)
        seen.add(int(batch.cluster))
    assert seen == {0, 1, 2}


def test_the_loss_of_a_student_has_the_weight_of_validation(trained_experts: Path) -> None:
    """Targets of x0 teachers are noise near t = 0, where the weight vanishes."""
    task = build_task(resolve_job(trained_experts, config.load(trained_experts), "student"))
    noised = flow.Objective().corrupt(torch.randn(24, 3, 32, 32), seed=0, t=torch.linspace(0, 0.2, 24))
    inputs = TrainingInputs(torch.arange(24), 0, noised, Condition(), torch.zeros(24))
    losses = task.losses(lambda x, *_: torch.zeros_like(x), inputs)
    expected = task._targets(0, 24).square().flatten(1).mean(1)
    torch.testing.assert_close(losses.loss, expected * (noised.t / 0.05).square().clamp(max=1))


def test_student_targets_have_the_bits_of_images_that_are_noised_one_by_one(
    trained_experts: Path, tmp_path: Path
) -> None:
    """Latents with a posterior; each teacher gets the rows of its cluster in one batch, as in a block."""
    run = tmp_path / "run"
    shutil.copytree(trained_experts, run)
    shutil.rmtree(run / "data")
    give_posterior(trained_experts, run)
    task = build_task(resolve_job(run, config.load(run), "student"))
    assert isinstance(task, StudentTask)
    positions = np.arange(24, 48, dtype=np.uint64)
    batch = task.shards.read(task.shards.order(positions, task.seed))
    assert batch.std is not None
    targets = task._compute_block(24).by_size[0]
    for cluster in range(3):
        rows = torch.nonzero(batch.cluster == cluster).flatten()
        assert 1 < len(rows) < 24
        teacher = open_expert(expert_of_run(run, f"experts/{cluster:03d}"), task.shards.statistics, DeviceOptions())
        noised, texts = [], []
        for row in rows.tolist():
            one = task.shards.read(task.shards.order(positions[row : row + 1], task.seed))
            x0 = task.shards.latents(one, seed=task.seed, position=24 + row)
            noised.append(flow.Objective().corrupt(x0, seed=task.seed, position=24 + row))
            texts.append(condition_of(one, teacher.conditioning))
        x, t = torch.cat([one.input for one in noised]), torch.cat([one.t for one in noised])
        with torch.no_grad():
            expected = teacher.velocity(x, t, concatenate(texts))
        assert torch.equal(targets[rows], expected)


def test_teachers_are_verified_once_in_a_job(trained_experts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_experts, run)
    spec = resolve_job(run, config.load(run), "student")
    task = build_task(spec)
    assert isinstance(task, StudentTask)
    task._compute_block(0)
    # A file that belongs to the verified artifact, but is not needed for velocities.
    with (run / "experts/001/final/ema-short.safetensors").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\xff")
    assert task._compute_block(24).by_size[0].isfinite().all()
    again = build_task(spec)
    assert isinstance(again, StudentTask)
    with pytest.raises(AtollError, match=r"ema-short\.safetensors"):
        again._compute_block(24)


def test_a_conditioned_router_is_also_trained_with_the_null_condition(trained_experts: Path) -> None:
    """Guidance needs the probabilities of the null condition, which a tenth of the images train."""
    task = build_task(
        resolve_job(trained_experts, config.load(trained_experts, {"router.conditioning": "pooled"}), "router")
    )
    assert isinstance(task, RouterTask)
    batch = task.shards.read(np.arange(len(task.shards)))
    for parameter in task.network.parameters():  # at the start, modulations are zero and pass nothing on
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    conditions = []

    def forward(x: torch.Tensor, time: torch.Tensor, condition: Condition) -> torch.Tensor:
        conditions.append(condition)
        logits: torch.Tensor = task.network(x, time, condition)
        return logits

    task.losses(forward, task.inputs(batch, 0)).loss.mean().backward()
    dropped = conditions[0].dropped
    assert dropped is not None
    assert 0 < dropped.float().mean() < 0.25
    null = task.network.get_parameter("embedder.null_pooled").grad
    assert null is not None
    assert null.abs().max() > 0


def test_high_resolution_fine_tuning_starts_from_another_expert(
    trained_experts: Path, shapes: Path, tmp_path: Path
) -> None:
    """Shapes at 64 pixels, starting from the expert of 32: same weights, positions resized by the network."""
    run = tmp_path / "large"
    prepare(run, write_run(run, shapes, data={"resolution": 64}, **TINY))
    init = trained_experts / "experts/000/final"
    job = resolve_job(
        run, config.load(run, {"train.init_from": str(init), "train.total_images": "16"}), "expert", expert=0
    )
    before = build_task(job).network.state_dict()
    given = load_network(init).state_dict()
    assert all(torch.equal(before[key], given[key]) for key in given)
    made = train_job(job)
    assert made.content["latents"]["shape"] == [3, 64, 64]
    assert (
        made.content["compute"]["flops"] / 16 > 3 * declared(trained_experts, "experts/000")["compute"]["flops"] / 160
    )


def test_each_expert_can_have_its_initial_weights(trained_experts: Path) -> None:
    """The key of an expert overrides the default; a router is always initialized at random."""
    finals = {number: str(trained_experts / f"experts/00{number}/final") for number in (0, 1)}
    settings = config.load(trained_experts, {"train.init_from": f"{{default: {finals[0]}, 1: {finals[1]}}}"})
    for expert, start in ((0, 0), (1, 1), (2, 0)):
        spec = resolve_job(trained_experts, settings, "expert", expert=expert)
        assert spec.init_from == finals[start]
        built, given = build_task(spec).network.state_dict(), load_network(finals[start]).state_dict()
        assert all(torch.equal(built[key], given[key]) for key in given)
    assert resolve_job(trained_experts, settings, "monolith").init_from == finals[0]
    assert resolve_job(trained_experts, settings, "router").init_from is None
    only = config.load(trained_experts, {"train.init_from": f"{{1: {finals[1]}}}"})
    assert resolve_job(trained_experts, only, "expert", expert=0).init_from is None
    with pytest.raises(AtollError, match=r"train.init_from.7: there is no expert 7"):
        config.load(trained_experts, {"train.init_from": "{7: somewhere}"})
    for wrong in ("3", "{first: somewhere}", "{0: 1}"):
        with pytest.raises(AtollError, match=r"train.init_from: expected a folder, or \{default: FOLDER, 3: FOLDER\}"):
            config.load(trained_experts, {"train.init_from": wrong})


def test_a_diffusers_network_has_the_channels_of_the_data_and_starts_from_a_diffusers_folder(
    new_run: Copy, tmp_path: Path
) -> None:
    small = {
        "_class_name": "SD3Expert", "sample_size": 32, "num_layers": 1, "num_attention_heads": 2,
        "attention_head_dim": 8, "caption_projection_dim": 16, "joint_attention_dim": 384, "pooled_projection_dim": 384,
        "pos_embed_max_size": 16,
    }  # fmt: skip
    run = new_run(networks={0: small})
    network = resolve_job(run, config.load(run), "expert", expert=0).network
    assert isinstance(network, DiffusersConfig)
    assert (network.fields["in_channels"], network.fields["out_channels"]) == (3, 3)
    model = build(network).model
    model.save_pretrained(tmp_path / "released")
    spec = resolve_job(run, config.load(run, {"train.init_from": str(tmp_path / "released")}), "expert", expert=1)
    found = build_task(spec).network.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[f"model.{name}"], tensor)


def test_a_diffusers_unet_can_be_trained(new_run: Copy) -> None:
    """An unconditioned diffusers UNet with another objective."""
    unet = {
        "_class_name": "UNetExpert", "sample_size": 32, "in_channels": 3, "out_channels": 3, "layers_per_block": 1,
        "block_out_channels": [8, 16], "norm_num_groups": 4,
        "down_block_types": ["DownBlock2D", "DownBlock2D"], "up_block_types": ["UpBlock2D", "UpBlock2D"],
    }  # fmt: skip
    run = new_run(networks={0: unet}, experts={0: "ddpm-linear"}, train={"conditioning": "none", "total_images": 32})
    assert finish(run, "--expert", "0") == 0, (run / "log.txt").read_text()
    assert declared(run, "experts/000")["network"]["_class_name"] == "UNetExpert"
    assert declared(run, "experts/000")["validation_loss"] > 0


@pytest.mark.parametrize(
    ("kind", "field", "needed"), [("UNetExpert", "num_class_embeds", 4), ("DiTExpert", "num_embeds_ada_norm", 3)]
)
def test_a_class_table_without_a_row_for_the_null_class_is_an_error(
    kind: str, field: str, needed: int, new_run: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last class of the data would be taken for the null class."""
    of = DataShapes.of
    monkeypatch.setattr(DataShapes, "of", lambda data, images=None: replace(of(data, images), labels=("a", "b", "c")))
    for rows in (needed, needed - 1):
        run = new_run(
            str(rows),
            only=[0],
            networks={0: {"_class_name": kind, field: rows, "in_channels": 3}},
            train={"conditioning": "label"},
        )
        if rows == needed:
            assert resolve_job(run, config.load(run), "expert", expert=0).network.to_dict()[field] == needed
        else:
            with pytest.raises(AtollError, match=f"{field} is {rows}, but 3 classes and the null class need {needed}"):
                resolve_job(run, config.load(run), "expert", expert=0)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ({"patch": 3}, "networks.0: size 32 is not a multiple of patch 3"),
        ({"channels": 4}, "networks.0: channels is 4, but the prepared data needs 3; omit channels"),
        ({"out_channels": 4}, "networks.0: out_channels is 4, but the prepared data needs 3; omit out_channels"),
        ({"text_width": 100}, "networks.0: text_width is 100, but the prepared data needs 384"),
        (
            {"_class_name": "UNetExpert", "in_channels": 4},
            "networks.0: in_channels is 4, but the prepared data needs 3",
        ),
        (
            {
                "_class_name": "UNetExpert",
                "block_out_channels": [32] * 8,  # halves the sides seven times
                "down_block_types": ["DownBlock2D"] * 8,
                "up_block_types": ["UpBlock2D"] * 8,
            },
            r"a UNetExpert does not take latents of shape \(3, 32, 32\)",
        ),
    ],
)
def test_a_network_that_does_not_fit_the_data_is_an_error_that_names_its_key(
    network: dict[str, Any], words: str, new_run: Copy
) -> None:
    run = new_run(only=[0], networks={0: network})
    with pytest.raises(AtollError, match=words):
        train_job(resolve_job(run, config.load(run), "expert", expert=0))


def test_a_network_may_have_output_channels_for_a_learned_variance(new_run: Copy) -> None:
    run = new_run(only=[0], networks={0: {"out_channels": 6}})
    assert resolve_job(run, config.load(run), "expert", expert=0).network.to_dict()["out_channels"] == 6


def test_a_pixart_can_be_trained(new_run: Copy) -> None:
    """Its position embedding is a buffer that is computed, not stored."""
    pixart = {
        "_class_name": "PixArtExpert", "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1,
        "sample_size": 32, "patch_size": 8, "in_channels": 3, "out_channels": 3, "cross_attention_dim": 16,
        "caption_channels": 384,
    }  # fmt: skip
    run = new_run(networks={0: pixart}, train={"total_images": 32})
    assert finish(run, "--expert", "0") == 0, (run / "log.txt").read_text()
    assert declared(run, "experts/000")["validation_loss"] > 0


def test_classes_without_captions_and_images_without_class(tmp_path: Path, shapes: Path) -> None:
    """Class folders, images without class and no validation images: networks are conditioned on labels and train."""
    for image in shapes.glob("*-*.png"):
        kind, number = image.stem.split("-")
        folder = tmp_path / "classes" / (kind if int(number) else ".")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, folder / image.name)
    run = tmp_path / "run"
    changes = {
        **TINY,
        "train": {**TINY["train"], "total_images": 32},
        "router": {**TINY["router"], "conditioning": "label"},
    }
    prepare(run, write_run(run, tmp_path / "classes", **changes, data={"val_fraction": 0.0}))
    assert not (run / "data/text").exists()
    shards = Shards.open(run, range(3), "train")
    assert (shards.read(np.arange(len(shards))).label < 0).any()
    for job, kind in ((["--expert", "0"], "experts/000"), (["--router"], "router")):
        assert finish(run, *job) == 0, (run / "log.txt").read_text()
        made = declared(run, kind)
        assert made["conditioning"] == ["label"]
        assert made["text"] is None
        assert made["validation_loss"] is None
    settings = config.load(run, {"router.conditioning": "auto"})
    assert resolve_job(run, settings, "router").conditioning == {"label"}
    assert "circle" in report(run, settings, prompts=["circle"], steps=1).read_text(encoding="utf-8")
    assert choose_examples(run, 3, ["circle"])[0].label == shards.content.labels.index("circle")
    with pytest.raises(AtollError, match="conditioned on classes"):
        report(run, settings, prompts=["zebra"], steps=1)


def test_a_router_is_conditioned_on_the_caption_by_default(trained_experts: Path) -> None:
    for choice, conditioning in (("auto", {"pooled"}), ("none", set())):
        chosen = config.load(trained_experts, {"router.conditioning": choice})
        assert resolve_job(trained_experts, chosen, "router").conditioning == conditioning


def test_checkpoints_of_a_job_killed_after_its_commit_are_removed(trained_experts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_experts, run)
    (run / "experts/000/checkpoints/000000000160").mkdir(parents=True)
    assert finish(run, "--expert", "0") == 0
    assert not (run / "experts/000/checkpoints").exists()


def test_a_student_of_other_teachers_is_an_error(trained_experts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_experts, run)
    assert finish(run, "--student") == 0
    shutil.rmtree(run / "experts/002")
    assert finish(run, "--expert", "2", "--train.lr", "2e-3") == 0
    assert finish(run, "--student") == 2
    assert "teachers" in (run / "log.txt").read_text()


def test_each_process_computes_the_targets_of_its_images(
    trained_experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = build_task(resolve_job(trained_experts, config.load(trained_experts), "student"))
    assert isinstance(task, StudentTask)
    whole = task._compute_block(48).by_size[0]
    assert whole.isfinite().all()
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        part = task._compute_block(48).by_size[0]
        mine = torch.arange(48, 48 + task.spec.student.block) % 8 // 4 == rank  # batches of 8, four images for each
        # A teacher's batch is smaller here, and kernels sum batches of other sizes in other orders.
        torch.testing.assert_close(part[mine], whole[mine], rtol=1e-5, atol=1e-5)
        assert part[~mine].isnan().all()


def test_gradient_accumulation_gives_the_same_losses(new_run: Copy) -> None:
    whole, parts = new_run("whole"), new_run("parts", train={"grad_accum_steps": 4})
    for run in (whole, parts):
        assert finish(run, "--expert", "0", "--train.total_images", "64") == 0
    losses = [[line["loss"] for line in metrics(run, "experts/000")] for run in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("change", [{"precision": "bfloat16"}, {"activation_checkpointing": True}])
def test_bfloat16_and_activation_checkpointing_give_similar_losses(change: dict, new_run: Copy) -> None:
    plain, other = new_run("plain"), new_run("other", train=change)
    for run in (plain, other):
        assert finish(run, "--expert", "0", "--train.total_images", "64") == 0
    losses = [[line["loss"] for line in metrics(run, "experts/000")] for run in (plain, other)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02 if "precision" in change else 1e-5)
    assert {tensor.dtype for tensor in load_network(other / "experts/000/final").parameters()} == {torch.float32}


def test_previews_and_validations_are_saved_and_do_not_change_training(new_run: Copy) -> None:
    plain = new_run("plain")
    drawn = new_run("drawn", train={"sample_every": 80, "sample_count": 4, "validate_every": 80})
    for run in (plain, drawn):
        assert finish(run, "--expert", "2") == 0
    grids = sorted((drawn / "experts/002/grids").iterdir())
    assert [path.stem for path in grids] == [f"{n:012d}" for n in (80, 160)]
    assert Image.open(grids[0]).size == (64, 64)
    assert_same_weights(plain / "experts/002/final", drawn / "experts/002/final")
    errors = {line["images"]: line.get("validation_loss") for line in metrics(drawn, "experts/002")}
    assert [images for images, error in errors.items() if error is not None] == [80, 160]
    final = Artifact(drawn, "experts/002/final").read(EXPERT)
    assert errors[160] == pytest.approx(final.validation_loss, rel=1e-6), "all validation images, the same noise"


def test_a_dry_run_prints_the_costs_and_trains_nothing(new_run: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run()
    assert cli.main(["train", str(run), "--expert", "0", "--dry-run", "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert estimate["images"] == 160
    assert estimate["flops"] == 160 * estimate["flops_per_image"]
    assert estimate["bytes"] > 24 * estimate["parameters"]
    assert cli.main(["train", str(run), "--router", "--dry-run"]) == 0
    assert "GFLOP/s" in capsys.readouterr().out
    assert not (run / "experts").exists()


def test_a_loss_that_is_not_finite_is_an_error_that_names_the_images(new_run: Copy) -> None:
    """The initial network has infinite weights."""
    run = new_run()
    assert finish(run, "--expert", "0", "--train.total_images", "8") == 0
    network = load_network(run / "experts/000/final")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(float("inf"))
    save_network(network, run / "bad")
    shutil.rmtree(run / "experts")
    (run / "log.txt").write_text("")
    assert finish(run, "--expert", "0", "--train.init_from", str(run / "bad")) == 2
    log = (run / "log.txt").read_text()
    assert "the loss is not finite on images" in log
    assert any(f"{kind}-0" in log for kind in ("circle", "square", "triangle"))
    assert "the newest checkpoint is none" in log


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "choose what to train"),
        (["--expert", "0", "--router"], "choose what to train"),
        (["--expert", "3"], "there is no expert 3: this run has experts 0 to 2"),
        (["--expert", "0", "--networks.default", "DiT-XXL/2"], "unknown network size 'DiT-XXL/2'"),
        (["--expert", "0", "--train.conditioning", "label"], "conditioned on labels, but the data has none"),
        (["--student"], "experts/000/final does not exist"),
        (["--monolith", "--match-flops", "."], "no finished expert"),
        (["--expert", "0", "--train.init_from", "nowhere"], "nowhere has no config.json"),
        (["--expert", "0", "--train.batch_size", "10", "--train.grad_accum_steps", "3"], "not a multiple"),
    ],
)
def test_impossible_jobs_are_an_error(
    arguments: list[str], words: str, new_run: Copy, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", str(new_run()), *arguments]) == 2
    assert re.search(words, capsys.readouterr().err)


def test_a_missing_or_damaged_shard_is_an_error(new_run: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(only=[1])
    assert cli.main(["train", str(run), "--expert", "0"]) == 2
    assert "cluster_000 does not exist" in capsys.readouterr().err
    os.truncate(run / "data/shards/cluster_001/train-000000.safetensors", 100)
    assert cli.main(["train", str(run), "--expert", "1"]) == 2
    assert "train-000000.safetensors has 100 bytes" in capsys.readouterr().err


def test_invalid_settings_are_an_error_when_they_are_read() -> None:
    with pytest.raises(AtollError, match="grad_accum_steps 3"):
        config.resolve({"train": {"batch_size": 64, "grad_accum_steps": 3}})


def test_the_bridge_of_an_epsilon_expert_is_calibrated_on_validation_images(trained_experts: Path) -> None:
    """Hardly trained, its x0 near noise is inaccurate, and the calibration shrinks it."""
    found = declared(trained_experts, "experts/001")
    assert found["bridge"]["prediction_error"] > 0.01
    job = resolve_job(trained_experts, config.load(trained_experts), "expert", expert=1)
    task = replace(build_task(job), network=load_network(trained_experts / "experts/001/final").eval())
    with torch.no_grad():
        velocity = task.objective.bridge().wrap(task.predict)
        plain = validate(velocity, task.validation, seed=task.seed, conditioning=task.spec.conditioning)
    assert found["validation_loss"] < 0.5 * (plain.mean or 0)
    assert declared(trained_experts, "experts/000")["bridge"]["prediction_error"] == 0


@pytest.mark.parametrize("prediction", ["x0", "v_prediction", "velocity"])
def test_the_bridge_of_other_predictions_is_exact(prediction: str, trained_experts: Path) -> None:
    """Their x0 has a bounded error near noise; shrinking it would only answer overfitting."""
    job = resolve_job(trained_experts, config.load(trained_experts), "expert", expert=1)
    objective = flow.objective(schedule="cosine", prediction=prediction)
    task = build_task(replace(job, objective=objective.spec))
    assert isinstance(task, ExpertTask)
    assert task.calibrated(16).prediction_error == 0


def test_experts_vote_on_the_temperature_of_nearest_routing(new_run: Copy, tmp_path: Path) -> None:
    """An export carries the votes. On an island with its own shards only there is nothing to compare with."""
    run, alone = new_run(train={"total_images": 16}), new_run("alone", only=[0], train={"total_images": 16})
    for number in range(3):
        train_job(resolve_job(run, config.load(run), "expert", expert=number))
    train_job(resolve_job(alone, config.load(alone), "expert", expert=0))
    votes = [expert_of_run(run, f"experts/{number:03d}").declaration.calibration for number in range(3)]
    assert all(vote is not None and np.shape(vote) == (TIME_BINS, len(GRID)) for vote in votes)
    assert len(set(votes)) == 3
    assert expert_of_run(alone, "experts/000").declaration.calibration is None
    found = atoll.load(run).ensemble.temperatures
    assert found is not None
    assert bool((found > 0).all())
    export(run, tmp_path / "exported")
    assert torch.equal(atoll.load(tmp_path / "exported").ensemble.temperatures, found)
