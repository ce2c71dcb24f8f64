"""Compare the DiT with diffusers' PixArt of the same dimensions and with the matrix-multiply rate of this machine.

    python benchmarks/nets.py [--quick] [--json]

A training step is forward, backward and fused AdamW; both sides drop text for classifier-free guidance. Networks have
the width and heads of the named size and two blocks. Batches hold 2048 image tokens. The share of the matmul rate is
the FLOP rate of Atoll's step over that of matrix products with the shape of its MLP. Sampling rows measure one step:
Atoll prepares the keys and values of 77 text tokens once and uses one timestep for the batch; diffusers is called as
usual.
The fold rows report the error of converting AdaLN-Zero weights into AdaLN-Single.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from diffusers import PixArtTransformer2DModel
from torch import Tensor, nn
from torch.nn import functional

from atoll.apps.models.convert import ForeignCheckpoint, feature_error
from atoll.apps.models.fold import FlowMatchingOptions, to_flow_matching
from atoll.core.networks import SIZES
from atoll.flow import objective
from atoll.nets import Condition, DiT, DiTConfig
from harness import Row, interleave, run

DEPTH, PATCH, TEXT_TOKENS, TEXT_WIDTH, TOKENS = 2, 2, 77, 768, 2048
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHARES = {"fp32": 0.85, "bf16": 0.6}


class Case:
    """The networks of Atoll and of diffusers, and one batch for both."""

    def __init__(self, size: str, side: int, dtype: str, images: int | None = None) -> None:
        torch.manual_seed(0)
        self.width, self.heads, self.dtype = SIZES[size]["width"], SIZES[size]["heads"], DTYPES[dtype]
        self.tokens = (side // PATCH) ** 2
        self.images = images or TOKENS // self.tokens
        self.ours = DiT(
            DiTConfig(
                self.width, DEPTH, self.heads, PATCH, size=side, text_width=TEXT_WIDTH, text_projection="mlp"
            )
        )  # fmt: skip
        self.theirs = PixArtTransformer2DModel(
            num_attention_heads=self.heads, attention_head_dim=self.width // self.heads, in_channels=4, out_channels=4,
            num_layers=DEPTH, cross_attention_dim=self.width, sample_size=side, patch_size=PATCH,
            caption_channels=TEXT_WIDTH, use_additional_conditions=False,
        )  # fmt: skip
        self.x = torch.randn(self.images, 4, side, side)
        self.time = torch.rand(self.images) * 1000
        self.text = torch.randn(self.images, TEXT_TOKENS, TEXT_WIDTH)
        self.mask = torch.rand(self.images, 1) * TEXT_TOKENS > torch.arange(TEXT_TOKENS) - 8
        self.dropped = torch.arange(self.images) % 10 == 0

    def predict_ours(self, network: nn.Module) -> Tensor:
        """Return the output of Atoll's network."""
        output: Tensor = network(self.x, self.time, Condition(self.text, self.mask, dropped=self.dropped))
        return output

    def predict_theirs(self, network: nn.Module) -> Tensor:
        """Return the output of diffusers' network."""
        text = torch.where(self.dropped[:, None, None], 0.0, self.text)
        mask = self.mask | self.dropped[:, None]
        arguments = {"encoder_hidden_states": text, "encoder_attention_mask": mask, "timestep": self.time}
        output: Tensor = network(self.x, return_dict=False, **arguments)[0]
        return output

    def step(self, network: nn.Module, predict: Callable[[nn.Module], Tensor], compiled: bool) -> Callable[[], None]:
        """Return a function that makes one training step."""
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, fused=True)
        called = torch.compile(network) if compiled else network

        def train() -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16):
                loss = (predict(called).float() - self.x).square().mean()
            loss.backward()
            optimizer.step()

        return train

    def matmul(self) -> Callable[[], object]:
        """Return a function that multiplies matrices with the shape of the MLP's first layer."""
        left = torch.randn(self.images * self.tokens, self.width).to(self.dtype)
        right = torch.randn(4 * self.width, self.width).to(self.dtype)
        return lambda: functional.linear(left, right)

    def step_flops(self) -> float:
        """Return the FLOPs of forward and backward; backward counts as two forward passes."""
        d, n, text = self.width, self.tokens, TEXT_TOKENS
        per_block = n * 14 * d * d + text * 2 * d * d + 2 * n * (n + text) * d
        projections = text * (TEXT_WIDTH * d + d * d) + n * d * 2 * 4 * PATCH**2
        return 3 * 2 * self.images * (DEPTH * per_block + projections)


