"""LoRA files of others as experts of a run on a base: `atoll convert FILE.safetensors RUN --expert K --images FOLDER`.

Every tensor must belong to a layer of the base. The names may be those of diffusers, peft or kohya; where they follow
the original release of a model, the converter of its pipeline in diffusers translates them. A layer of a file has a
rank r and an alpha of its own, an expert has one of each. The product is the same with zeros in the rows beyond r:

    alpha / r · B A  =  [alpha / r · B, 0] [A; 0]      B (out, r), A (r, in)

The density of the expert, for `nearest` routing, is fitted to images with captions. `atoll prepare` encodes them, in a
scratch run. With prompts alone, the base with the adapter generates these images first.
"""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import Field, ValidationError
from safetensors import safe_open
from torch import Tensor, nn

from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact, ArtifactKind, Manifest, sha256_of
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT, SHARDS, DataSpec, ExpertContent, LatentSpec, ShardsContent
from atoll.core.networks import BASE, BaseConfig, lora_of
from atoll.core.sizes import Size
from atoll.data.dataset import Shards
from atoll.data.density import DENSITY_FILE, MIN_IMAGES, fit_density
from atoll.data.prepare import prepare
from atoll.encoders.base_pipeline import BasePipeline, open_base
from atoll.experts.network_folder import LORA_WEIGHTS, PEFT_WEIGHTS
from atoll.flow import objective
from atoll.nets import build
from atoll.nets.base import BaseExpert, opened_base
from atoll.nets.io import CONFIG_FILE, WEIGHTS_FILE, check_fit, read_weights, write_weights
from atoll.verify.untrusted import Foreign, strict_json

PARTS = {"A": "lora_A", "down": "lora_A", "B": "lora_B", "up": "lora_B"}
PREFIXES = ("base_model.model.", "diffusion_model.", "lora_unet_", "lora_transformer_")
"""What trainers write before the path of a layer in the network, besides the name of the pipeline's component."""
_UP = re.compile(r"lora[_.](B|up)\.")
_KEY = re.compile(r"(?P<layer>.+?)\.(?:lora[_.](?P<part>A|B|down|up)(?:\.default)?\.weight|alpha)")


def join(file: Path, run: Path, expert: int, *, images: str | None = None, prompts: Sequence[str] = ()) -> Manifest:
    """Write a LoRA file as an expert of a run, with a density of these images, or of those that it generates."""
    if file.is_dir():  # of peft or diffusers
        file = next((own for name in (PEFT_WEIGHTS, LORA_WEIGHTS) if (own := file / name).is_file()), file)
    config, final = configuration.load(run), Artifact(run, layout.final(layout.expert_job(expert)))
    if not config.text.encoder.startswith(BASE):
        raise AtollError(f"{run} is not a run on a base model; make one with: atoll init RUN --base FOLDER")
    if (folder := run / layout.expert_job(expert)).exists():
        raise AtollError(f"{folder} exists; choose another number, or remove the expert with its folder")
    if (images is None) == (not prompts):
        raise AtollError("the density of an expert needs images with captions (--images), or prompts (--prompts)")
    pipeline = open_base(config.text.encoder)
    network, state = read_lora(file, pipeline)
    with TemporaryDirectory() as scratch, redirect_stdout(sys.stderr):
        if images is None:
            images = str(Path(scratch, "images"))
            generate(network, state, pipeline, prompts, folder=Path(images), side=config.data.resolution)
        content, density = encode(config, images, Path(scratch, "run"), like=_latents(run))
    final.begin(EXPERT, {"lora": sha256_of(file), "images": content.fingerprint, "network": network.to_dict()})
    write_weights(state, final.path(WEIGHTS_FILE))
    final.write(CONFIG_FILE, (json.dumps(network.to_dict(), indent=2) + "\n").encode())
    final.write_tensors(DENSITY_FILE, density)
    declared = {name: getattr(content, name) for name in DataSpec.model_fields}
    chosen = objective(**config.experts["default"].model_dump()).spec
    return final.commit(
        ExpertContent(
            **declared,
            job=layout.expert_job(expert),
            clusters=(expert,),
            network=network,
            conditioning=("arguments",),
            objective=chosen,
        )
    )


# The file


