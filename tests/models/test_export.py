"""Export: the folder is complete, opens in a new process, and gives the same images."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import atoll
from atoll import cli, flow
from atoll.apps.models.export import export
from atoll.apps.models.model_card import CardData, _table, model_card
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import CLUSTERS, EXPERT, ComputeSpec
from atoll.nets import Condition, load_network
from ensemble.runs import SMALL, SPACE, declared_by, write_network, write_run

PROMPTS = ["a red circle", "a green square", "nothing at all"]
HOW: dict[str, Any] = {"routing": "top-2", "num_inference_steps": 3, "seed": 5, "guidance_scale": 3.0}
SAME_IN_A_NEW_PROCESS = """
import sys, numpy, torch
torch.set_num_threads(1)
from safetensors.torch import load_file
from atoll.apps.models.pipeline import AtollPipeline
pipe = AtollPipeline.from_pretrained(sys.argv[1])
how = dict(num_inference_steps=3, guidance_scale=3.0, routing="top-2", seed=5)
prompts = ["a red circle", "a green square", "nothing at all"]
expected = load_file(sys.argv[2])
assert torch.equal(pipe(prompts, output_type="latent", **how).images, expected["latents"])
pixels = numpy.stack([numpy.asarray(image) for image in pipe(prompts, **how).images])
assert numpy.array_equal(pixels, expected["pixels"].numpy())
"""


def test_a_new_process_generates_the_same_images(run: Path, exported: Path, tmp_path: Path) -> None:
    """Bit-equal on one machine, with the pipeline class and the text encoder and tokenizer of the folder."""
    import numpy as np
    from safetensors.torch import save_file

    samples = atoll.load(run).generate(PROMPTS, **HOW)
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in samples.images]))
    save_file({"latents": samples.latents, "pixels": pixels}, tmp_path / "expected.safetensors")
    command = [sys.executable, "-c", SAME_IN_A_NEW_PROCESS, str(exported), str(tmp_path / "expected.safetensors")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("routing", ["top-1", "full", "nearest:top-2", "drawn", "sample-1", "top-2@0.5,top-1"])
def test_the_export_gives_the_latents_of_the_run(conditioned_run: Path, conditioned_export: Path, routing: str) -> None:
    """With mixed objectives and sizes, any routing, and any number of experts in memory."""
    how = {**HOW, "routing": routing}
    labels = ["circle", 2, "square", "triangle"]
    expected = atoll.load(conditioned_run).generate(label=labels, **how)
    for max_loaded_experts in (None, 1):
        model = atoll.load(conditioned_export, max_loaded_experts=max_loaded_experts)
        assert torch.equal(model.generate(label=labels, **how).latents, expected.latents)
    original, exported = (atoll.load(folder).ensemble.declarations for folder in (conditioned_run, conditioned_export))
    assert original == exported


def test_the_folder_has_only_safetensors_and_text(exported: Path) -> None:
    files = [path for path in exported.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json", ".md"}
    assert not [path for path in files if path.suffix == ".json" and "site-packages" in path.read_text()]
    components = {path.name for path in exported.iterdir() if path.is_dir()}
    assert components == {"expert_0", "expert_1", "expert_2", "router", "scheduler", "text_encoder", "tokenizer"}
    index = json.loads((exported / "model_index.json").read_text())
    assert {name for name, value in index.items() if name[0] != "_" and value[0]} == components


def test_exporting_again_changes_nothing_and_a_folder_with_other_content_is_an_error(
    conditioned_run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    first = export(conditioned_run, folder)
    (folder / "README.md").write_text("an edited card")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert export(conditioned_run, folder).digest == first.digest
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert len(atoll.load(folder).ensemble.declarations) == 3
    with pytest.raises(AtollError, match="model was experts, now student"):
        export(conditioned_run, folder, "student")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(AtollError, match="mine exists and is not an export"):
        export(conditioned_run, tmp_path / "mine")


def test_an_interrupted_export_is_an_error_and_can_be_resumed(conditioned_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    whole = export(conditioned_run, folder)
    plan = {"kind": whole.kind, "version": whole.version, "made_from": whole.made_from}
    (folder / "manifest.json").unlink()
    (folder / "expert_1" / "declaration.json").write_text("{")
    with pytest.raises(AtollError, match=r"has no manifest.json: its export was not finished"):
        atoll.load(folder)
    (folder / ".plan.json").write_text(json.dumps(plan))
    assert export(conditioned_run, folder).digest == whole.digest


def test_exporting_an_incomplete_run_is_an_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", conditioning=("label",))
    shutil.rmtree(run / "experts" / "001")
    with pytest.raises(AtollError, match=r"no finished experts/001"):
        export(run, tmp_path / "out")
    weights = run / "experts/002/final/diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(AtollError, match="SHA-256 differs"):
        export(run, tmp_path / "out", "expert:2")


@pytest.mark.parametrize("model", ["monolith", "student", "expert:1"])
def test_exporting_one_network(
    conditioned_run: Path, tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    assert cli.main(["export", str(conditioned_run), str(folder), "--model", model, "--license", "mit", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["model"] == model
    assert printed["experts"] == 1
    assert not (folder / "router").exists()
    expected = atoll.load(conditioned_run, model).generate(label=["circle"], **HOW).latents
    assert torch.equal(atoll.load(folder).generate(label=["circle"], **HOW).latents, expected)
    assert "license: mit" in (folder / "README.md").read_text()


def test_the_normalization_and_the_moments_of_the_data_are_exported(tmp_path: Path) -> None:
    """Also for an expert in the diffusers class of another release."""
    scaled = {"mean": [0.0] * 3, "std": [1 / 0.18215] * 3, "data_mean": [1.0, 0.2, -0.3], "data_std": [0.6, 0.8, 0.7]}
    released = {**CLASSES, "normalization": {"scaling_factor": 0.18215, "shift_factor": 0.0}}
    spaces = dict.fromkeys(range(2), scaled)
    run = write_run(tmp_path / "run", ("ddpm", "ddpm"), (released, SMALL), conditioning=("label",), spaces=spaces)
    shutil.rmtree(run / "router")  # the spaces of router, monolith and student are per channel
    folder = tmp_path / "out"
    export(run, folder)
    assert json.loads((folder / "expert_0/config.json").read_text())["_class_name"] == "DiTTransformer2DModel"
    how = {**HOW, "routing": "nearest"}
    made = [atoll.load(source).generate(label=["circle"], **how).latents for source in (run, folder)]
    assert torch.equal(*made)
    for expert in atoll.load(folder).ensemble.declarations:
        assert expert.bridge.data_mean == tuple(scaled["data_mean"])
        assert expert.bridge.data_std == tuple(scaled["data_std"])
    assert load_network(run / "experts/000/final").config.normalization is not None


PIXART = {**SMALL, "text_projection": "mlp"}
CLASSES = {**SMALL, "modulation": "zero", "frequency_shift": 1, "mlp_norm_eps": 1e-5}
UNET = {
    "_class_name": "UNetExpert", "sample_size": 8, "in_channels": 3, "out_channels": 3, "num_class_embeds": 4,
    "block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1, "attention_head_dim": 4,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"], "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
}  # fmt: skip


@torch.no_grad()
def test_experts_load_in_diffusers_if_it_has_the_same_architecture(tmp_path: Path) -> None:
    """A PixArt and a DiT expert give the same outputs in diffusers, and load back with the same weights."""
    x, time = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([999.0, 3.0])
    text = torch.randn(2, 5, 384, generator=torch.Generator().manual_seed(1))
    cases = {
        "PixArtTransformer2DModel": (PIXART, "text", {"encoder_hidden_states": text}, Condition(text)),
        "DiTTransformer2DModel": (
            CLASSES, "label", {"class_labels": torch.tensor([0, 2])}, Condition(label=torch.tensor([0, 2]))
        ),
    }  # fmt: skip
    for name, (network, part, given, condition) in cases.items():
        run = write_run(tmp_path / name, ("flow-matching",), (network,), conditioning=(part,))
        folder = tmp_path / f"{name} exported"
        export(run, folder, "expert:0")
        theirs = getattr(diffusers, name).from_pretrained(folder / "expert_0", low_cpu_mem_usage=False)
        ours = load_network(run / "experts/000/final")
        output = theirs.eval()(x, timestep=time, return_dict=False, **given)[0]
        torch.testing.assert_close(output, ours.eval()(x, time, condition), atol=2e-4, rtol=1e-4)
        back = atoll.load(folder).ensemble.references[0].open().state_dict()
        assert all(torch.equal(back[key], value) for key, value in ours.state_dict().items())
        assert back.keys() == ours.state_dict().keys()


@torch.no_grad()
def test_a_diffusers_unet_is_exported_as_a_diffusers_unet(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ("flow-matching", "ddpm"), conditioning=("label",))
    shutil.rmtree(run / "experts/001")
    objective = {"objective": flow.objective("ddpm").spec, "bridge": {}}
    write_network(run, "experts/001", {**declared_by("experts/001", [1], UNET, ["label"], SPACE), **objective})
    export(run, tmp_path / "out")
    theirs = diffusers.UNet2DModel.from_pretrained(tmp_path / "out" / "expert_1", low_cpu_mem_usage=False)
    ours = load_network(run / "experts/001/final")
    x, label = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 3])
    expected = ours.eval()(x, torch.tensor([5.0, 900.0]), Condition(label=label))
    assert torch.equal(theirs.eval()(x, torch.tensor([5.0, 900.0]), label).sample, expected)
    how = {**HOW, "routing": "full"}
    expected = atoll.load(run).generate(label=[0, 1], **how).latents
    assert torch.equal(atoll.load(tmp_path / "out").generate(label=[0, 1], **how).latents, expected)


def test_paths_of_this_machine_are_not_exported(tmp_path: Path) -> None:
    from atoll.encoders.autoencoder import EMOJI
    from atoll.encoders.pretrained import fingerprint

    run = write_run(tmp_path / "run", ("flow-matching",), ({**SMALL, "channels": 12, "out_channels": 12},), ("label",))
    declared = dict(Artifact(run, "experts/000/final").open(EXPERT).content)
    folder = tmp_path / "secret folder" / "vae"
    shutil.copytree(EMOJI, folder)
    final = run / "experts/000/final"
    declared["latents"] = {
        "autoencoder": str(folder),
        "weights": fingerprint(folder),
        "resolution": 64,
        "shape": [12, 8, 8],
    }
    declared["statistics"] = {"mean": [0.0] * 12, "std": [1.0] * 12}
    (final / "manifest.json").unlink()
    artifact = Artifact(run, "experts/000/final")
    artifact.begin(EXPERT, {"job": "experts/000"})
    artifact.commit(declared)
    export(run, tmp_path / "out", "expert:0")
    texts = [path for path in (tmp_path / "out").rglob("*") if path.suffix in (".json", ".md")]
    assert not [path for path in texts if "secret folder" in path.read_text()]
    expected = atoll.load(run, "expert:0").generate(label=[0, 1], **HOW)
    shutil.rmtree(folder)
    samples = atoll.load(tmp_path / "out").generate(label=[0, 1], **HOW)
    assert torch.equal(samples.latents, expected.latents)
    assert all(list(a.tobytes()) == list(b.tobytes()) for a, b in zip(samples.images, expected.images, strict=True))


def test_the_card_takes_only_text_from_the_data() -> None:
    """Licenses and attributions are written by the author of the data."""
    cell = "CC0\n# Heading\n<script>alert(1)</script> [click](https://evil.example) `x` | y"
    (_, _, row) = _table(("license",), [(cell,)])
    assert row.count("\n") == 0
    assert "<" not in row
    assert row == r"| CC0 # Heading &lt;script&gt;alert(1)&lt;/script&gt; \[click\](https://evil.example) \`x\` / y |"


def test_the_card_has_data_clusters_compute_and_metrics(prepared: Path, conditioned_run: Path, tmp_path: Path) -> None:
    for part in ("data/ingest", "data/clusters"):
        shutil.copytree(prepared / part, tmp_path / part)
    protocol = {"num_images": 2048, "steps": 50, "extractor": "inception"}
    metrics = {
        "frechet": 12.345,
        "kid": {"value": 0.00321},
        "real_baseline": {"frechet": 1.5},
        "protocol": protocol,
    }
    models = [
        {"model": "experts", "label": "experts top-2", "metrics": {"inception": metrics}},
        {"model": "monolith", "label": "monolith", "metrics": {"inception": {"frechet": 99.0}}},
    ]
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "latest.json").write_text(json.dumps({"models": models}))
    experts = [Artifact(conditioned_run, f"experts/{k:03d}/final").read(EXPERT) for k in range(3)]
    compute = ComputeSpec(images=500_000, parameters=1, flops=32 * 10**16, seconds=7200.0)
    experts[0] = experts[0].model_copy(update={"compute": compute})
    text = model_card(CardData(tmp_path, "islands", "experts", experts, None, None))
    sizes = Artifact(prepared, "data/clusters").read(CLUSTERS).sizes["train"]
    for number, size in enumerate(sizes):
        assert f"| {number} | {size:,} |" in text
    assert "| experts/000 | velocity, linear schedule | " in text
    assert "500,000 | 3.2e+17 | 7,200" in text
    assert "| experts top-2 | inception | 2048 | 12.35 | 1.50 |" in text
    assert '"steps": 50' in text
    assert "99.00" not in text
    assert "No license was declared for the weights" in text
    assert "label='circle', routing=\"top-2\"" in text
