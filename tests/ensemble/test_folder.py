"""Pipeline folders: damaged and foreign ones are an error; those of the hub and the Paris release are read."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

import atoll
from atoll import flow
from atoll.apps.models.pipeline import AtollPipeline
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import PIPELINE
from atoll.ensemble import Ensemble
from atoll.experts.expert import NetworkReference
from atoll.experts.run import expert_of_run
from atoll.flow import rng
from atoll.nets import Condition
from ensemble.runs import declared_by, write_network
from models.paris_release import Paris

WEIGHTS = "diffusion_pytorch_model.safetensors"


def recommit(folder: Path) -> None:
    """Write a manifest that fits the files, as a careful forger would."""
    (folder / "manifest.json").unlink()
    artifact = Artifact(folder.parent, folder.name)
    artifact.begin(PIPELINE, {})
    artifact.commit({"experts": 1})


def change_json(file: Path, change: Callable[[dict], object]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def flip_a_bit(folder: Path) -> None:
    file = folder / "expert_1" / WEIGHTS
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def cut(folder: Path) -> None:
    file = folder / "router" / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])


def pickles_only(folder: Path) -> None:
    for file in folder.rglob(WEIGHTS):
        torch.save(load_file(file), file.with_suffix(".bin"))
        file.unlink()
    recommit(folder)


def other_depth(folder: Path) -> None:
    change_json(folder / "expert_0" / "declaration.json", lambda declared: declared["network"].update(depth=3))
    recommit(folder)


def other_class(folder: Path) -> None:
    change_json(folder / "expert_0" / "config.json", lambda config: config.update(_class_name="UNet2DModel"))
    recommit(folder)


def without_declaration(folder: Path) -> None:
    (folder / "expert_2" / "declaration.json").unlink()
    recommit(folder)


def index(**changes: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        change_json(folder / "model_index.json", lambda values: values.update(changes))
        recommit(folder)

    return damage


def without_expert_0(folder: Path) -> None:
    change_json(folder / "model_index.json", lambda values: values.pop("expert_0"))
    recommit(folder)


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (flip_a_bit, rf"expert_1/{WEIGHTS} does not match the manifest: its SHA-256 differs; copy it again"),
    (cut, rf"router/{WEIGHTS} has \d+ bytes, but the manifest lists \d+"),
    (lambda folder: shutil.rmtree(folder / "expert_2"), r"expert_2/\S+ is missing although the manifest lists it"),
    (lambda folder: (folder / "manifest.json").unlink(), r"has no manifest.json: its export was not finished"),
    (pickles_only, r"expert_0 holds its weights as diffusion_pytorch_model.bin: a pickle"),
    (other_depth, r"expert_0/config.json is not the network that \S+declaration.json declares"),
    (other_class, r"config.json names a UNet2DModel, but \S+ declares a DiT"),
    (without_declaration, r"expert_2/declaration.json is missing, which declares how the network was trained"),
    (index(expert_1=["os", "system"]), r"expert_1 is a os.system, expected a ExpertModel"),
    (index(vae=["antigravity", "AutoencoderKL"]), r"has a component vae of \['antigravity'"),
    (index(safety_checker=["diffusers", "X"]), r"has a component safety_checker"),
    (index(expert_1="ExpertModel"), r"model_index.json: components.expert_1: Input should be a valid tuple"),
    (index(router=[7, None]), r"model_index.json: components.router.0: Input should be a valid string"),
    (without_expert_0, r"lists the experts \['expert_1', 'expert_2'\]; expected expert_0"),
    (lambda folder: (folder / "model_index.json").write_text("{"), r"model_index.json is not JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "reason"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_folder_is_an_error(
    conditioned_export: Path, tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(conditioned_export, folder)
    damage(folder)
    with pytest.raises(AtollError, match=reason):
        atoll.load(folder)
    with pytest.raises(AtollError, match=reason):
        AtollPipeline.from_pretrained(folder)


UNLISTED = [
    "text_encoder/adapter_config.json", "vae/diffusion_pytorch_model.safetensors.index.json", "vae/extra.safetensors",
    "expert_0/model.bin", "pipeline.py", "tokenizer/added_tokens.json", "new/config.json", "LICENSE",
]  # fmt: skip


@pytest.mark.parametrize("name", UNLISTED)
def test_a_file_that_the_manifest_does_not_list_is_refused(conditioned_export: Path, tmp_path: Path, name: str) -> None:
    """The libraries find many of them by their names. Documents may be added."""
    folder = tmp_path / "pipeline"
    shutil.copytree(conditioned_export, folder)
    for harmless in ("NOTES.md", "sample.png", ".gitattributes", ".cache/huggingface/x.json", "snapshot.json"):
        (folder / harmless).parent.mkdir(parents=True, exist_ok=True)
        (folder / harmless).write_text("{}")
    assert len(atoll.load(folder).ensemble.declarations) == 3
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    for opener in (atoll.load, AtollPipeline.from_pretrained):
        with pytest.raises(AtollError, match=rf"{name} is not listed in .*manifest.json, so nobody vouches for it"):
            opener(folder)


def test_a_link_out_of_an_export_is_refused(conditioned_export: Path, tmp_path: Path) -> None:
    """Even if the content is the listed one when it is checked: it may change afterwards."""
    folder = tmp_path / "pipeline"
    shutil.copytree(conditioned_export, folder)
    (folder / "expert_0/config.json").rename(tmp_path / "elsewhere.json")
    (folder / "expert_0/config.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(AtollError, match=r"expert_0/config.json is a link to .*elsewhere.json, which is outside"):
        atoll.load(folder)


def test_a_foreign_folder_is_an_error(conditioned_export: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "stable"
    foreign.mkdir()
    pipe = diffusers.DDPMPipeline(
        diffusers.UNet2DModel(8, block_out_channels=(8, 8), norm_num_groups=4, down_block_types=("DownBlock2D",) * 2,
                              up_block_types=("UpBlock2D",) * 2), diffusers.DDPMScheduler())  # fmt: skip
    pipe.save_pretrained(foreign)
    for opener in (atoll.load, AtollPipeline.from_pretrained):
        with pytest.raises(AtollError, match=r"holds DDPMPipeline, not experts with a router; open it with diffusers"):
            opener(foreign)
    (tmp_path / "empty").mkdir()
    with pytest.raises(AtollError, match=r"empty is not a run: it has no atoll.yaml"):
        atoll.load(tmp_path / "empty")
    with pytest.raises(
        AtollError, match=r"there is no model 'student' in .*its models are experts, and expert:0 to expert:2"
    ):
        atoll.load(conditioned_export, "student")
    assert len(atoll.load(conditioned_export, "expert:2").ensemble.declarations) == 1


def test_a_name_on_the_hub_is_found_in_its_cache(
    conditioned_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache as huggingface_hub lays it out: content by hash, and a snapshot of links to it."""
    repository, revision = tmp_path / "hub" / "models--someone--islands", "0" * 40
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    for number, file in enumerate(path for path in conditioned_export.rglob("*") if path.is_file()):
        shutil.copy(file, repository / "blobs" / f"{number:040d}")
        link = repository / "snapshots" / revision / file.relative_to(conditioned_export)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(repository / "blobs" / f"{number:040d}", link.parent))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    expected = atoll.load(conditioned_export).generate(label=["circle"], num_inference_steps=3).latents
    assert torch.equal(
        atoll.load("someone/islands").generate(label=["circle"], num_inference_steps=3).latents, expected
    )
    pipe = AtollPipeline.from_pretrained("someone/islands")
    assert torch.equal(pipe(label="circle", num_inference_steps=3, output_type="latent").images, expected)
    with pytest.raises(AtollError, match="'someone/else' is not a folder, and could not be downloaded"):
        atoll.load("someone/else")


