"""Train the small autoencoder that Atoll ships: 64x64 emoji to 8x8 latents and back.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 recipes/emoji-autoencoder/train.py --work runs/autoencoder

Run one process per core with one thread each: on a shared machine this waits less than one process with two threads.
You can interrupt it; running it again resumes. After the last step it writes the weights (half precision), the metrics
and an image of reconstructions into the work folder.
"""

import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import tyro
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from atoll.data.sources.open import open_source
from atoll.data.sources.source import SourceImage, SourceOptions, decode

RESOLUTION = 64
VALIDATION = 0.1
"""Fraction of the captions: twice the default of the emoji source, so all its validation captions belong to it."""


@dataclass
class Recipe:
    """Settings of the training. README.md has the two commands that made the shipped weights."""

    work: Annotated[Path, tyro.conf.arg(aliases=["-w"])]
    """Folder for checkpoints and results."""
    steps: int = 6000
    batch_size: int = 16
    """Images per step, over all processes."""
    lr: float = 1.5e-3
    warmup: int = 200
    ema: float = 0.998
    kl: float = 1e-4
    """Weight of the KL term, a mean over latent values. It keeps latents near a unit Gaussian at little cost."""
    latent_channels: int = 12
    channels: tuple[int, ...] = (12, 24, 48, 112)
    init_from: Path | None = None
    """Work folder of an earlier training to start from; it may have fewer latent channels."""
    seed: int = 0
    checkpoint_every: int = 200