class LoraSettings(Foreign):
    """The settings of peft that the weights of an adapter depend on."""

    lora_alpha: float | None = None
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    use_rslora: bool = False
    init_lora_weights: bool | str = True

    def scale(self, path: str, rank: int) -> float:
        """Return the factor of B · A of a layer, as peft computes it. Without an alpha, diffusers takes the rank."""
        from peft.utils.other import get_pattern_key

        default = rank if self.lora_alpha is None else self.lora_alpha
        alpha = self.alpha_pattern.get(get_pattern_key(list(self.alpha_pattern), path), default)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_lora(file: Path, pipeline: BasePipeline) -> tuple[BaseConfig, dict[str, Tensor]]:
    """Read a LoRA file; return the base with an adapter of one rank, and its tensors."""
    if file.suffix != ".safetensors":
        raise AtollError(f"{file}: expected a .safetensors file; others may execute code when they are read")
    tensors, slot = read_weights(file), pipeline.name.slot
    if not tensors:
        raise AtollError(f"{file} has no tensors")
    for key, tensor in tensors.items():
        if not _KEY.fullmatch(key):
            raise AtollError(f"{file}: {key} is not a part of a LoRA adapter of linear or convolutional layers")
        if not tensor.is_floating_point() or not tensor.float().isfinite().all():
            raise AtollError(f"{file}: {key} has values that are not finite numbers")
    config = pipeline.config()
    with torch.device("meta"):
        plain: Any = build(config)
    try:
        found = _by_layer(tensors, plain.base, slot)
    except AtollError:
        translated = _translated(tensors, type(pipeline.pipe), plain.base)
        if translated.keys() == tensors.keys():
            raise
        found = _by_layer(translated, plain.base, slot)
    settings = _settings(file, slot, peft=any(key.startswith("base_model.") for key in tensors))
    rank = max(parts["lora_A"].shape[0] for parts in found.values())
    config = replace(config, lora=lora_of({"lora": {"rank": rank, "alpha": rank, "targets": sorted(found)}}))
    with torch.device("meta"):
        expected = build(config).state_dict()
    # Of two layers with the same end of their paths, peft also adapts the one that is not in the file: zeros there.
    state = {name: torch.zeros(part.shape) for name, part in expected.items()}
    for path, parts in found.items():
        a, b = parts["lora_A"].float(), parts["lora_B"].float()
        own = a.shape[0]
        b = b * (parts["alpha"].item() / own if "alpha" in parts else settings.scale(path, own))
        state[f"{path}.lora_A.weight"] = torch.cat([a, a.new_zeros(rank - own, *a.shape[1:])])
        state[f"{path}.lora_B.weight"] = torch.cat([b, b.new_zeros(len(b), rank - own, *b.shape[2:])], 1)
    check_fit(state, expected, f"the base of {file.name}")
    if not all(bool(part.isfinite().all()) for part in state.values()):
        raise AtollError(f"{file}: an alpha is too large")
    return config, state


def _by_layer(tensors: Mapping[str, Tensor], network: nn.Module, slot: str) -> dict[str, dict[str, Tensor]]:
    """Return lora_A, lora_B and possibly alpha of every layer; raise an error with the name of a wrong tensor."""
    layers = {path: layer for path, layer in network.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)}
    underscored = {path.replace(".", "_"): path for path in layers}
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        matched = _KEY.fullmatch(key)
        name = matched["layer"] if matched else key
        for prefix in (*PREFIXES, f"{slot}."):
            name = name.removeprefix(prefix)
        path = name if name in layers else underscored.get(name)
        if matched is None or path is None:
            raise AtollError(f"the base has no layer for {key}")
        part, weight = PARTS.get(matched["part"], "alpha"), layers[path].weight
        shapes = {"lora_A": tensor.shape[1:] == weight.shape[1:], "lora_B": tensor.shape[:1] == weight.shape[:1]}
        if not shapes.get(part, tensor.numel() == 1) or (part != "alpha" and tensor.ndim != weight.ndim):
            raise AtollError(f"{key} has shape {tuple(tensor.shape)}, but its layer has {tuple(weight.shape)}")
        if part in found.setdefault(path, {}):
            raise AtollError(f"{key} is the second {part} of its layer")
        found[path][part] = tensor
    for path, parts in found.items():
        a, b = parts.get("lora_A"), parts.get("lora_B")
        if a is None or b is None or not len(a) or len(a) != b.shape[1]:
            raise AtollError(f"{path} has no lora_A and lora_B of one rank")
    return found


def _translated(tensors: Mapping[str, Tensor], pipeline: Any, network: Any) -> dict[str, Tensor]:
    """Translate the names of a model's original release, by the converter that its pipeline has in diffusers."""
    try:
        made = pipeline.lora_state_dict(dict(tensors), return_alphas=True, unet_config=network.config)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):  # there is none for this file
        return dict(tensors)
    state, alphas = made if isinstance(made, tuple) else (made, None)
    # Converters split layers, and leave out with a warning what they do not know. Only the first keeps all of B.
    before, after = (sum(part.numel() for key, part in own.items() if _UP.search(key)) for own in (tensors, state))
    if before != after:
        return dict(tensors)
    return {**state, **{name: torch.as_tensor(alpha) for name, alpha in (alphas or {}).items()}}