def training(size: str, side: int, dtype: str, seconds: float, compiled: bool = False) -> Iterable[Row]:
    case = Case(size, side, dtype)
    sides: dict[str, Callable[[], object]] = {
        "ours": case.step(case.ours, case.predict_ours, compiled),
        "diffusers": case.step(case.theirs, case.predict_theirs, compiled),
        "matmul": case.matmul(),
    }
    times = interleave(sides, seconds=seconds)
    name = f"{size} width, {case.tokens} tokens, {dtype}{', compiled' if compiled else ''}"
    yield Row(f"training step vs diffusers: {name}", times["diffusers"] / times["ours"], target=1.0)
    rate = 2 * case.images * case.tokens * 4 * case.width**2 / times["matmul"]
    target = SHARES[dtype] if size == "B" and not compiled else None
    yield Row(f"share of matmul rate: {name}", case.step_flops() / times["ours"] / rate, target=target)


def forward(size: str, side: int, seconds: float) -> Iterable[Row]:
    case = Case(size, side, "fp32", images=4)
    case.ours.eval()
    case.theirs.eval()
    case.time = torch.full((case.images,), 500.0)
    with torch.inference_mode():
        prepared = case.ours.prepare(Condition(case.text, case.mask, dropped=case.dropped))
        time = torch.tensor(500.0)
        times = interleave(
            {
                "ours": lambda: case.ours(case.x, time, prepared),
                "diffusers": lambda: case.predict_theirs(case.theirs),
            },
            seconds=seconds,
        )
    yield Row(
        f"sampling step vs diffusers: {size} width, {case.tokens} tokens",
        times["diffusers"] / times["ours"],
        target=1.1,
    )


def fold(trained: bool, steps: int) -> Iterable[Row]:
    """Measure the error of folding AdaLN-Zero into AdaLN-Single, for a small class-conditional DDPM DiT."""
    torch.manual_seed(0)
    network = DiT(DiTConfig(96, 6, 3, 2, size=8, modulation="zero", num_classes=4))
    if trained:
        train_waves(network, steps)
    else:
        for parameter in network.parameters():
            nn.init.normal_(parameter, std=0.1)
    options = FlowMatchingOptions(text_width=0, time="same")
    state, config, _, residuals = to_flow_matching(network.state_dict(), network.config, options)
    source = ForeignCheckpoint(Path("source"), "atoll", network.config, network.state_dict())
    error = feature_error(source, ForeignCheckpoint(Path("folded"), "atoll", config, state))
    name = f"trained for {steps} steps" if trained else "random weights"
    yield Row(f"fold, {name}: residual of the modulation", residuals["residual"], better="lower")
    yield Row(f"fold, {name}: residual of its change in time", residuals["residual_in_time"], better="lower")
    yield Row(f"fold, {name}: error of the features", error, better="lower")


def train_waves(network: DiT, steps: int) -> None:
    """Train on plane waves whose direction is the class, with the objective of the original DiT."""
    goal, optimizer = objective("ddpm-linear"), torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    axis = torch.arange(8.0)
    for step in range(steps):
        label = torch.randint(4, (32,), generator=generator)
        phase = 6.28 * torch.rand(32, 4, 1, 1, generator=generator)
        angle = 0.785 * label.view(-1, 1, 1, 1)
        x0 = torch.sin(angle.cos() * axis.view(-1, 1) + angle.sin() * axis + phase)
        noised = goal.corrupt(x0, seed=0, step=step)
        dropped = torch.rand(32, generator=generator) < 0.1
        output = network(noised.input, noised.timestep, Condition(label=label, dropped=dropped))
        optimizer.zero_grad()
        goal.loss(output, noised).mean().backward()
        optimizer.step()


def measure(quick: bool) -> Iterable[Row]:
    if quick:
        yield from training("XS", 16, "fp32", 4)
        yield from training("XS", 16, "bf16", 6)
        yield from training("S", 32, "fp32", 6)
        yield from forward("S", 32, 3)
        yield from fold(trained=False, steps=0)
        return
    for size, seconds in (("XS", 5.0), ("S", 8.0), ("B", 12.0)):
        for side in (16, 32):
            for dtype in DTYPES:
                yield from training(size, side, dtype, seconds)
            yield from forward(size, side, 4)
    for dtype in DTYPES:
        yield from training("S", 32, dtype, 8, compiled=True)
    yield from fold(trained=False, steps=0)
    yield from fold(trained=True, steps=300)


if __name__ == "__main__":
    run("Networks: DiT compared with diffusers' PixArt and the matrix-multiply rate", measure)