def main(recipe: Recipe) -> None:
    """Draw the emoji, train, export and evaluate."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    recipe.work.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        draw_emoji(recipe.work)
    dist.barrier()
    train, validation = load_images(recipe.work)
    log(f"{len(train)} training images, {len(validation)} held out")
    ema_model, seconds = fit(recipe, train, validation)
    if dist.get_rank() == 0:
        finish(recipe, ema_model, train, validation, seconds)
    dist.destroy_process_group()


def log(text: str) -> None:
    """Print on the first process only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def finish(recipe: Recipe, ema_model: AutoencoderKL, train: Tensor, validation: Tensor, seconds: float) -> None:
    """Write weights, metrics and reconstructions."""
    shipped = AutoencoderKL.from_pretrained(export(ema_model, train, recipe.work / "model"))
    machine = {"processor": platform.processor() or platform.machine(), "processes": dist.get_world_size()}
    report = {
        "metrics": measure(shipped, validation),
        "seconds": round(seconds),
        "settings": {key: value for key, value in asdict(recipe).items() if key not in ("work", "init_from")},
        "machine": {**machine, "torch": torch.__version__},
    }
    (recipe.work / "metrics.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    reconstructions(shipped, validation).save(recipe.work / "reconstructions.png", optimize=True)
    log(json.dumps(report, indent=2))


def draw_emoji(work: Path) -> None:
    """Draw every emoji once into the work folder, as uint8 (N, 3, 64, 64)."""
    file = work / "images.npz"
    if file.exists():
        return
    images = list(open_source("emoji", SourceOptions(val_fraction=VALIDATION)).images())
    partial = file.with_suffix(".partial.npz")
    np.savez(partial, **{split: _decoded([s for s in images if s.split == split]) for split in ("train", "validation")})
    partial.rename(file)


def load_images(work: Path) -> tuple[Tensor, Tensor]:
    """Return the training images and the validation images."""
    with np.load(work / "images.npz") as arrays:
        return torch.from_numpy(arrays["train"]), torch.from_numpy(arrays["validation"])


def _decoded(images: list[SourceImage]) -> np.ndarray[Any, Any]:
    arrays = [np.asarray(decode(image.read(), RESOLUTION)) for image in images]
    return np.stack(arrays).transpose(0, 3, 1, 2).copy()


def build(recipe: Recipe) -> AutoencoderKL:
    """Build the network: few channels at high resolution and many at low, where parameters cost little time."""
    blocks = len(recipe.channels)
    return AutoencoderKL(
        block_out_channels=recipe.channels,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        layers_per_block=1,
        latent_channels=recipe.latent_channels,
        norm_num_groups=4,
        sample_size=RESOLUTION,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def fit(recipe: Recipe, train: Tensor, validation: Tensor) -> tuple[AutoencoderKL, float]:
    """Train; return the EMA model after all steps and the seconds over all starts."""
    torch.manual_seed(recipe.seed)
    model = build(recipe).to(memory_format=torch.channels_last)
    if recipe.init_from is not None:
        init_weights(model, torch.load(recipe.init_from / "checkpoint.pt", weights_only=True)["ema_model"])
    ema_model = build(recipe)
    ema_model.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.99), weight_decay=1e-4)
    log(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    step, spent = resume(recipe, model, ema_model, optimizer)
    started = time.monotonic()
    while step < recipe.steps:
        loss = train_step(recipe, step, batch_of(recipe, train, step), model, optimizer)
        step += 1
        update_ema(ema_model, model, min(recipe.ema, (1 + step) / (10 + step)))
        if step % recipe.checkpoint_every == 0 or step == recipe.steps:
            seconds = spent + time.monotonic() - started
            log(f"step {step} loss {loss:.4f} after {seconds:.0f} s")
            if dist.get_rank() == 0:
                save(recipe, step, seconds, model, ema_model, optimizer)
            if step % (5 * recipe.checkpoint_every) == 0:
                log(f"  validation PSNR {measure(ema_model, validation[::8])['psnr_mean']:.2f} dB")
    return ema_model, spent + time.monotonic() - started


@torch.no_grad()
def init_weights(model: AutoencoderKL, earlier: dict[str, Tensor]) -> None:
    """Copy the weights of a model with at most as many latent channels; reconstructions stay the same.

    New channels start as random features of about unit variance and little noise. Their decoder weights are zero.
    """
    own = model.state_dict()
    new, old = model.config.latent_channels, earlier["decoder.conv_in.weight"].shape[1]
    for name, weights in earlier.items():
        if name == "decoder.conv_in.weight":
            own[name].zero_()
            own[name][:, :old] = weights
        elif name.startswith("encoder.conv_out."):  # means, then log-variances
            own[name][:old] = weights[:old]
            own[name][old:new] *= 6
            own[name][new : new + old] = weights[old:]
            own[name][new + old :] = -8 if name.endswith("bias") else 0
        else:
            own[name].copy_(weights)


def batch_of(recipe: Recipe, train: Tensor, step: int) -> Tensor:
    """Return the batch of a step. It depends only on seed and step, so a resumed run sees the same batches."""
    per_epoch = len(train) // recipe.batch_size
    epoch, index = divmod(step, per_epoch)
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + epoch)
    rows = torch.randperm(len(train), generator=generator)[index * recipe.batch_size : (index + 1) * recipe.batch_size]
    torch.manual_seed(recipe.seed * 1_000_003 + step * dist.get_world_size() + dist.get_rank())
    images = as_input(train[rows[dist.get_rank() :: dist.get_world_size()]])
    flipped = torch.rand(len(images), 1, 1, 1) < 0.5
    return torch.where(flipped, images.flip(3), images).contiguous(memory_format=torch.channels_last)


def as_input(pixels: Tensor) -> Tensor:
    """Convert bytes to [-1, 1]."""
    return pixels.float() / 127.5 - 1


def train_step(recipe: Recipe, step: int, x: Tensor, model: AutoencoderKL, optimizer: torch.optim.Optimizer) -> float:
    """Make one update and return the loss.

    The loss is the root of each image's squared error, a compromise between MSE, which hard images dominate, and PSNR.
    """
    progress = step / recipe.steps
    rate = recipe.lr * min(1.0, (step + 1) / recipe.warmup) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
    for group in optimizer.param_groups:
        group["lr"] = rate
    posterior = model.encode(x).latent_dist
    error = functional.mse_loss(model.decode(posterior.sample()).sample, x, reduction="none").mean(dim=(1, 2, 3))
    loss = (error + 1e-5).sqrt().mean() + recipe.kl * posterior.kl().mean() / posterior.mean[0].numel()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    average_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def average_gradients(model: nn.Module) -> None:
    """Average the gradients over all processes, in one all-reduce."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


@torch.no_grad()
def update_ema(ema_model: nn.Module, model: nn.Module, decay: float) -> None:
    """Update the exponential moving average of the weights."""
    for old, new in zip(ema_model.parameters(), model.parameters(), strict=True):
        old.lerp_(new, 1 - decay)


def save(
    recipe: Recipe, step: int, seconds: float, model: nn.Module, ema_model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write a checkpoint and rename it into place."""
    states = {"model": model.state_dict(), "ema_model": ema_model.state_dict(), "optimizer": optimizer.state_dict()}
    partial = recipe.work / "checkpoint.partial"
    torch.save({"step": step, "seconds": seconds, **states}, partial)
    partial.rename(recipe.work / "checkpoint.pt")


