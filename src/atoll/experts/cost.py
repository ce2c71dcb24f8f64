"""The cost of training: parameters and FLOPs of a network, counted by a forward pass on the meta device.

Tensors on the meta device have shapes but no values, so the pass costs neither memory nor arithmetic. A FLOP counter
sums the matrix products. `atoll.train.estimate` estimates the memory of training.
"""

import json
import re
import time
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from atoll.core.config_sections import TrainSection
from atoll.core.errors import AtollError, first_line
from atoll.core.networks import BaseConfig, DiffusersConfig, NetworkConfig, RouterConfig, read_network
from atoll.data.shapes import DataShapes
from atoll.nets import Condition, build
from atoll.nets.base import BaseExpert
from atoll.nets.blocks import hidden_matrices, transformer_blocks

BACKWARD = 2
"""The backward pass costs twice the forward pass: one matrix product for the inputs, one for the weights."""
LEVEL = re.compile(r"(down|mid|up)_blocks?(?:\.(\d+))?")
"""Where a layer of a UNet of diffusers is: the side, and the number of the block."""
FIRST_ROWS = 256
"""Rows of the first measured product. They are doubled while a product takes less than `MEASURED_SECONDS`."""
MEASURED_SECONDS = 0.02
"""Time of one measurement: a thousand times the latency of a GPU, and short enough to be undisturbed on a busy machine.
"""


@dataclass(frozen=True)
class Product:
    """The shape of a matrix product: (rows, inputs) times (inputs, outputs)."""

    rows: int
    inputs: int
    outputs: int

    @property
    def flops(self) -> int:
        """One multiplication and one addition for each pair of an input and an output."""
        return 2 * self.rows * self.inputs * self.outputs


@dataclass(frozen=True)
class Cost:
    """The cost of one network for one image."""

    parameters: int
    forward_flops: int
    largest_product: Product
    """The linear layer with the most FLOPs: the first one of the MLP of a transformer."""

    muon_flops: int
    """FLOPs of Muon in one optimizer step, of all processes together; 0 for a network without transformer blocks."""

    blocks: int
    """Number of transformer blocks."""

    layer_outputs: int
    """Elements that all linear and convolutional layers return for the image, of which its activations are a multiple.
    """

    backward: int = BACKWARD
    """FLOPs of the backward pass over those of the forward pass; 1 if the weights are frozen."""

    frozen: int = 0
    """Number of weights that are not trained: those of the base of an adapter."""

    def training_flops(self, settings: TrainSection) -> int:
        """Return the FLOPs of training on one image.

        A forward and a backward pass, with checkpointing another forward pass, and with Muon the image's share of an
        optimizer step. AdamW has no matrix products.
        """
        optimizer = self.muon_flops // settings.batch_size if settings.optimizer == "muon" else 0
        return self.forward_flops * (1 + self.backward + settings.activation_checkpointing) + optimizer


def image_cost(config: NetworkConfig, shapes: DataShapes) -> Cost:
    """Count the cost of a network for one image of these shapes; for the mean image, if they have several sizes."""
    text, described = shapes.text and shapes.text[:2], json.dumps(config.to_dict(), sort_keys=True)
    costs = [(_count(described, own.latents, text), count) for own, count in shapes.by_size]
    flops = sum(cost.forward_flops * count for cost, count in costs) // sum(count for _, count in costs)
    return replace(_count(described, shapes.latents, text), forward_flops=flops)


def parameter_count(config: NetworkConfig) -> int:
    """Count the parameters of a network without building it in memory."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


@cache
def _count(described: str, shape: tuple[int, ...], text: tuple[int, int] | None) -> Cost:
    config = read_network(json.loads(described))
    if isinstance(config, BaseConfig):
        return _estimate(config, shape)
    with torch.device("meta"):
        network = build(config)
        x, at = torch.zeros(1, *shape), torch.zeros(1)
        takes_text = not isinstance(config, RouterConfig) and config.text_width
        classes = 0 if isinstance(config, DiffusersConfig) else config.num_classes
        condition = Condition(
            text=torch.zeros(1, *text) if text and takes_text else None,
            pooled=torch.zeros(1, config.pooled_width) if config.pooled_width else None,
            label=torch.zeros(1, dtype=torch.long) if classes else None,
        )
    products: list[Product] = []
    outputs: list[int] = []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        outputs.append(output.numel())
        if isinstance(layer, nn.Linear):
            products.append(Product(inputs[0].numel() // layer.in_features, layer.in_features, layer.out_features))

    for layer in network.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.register_forward_hook(note)
    with FlopCounterMode(display=False) as counter:
        try:
            network(x, at, condition)
        except (RuntimeError, ValueError) as error:
            reason = first_line(error)
            raise AtollError(f"a {config.class_name} does not take latents of shape {shape}: {reason}") from error
    parameters = sum(parameter.numel() for parameter in network.parameters())
    largest = max(products, key=lambda product: product.flops, default=Product(1, 1, 1))  # or convolutions alone
    muon = sum(m.flops for m in hidden_matrices(network))
    return Cost(parameters, counter.get_total_flops(), largest, muon, len(transformer_blocks(network)), sum(outputs))


def _estimate(config: BaseConfig, shape: tuple[int, ...]) -> Cost:
    """Estimate the cost of a base network, whose arguments are unknown here: every weight once for each token.

    Attention and the tokens of the prompt are left out. A UNet halves the sides from one block to the next.
    """
    with torch.device("meta"):
        network = build(config)
    assert isinstance(network, BaseExpert)
    levels, places, products = len(getattr(network.base, "down_blocks", ())), shape[1] * shape[2], []
    for path, layer in network.base.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            found = LEVEL.match(path)
            number = int(found[2] or 0) if found else 0
            level = number if found is None or found[1] == "down" else levels - 1 - number
            tokens = places // (4**level if levels else config.patch**2)
            products.append(Product(tokens, layer.weight[0].numel(), layer.weight.shape[0]))
    # The blocks of a foreign transformer: entries of its lists of modules with the layers of an attention
    entries = [block for child in network.base.children() if isinstance(child, nn.ModuleList) for block in child]
    blocks = [block for block in entries if sum(isinstance(part, nn.Linear) for part in block.modules()) >= 4]
    parameters = sum(parameter.numel() for parameter in network.parameters())
    whole = sum(parameter.numel() for parameter in network.base.parameters())
    return Cost(
        parameters,
        sum(product.flops for product in products),
        max(products, key=lambda product: product.flops),
        0,
        len(blocks),
        sum(product.rows * product.outputs for product in products),
        BACKWARD if config.lora is None else 1,
        whole - parameters,
    )


def measured_rate(device: torch.device, dtype: torch.dtype, product: Product) -> float:
    """Measure the FLOPs per second of a matrix product on this device, an upper bound for networks.

    It has the inputs and outputs of `product`. It has fewer rows if all of them would take too long.
    """
    x = torch.randn(min(FIRST_ROWS, product.rows), product.inputs, device=device).to(dtype)
    # Transposed, as a linear layer stores its weight.
    weight = torch.randn(product.outputs, product.inputs, device=device).to(dtype).T

    def seconds(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            result = x @ weight
        float(result[0, 0])  # waits for the device
        return time.perf_counter() - start

    seconds(1)  # loads the kernel
    while len(x) < product.rows and seconds(1) < MEASURED_SECONDS:
        x = x.repeat(2, 1)[: product.rows]
    count = 1 + int(MEASURED_SECONDS / seconds(1))
    # The best of ten: other processes can only slow a measurement down.
    best = min(seconds(count) for _ in range(10)) / count
    return replace(product, rows=len(x)).flops / best