# --- The Paris release, small -----------------------------------------------------------------------------------------

WIDTH, HEADS, TEXT, TOKENS, SCALE = 48, 2, 16, 9, 0.18215


def randomized(network: Paris, seed: int) -> Paris:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return network


def words() -> PreTrainedTokenizerFast:
    vocabulary = {word: n for n, word in enumerate(["<start>", "<end>", "?", "a", "red", "apple", "blue", "boat"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("<start> $A <end>", None, [("<start>", 0), ("<end>", 1)])
    special = {"bos_token": "<start>", "eos_token": "<end>", "pad_token": "<end>", "unk_token": "?"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=TOKENS, **special)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three experts and a router with the tensor names and files of the release."""
    folder = tmp_path_factory.mktemp("paris") / "release"
    experts = [randomized(Paris(WIDTH, HEADS, 2, 4, text_width=TEXT), seed) for seed in range(3)]
    router = randomized(Paris(WIDTH, HEADS, 2, 4, experts=3), 7)
    with torch.no_grad():
        router.head[4].weight.mul_(20)
    fields = {"hidden_size": WIDTH, "num_heads": HEADS, "num_layers": 2, "patch_size": 2, "mlp_ratio": 4.0}
    for number, expert in enumerate(experts):
        (folder / f"expert_{number}").mkdir(parents=True)
        save_file(expert.state_dict(), folder / f"expert_{number}" / WEIGHTS)
        config = {**fields, "text_embed_dim": TEXT, "use_adaln_single": True}
        (folder / f"expert_{number}" / "config.json").write_text(json.dumps(config))
    (folder / "router").mkdir()
    save_file(router.state_dict(), folder / "router" / "pytorch_model.safetensors")
    (folder / "router" / "config.json").write_text(json.dumps({**fields, "num_clusters": 3}))
    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, scaling_factor=SCALE,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ).save_pretrained(folder / "vae")  # fmt: skip
    clip = CLIPTextConfig(
        vocab_size=8, hidden_size=TEXT, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=TOKENS, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    CLIPTextModel(clip).save_pretrained(folder / "text_encoder")
    words().save_pretrained(folder / "tokenizer")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "DiffusionPipeline", "num_experts": 3}))
    return folder


@torch.no_grad()
def reference(
    folder: Path, prompts: list[str], noise: Tensor, steps: int, guidance_scale: float
) -> tuple[Tensor, Tensor]:
    """Sample as the release does: top-2, guidance inside each expert, Euler steps, timesteps 1000 t."""
    experts = [Paris(WIDTH, HEADS, 2, 4, text_width=TEXT) for _ in range(3)]
    for number, expert in enumerate(experts):
        expert.load_state_dict(load_file(folder / f"expert_{number}" / WEIGHTS))
    router = Paris(WIDTH, HEADS, 2, 4, experts=3)
    router.load_state_dict(load_file(folder / "router" / "pytorch_model.safetensors"))
    clip, tokenizer = CLIPTextModel.from_pretrained(folder / "text_encoder").eval(), words()
    vae = AutoencoderKL.from_pretrained(folder / "vae", low_cpu_mem_usage=False)

    def states(texts: list[str]) -> Tensor:
        numbers = tokenizer(texts, padding="max_length", max_length=TOKENS, return_tensors="pt")["input_ids"]
        return clip(numbers).last_hidden_state

    text, empty = states(prompts), states([""]).expand(len(prompts), -1, -1)
    x = noise
    for step in range(steps):
        time = torch.full((len(x),), 1000 * (1 - step / steps))
        p, chosen = router(x, time).softmax(-1).topk(2)
        v = torch.zeros_like(x)
        for row in range(len(x)):
            for weight, k in zip(p[row] / p[row].sum(), chosen[row], strict=True):
                with_text, null = (experts[k](x[row : row + 1], time[:1], c[row : row + 1]) for c in (text, empty))
                v[row] += (weight * (null + guidance_scale * (with_text - null)))[0]
        x = x - v / steps
    return x, vae.decode(x / SCALE).sample


def test_the_paris_release_gives_the_images_of_its_reference_sampler(release: Path) -> None:
    prompts = ["a red apple", "a blue boat", "a boat"]
    ensemble = atoll.load(release)
    made = ensemble.generate(prompts, num_inference_steps=5, guidance_scale=7.5, routing="top-2", seed=1, trace=True)
    noise = rng.normal((3, 4, 8, 8), seed=1, stream=rng.Stream.SAMPLE, first=0)
    latents, pixels = reference(release, prompts, noise, 5, 7.5)
    assert made.trace is not None
    assert len(made.trace.weights.argmax(-1).unique()) > 1
    torch.testing.assert_close(made.latents, latents, atol=2e-3, rtol=1e-3)
    expected = pixels.add(1).mul(127.5).round().clamp(0, 255).permute(0, 2, 3, 1)
    got = torch.from_numpy(np.stack([np.asarray(image) for image in made.images])).float()
    assert (got - expected).abs().max() <= 1


def test_one_expert_of_a_release_needs_no_router(release: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copytree(release, tmp_path / "alone"))
    shutil.rmtree(alone / "router")
    assert atoll.load(alone, "expert:1").ensemble.declarations[0].name == "expert_1"
    with pytest.raises(AtollError, match="router is missing"):
        atoll.load(alone)


def test_a_release_may_name_a_custom_pipeline(release: Path, tmp_path: Path) -> None:
    """diffusers names the class of a custom pipeline by a list."""
    custom = Path(shutil.copytree(release, tmp_path / "custom"))
    (custom / "model_index.json").write_text(json.dumps({"_class_name": ["pipeline", "ParisPipeline"]}))
    assert len(atoll.load(custom).ensemble.declarations) == 3


def test_a_damaged_release_is_an_error(release: Path, tmp_path: Path) -> None:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(release, tmp_path / name))

    gap = copy("gap")
    shutil.rmtree(gap / "expert_1")
    with pytest.raises(AtollError, match=r"has experts \[0, 2\]; expected consecutive numbers from expert_0"):
        atoll.load(gap)
    fewer = copy("fewer")
    shutil.rmtree(fewer / "expert_2")
    with pytest.raises(AtollError, match=r"is a router of 3 experts, but \S+ has 2"):
        atoll.load(fewer)
    deeper = copy("deeper")
    change_json(deeper / "expert_1" / "config.json", lambda config: config.update(num_layers=3))
    with pytest.raises(
        AtollError, match=r"disagrees with \S+: num_layers is 3 in the configuration and 2 in the weights"
    ):
        atoll.load(deeper)
    bare = copy("bare")
    shutil.rmtree(bare / "vae")
    with pytest.raises(AtollError, match=r"vae/config.json is missing; the Paris release has"):
        atoll.load(bare)
    (release_file := copy("cut") / "expert_0" / WEIGHTS).write_bytes(b"not a tensor")
    with pytest.raises(AtollError, match="not a complete safetensors file"):
        atoll.load(release_file.parent.parent)


def write_expert(run: Path, statistics: dict[str, list[float]]) -> NetworkReference:
    """An expert on the release's latents and text, as if it had been trained here."""
    network = {"_class_name": "DiT", "width": 32, "depth": 1, "heads": 2, "size": 8, "text_width": TEXT}
    declared = declared_by("experts/001", [1], network, ["text"], statistics)
    declared |= {
        "latents": {"autoencoder": "vae", "weights": None, "shape": [4, 8, 8]},
        "text": None, "labels": [], "objective": flow.objective("ddpm").spec, "bridge": {"prediction_error": 0.05},
    }  # fmt: skip
    write_network(run, "experts/001", declared)
    return expert_of_run(run, "experts/001")


@torch.no_grad()
def test_a_released_expert_can_be_mixed_with_a_trained_one(release: Path, tmp_path: Path) -> None:
    """Each gives its velocity for the common latents; latents standardized per channel cannot be mixed."""
    ours = {"mean": [0.0] * 4, "std": [1 / SCALE] * 4, "data_mean": [1.0, 0.2, 0.1, -0.3], "data_std": [0.6] * 4}
    trained, released = write_expert(tmp_path / "scaled", ours), atoll.load(release, "expert:0").ensemble.references[0]
    mixed = Ensemble([released, trained])
    x, t = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0.3, 0.999])
    condition = Condition(text=torch.randn(2, TOKENS, TEXT, generator=torch.Generator().manual_seed(1)))
    for cluster, alone in enumerate((Ensemble([released]), Ensemble([trained]))):
        chosen = torch.full((2,), cluster)
        got = mixed.velocity(x, t, condition, routing="oracle", cluster=chosen)
        torch.testing.assert_close(got, alone.velocity(x, t, condition), atol=1e-5, rtol=1e-5)
    assert trained.declaration.bridge.data_mean == tuple(ours["data_mean"])
    other = {"mean": [0.4] * 4, "std": [2.0] * 4, "data_mean": [0.1] * 4, "data_std": [2.2] * 4}
    Ensemble([released, write_expert(tmp_path / "other", other)])  # another scale: converted exactly
    per_channel = {"mean": [5.8, 1.1, 0.5, -1.6], "std": [3.3, 4.6, 4.0, 3.9]}
    with pytest.raises(AtollError, match=r"experts/001 scales its latent channels .* strength in each channel"):
        Ensemble([released, write_expert(tmp_path / "per-channel", per_channel)])


def test_an_autoencoder_without_scaling_factor_has_the_default_of_its_class(release: Path, tmp_path: Path) -> None:
    """As stabilityai/sd-vae-ft-mse, which the release names: its config.json has no scaling_factor."""
    folder = Path(shutil.copytree(release, tmp_path / "release"))
    change_json(folder / "vae" / "config.json", lambda config: config.pop("scaling_factor"))
    assert atoll.load(folder).ensemble.normalization == atoll.load(release).ensemble.normalization
    change_json(folder / "vae" / "config.json", lambda config: config.update(scaling_factor=None))
    with pytest.raises(AtollError, match=r"vae/config.json has no scaling_factor"):
        atoll.load(folder)