def resume(
    recipe: Recipe, model: nn.Module, ema_model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, float]:
    """Load the last checkpoint if there is one; return its step and seconds."""
    file = recipe.work / "checkpoint.pt"
    if not file.exists():
        return 0, 0.0
    checkpoint = torch.load(file, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    ema_model.load_state_dict(checkpoint["ema_model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return int(checkpoint["step"]), float(checkpoint["seconds"])


@torch.no_grad()
def export(ema_model: AutoencoderKL, train: Tensor, folder: Path) -> Path:
    """Write the diffusers folder in half precision, with the latents' mean and standard deviation in its config."""
    means = torch.cat([ema_model.encode(as_input(part)).latent_dist.mean for part in train[::8].split(64)])
    ema_model.register_to_config(
        scaling_factor=round(float(1 / means.std()), 4), shift_factor=round(float(means.mean()), 4)
    )
    ema_model.half().save_pretrained(folder)
    return folder


@torch.no_grad()
def measure(model: AutoencoderKL, pixels: Tensor) -> dict[str, float]:
    """Return the PSNR of reconstructions from the posterior mean (pixels in [0, 1]) and the spread of the latents."""
    errors, means, stds = [], [], []
    for part in pixels.split(64):
        posterior = model.encode(as_input(part)).latent_dist
        restored = (model.decode(posterior.mean).sample.clamp(-1, 1) + 1) / 2
        errors.append(functional.mse_loss(restored, part / 255, reduction="none").mean(dim=(1, 2, 3)))
        means.append(posterior.mean)
        stds.append(posterior.std)
    error, mean = torch.cat(errors), torch.cat(means)
    return {
        "images": len(pixels),
        "psnr_mean": round(float(-10 * error.log10().mean()), 2),
        "psnr_of_mean_error": round(float(-10 * error.mean().log10()), 2),
        "psnr_worst_tenth": round(float((-10 * error.log10()).quantile(0.1)), 2),
        "latent_std": round(float(mean.std()), 3),
        "latent_std_least_channel": round(float(mean.std(dim=(0, 2, 3)).min()), 3),
        "latent_std_most_channel": round(float(mean.std(dim=(0, 2, 3)).max()), 3),
        "posterior_std": round(float(torch.cat(stds).mean()), 4),
    }


@torch.no_grad()
def reconstructions(model: AutoencoderKL, pixels: Tensor, columns: int = 16, rows: int = 3) -> Image.Image:
    """Draw validation images, each above its reconstruction."""
    chosen = pixels[torch.linspace(0, len(pixels) - 1, columns * rows).long()]
    restored = model.decode(model.encode(as_input(chosen)).latent_dist.mean).sample.clamp(-1, 1)
    restored = ((restored + 1) * 127.5).round().byte()
    sheet = Image.new("RGB", (columns * (RESOLUTION + 2), rows * 2 * (RESOLUTION + 2)), "grey")
    for index in range(len(chosen)):
        row, column = divmod(index, columns)
        for below, image in enumerate((chosen[index], restored[index])):
            corner = (column * (RESOLUTION + 2), (2 * row + below) * (RESOLUTION + 2))
            sheet.paste(Image.fromarray(image.permute(1, 2, 0).numpy()), corner)
    return sheet


if __name__ == "__main__":
    main(tyro.cli(Recipe))