def _settings(file: Path, slot: str, *, peft: bool) -> LoraSettings:
    """Return the settings beside a file of peft, or in the metadata of a file of diffusers, which may have none."""
    if peft:
        beside = file.with_name("adapter_config.json")
        if not beside.is_file():
            raise AtollError(f"{beside} is missing, which has the alpha of an adapter of peft")
        found = LoraSettings.read(beside)
    else:
        with safe_open(file, "pt") as stored:
            text = (stored.metadata() or {}).get("lora_adapter_metadata", "{}")
        values = strict_json(text.encode(), f"the metadata of {file.name}")
        try:
            found = LoraSettings.model_validate({key.removeprefix(f"{slot}."): own for key, own in values.items()})
        except (AttributeError, ValidationError) as error:
            raise AtollError(f"the metadata of {file.name} are not settings of an adapter: {error}") from error
    if found.init_lora_weights not in (True, False, "gaussian"):
        raise AtollError(f"{file}: init_lora_weights {found.init_lora_weights!r} changed the weights of its base")
    return found


# The density


def _latents(run: Path) -> LatentSpec | None:
    """Return the latents of the run's shards or experts; None if it has none yet."""
    kinds: dict[str, ArtifactKind[Any]] = dict.fromkeys(layout.shard_folders(run), SHARDS)
    kinds |= {layout.final(job): EXPERT for job in layout.jobs(run) if layout.is_expert(job)}
    made = (Artifact(run, name).read(kind) for name, kind in kinds.items() if Artifact(run, name).manifest())
    return next((content.latents for content in made), None)


def encode(
    config: Config, images: str, scratch: Path, *, like: LatentSpec | None
) -> tuple[ShardsContent, dict[str, Tensor]]:
    """Encode images in a scratch run; return what their shards declare, and the density of their latents and captions.

    `like` are the latents of the run, whose sizes the images are cropped to.
    """
    pipeline, buckets = open_base(config.text.encoder), config.data.buckets
    if like is not None and buckets != "off":
        sizes = [Size(*size) for size in like.sizes or (like.shape[1:],)]
        buckets = [f"{size.width * pipeline.factor}x{size.height * pipeline.factor}" for size in sizes]
    columns = dict.fromkeys(("kind", "image", "caption", "label", "id"))
    data = {**columns, "source": images, "buckets": buckets, "val_fraction": 0.0}
    sections: dict[str, Any] = {
        "data": config.data.model_copy(update=data),
        "clusters": config.clusters.model_copy(update={"count": 1}),
        "features": config.features.model_copy(update={"patch_dimensions": 0}),
    }
    prepare(scratch, config.model_copy(update=sections))
    shards = Artifact(scratch, layout.shards(0))
    content = shards.read(SHARDS)
    if content.text is None:
        raise AtollError(f"{images} has no captions, by which prompts find an expert; write a .txt file for each image")
    content = content.model_copy(update={"labels": (), "latents": like or content.latents})
    density = fit_density(Shards([shards], "train", content=content))
    if density is None:
        raise AtollError(f"{images} has {content.rows['train']} images; a density needs at least {MIN_IMAGES}")
    return content, density.tensors()


def generate(
    network: BaseConfig,
    state: Mapping[str, Tensor],
    pipeline: BasePipeline,
    prompts: Sequence[str],
    *,
    folder: Path,
    side: int,
) -> None:
    """Write an image and its caption for each prompt, by the pipeline of the base with an adapter."""
    import diffusers

    name = pipeline.name
    pipe = diffusers.DiffusionPipeline.from_pretrained(
        name.folder, dtype=pipeline.dtype, use_safetensors=True, trust_remote_code=False
    )
    pipe.set_progress_bar_config(disable=True)
    with opened_base(network, getattr(pipe, name.slot)):
        expert = BaseExpert(network)
    expert.load_state_dict(state)
    expert.activate()
    if pipeline.device.type != "cpu":
        pipe.enable_model_cpu_offload(device=pipeline.device)
    folder.mkdir()
    for number, prompt in enumerate(prompts):
        generator = torch.Generator().manual_seed(number)
        image = pipe(prompt=prompt, height=side, width=side, generator=generator, **name.options).images[0]
        image.save(folder / f"{number:06d}.png")
        (folder / f"{number:06d}.txt").write_text(prompt, encoding="utf-8")
