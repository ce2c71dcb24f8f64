"""Estimate the memory that LoRA experts of a base model train in, for networks of the sizes that diffusers has.

    python examples/base_memory.py [--rank 16] [--resolution 1024]

Each network has the default sizes of its class in diffusers. No weights are made. The estimate is the one that
`atoll train RUN --dry-run` prints, for a GPU in bfloat16 with activation checkpointing. It leaves out the tokens of the
prompt and the context of the device.
"""

import argparse
import json
from dataclasses import replace

import diffusers
import torch

from atoll.core import config as configuration
from atoll.core.networks import BaseConfig, LoraSpec, TraceSpec
from atoll.core.presets import PRESETS
from atoll.data.shapes import DataShapes
from atoll.experts.cost import image_cost
from atoll.train.estimate import job_bytes

NETWORKS = {
    "PixArtTransformer2DModel": 8,
    "SanaTransformer2DModel": 32,
    "SD3Transformer2DModel": 8,
    "Lumina2Transformer2DModel": 8,
    "ZImageTransformer2DModel": 8,
    "FluxTransformer2DModel": 16,
    "QwenImageTransformer2DModel": 16,
}
"""Classes, and the pixels along a side of what the network gets as one place: a latent, or a token of 2 x 2 latents."""
PACKED = 16


def base_config(name: str, lora: LoraSpec, factor: int) -> BaseConfig:
    """Return the specification of an expert; of the trace, only the kind of the state has an effect."""
    with torch.device("meta"):
        fields = json.loads(json.dumps(dict(getattr(diffusers, name)().config), default=str))
    shape = (1024, 64) if factor == PACKED else (4, 32, 32)
    trace = TraceSpec("state", shape, False, "time", 1.0, 0.0, 1, {}, (), {})
    network = {key: value for key, value in fields.items() if not key.startswith("_")}
    channels = network["in_channels"]
    return BaseConfig("local", "0" * 64, name, network, channels, trace, lora)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    for option, default in (("--rank", 16), ("--resolution", 1024)):
        parser.add_argument(option, type=int, default=default)
    options = parser.parse_args()
    batches = [configuration.resolve(PRESETS["base"], {"train.batch_size": size}).train for size in ("1", "4")]
    print("| network | parameters | adapter | base | base in memory | job, 1 image | job, 4 images |")
    print("|---|---|---|---|---|---|---|")
    for name, factor in NETWORKS.items():
        config = base_config(name, LoraSpec(options.rank, float(options.rank)), factor)
        shapes = DataShapes((config.channels, *[options.resolution // factor] * 2), None, ())
        cost, cuda = image_cost(config, shapes), torch.device("cuda")
        sizes = [2 * cost.frozen, *(job_bytes(config, shapes, settings, device=cuda) for settings in batches)]
        # A quantized base saves the same in all of them.
        small = replace(config, lora=LoraSpec(options.rank, float(options.rank), quantize="int8"))
        saved = sizes[1] - job_bytes(small, shapes, batches[0], device=cuda)
        counts = [f"`{name}`", f"{cost.frozen / 1e9:.1f} B", f"{cost.parameters / 1e6:.0f} M"]
        for cells, less in (([*counts, "bfloat16"], 0), (["", "", "", "int8"], saved)):
            base, *jobs = ((size - less) / 2**30 for size in sizes)
            print(f"| {' | '.join([*cells, f'{base:.1f} GiB', *(f'{job:.0f} GiB' for job in jobs)])} |", flush=True)


if __name__ == "__main__":
    main()
