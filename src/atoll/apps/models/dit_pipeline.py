"""One class-conditional DiT as a `DiTPipeline` of diffusers: a folder that opens without Atoll and without its code.

DST/
    model_index.json       DiTPipeline, with the names of the classes
    transformer/           DiTTransformer2DModel, whose output is the network's own
    vae/                   the autoencoder, with the normalization of the latents in its weights
    scheduler/             FlowMapEulerDiscreteScheduler: Euler's method on the times 1, 1 - 1/n, …, 1/n

DiTPipeline fixes what Atoll leaves open. Its null class is number 1000, so the table of classes is filled up with
copies of the null row. It divides latents by one scaling factor and ignores any shift, so a normalization
z = std x + mean of each channel becomes part of the 1x1 convolutions between latents and the autoencoder. Both are
exact. What has no exact form is refused.
"""

import json
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import ExpertContent
from atoll.core.networks import CLASS_NAME
from atoll.encoders.autoencoder import Codec, PixelCodec, Statistics
from atoll.encoders.base_pipeline import BasePipeline
from atoll.experts.network_folder import diffusers_layout
from atoll.experts.pipeline_folder import INDEX_FILE
from atoll.nets.io import CONFIG_FILE, WEIGHTS_FILE, write_weights

NULL_CLASS = 1000
"""The null class of DiTPipeline, a constant of its code."""
_CLASSES = "transformer_blocks.{}.norm1.emb.class_embedder.embedding_table.weight"


def write_dit_pipeline(
    artifact: Artifact, network: nn.Module, content: ExpertContent, codec: Codec | PixelCodec | BasePipeline
) -> None:
    """Write the folder; raise an error if a DiTPipeline cannot give the same images."""
    import diffusers

    # Every condition under which the pipeline computes the same as Atoll.
    weights, fields = diffusers_layout(network) or ({}, {})
    objective, shape = content.objective, content.latents.shape
    refused = "; without --dit-pipeline the export is a folder of Atoll, with --standalone one with its own code"
    if fields.get(CLASS_NAME) != "DiTTransformer2DModel":
        raise AtollError(
            f"{content.job} is no DiTTransformer2DModel, which has classes, no text, modulation: zero, "
            f"frequency_shift: 1 and mlp_norm_eps: 1e-5{refused}"
        )
    if (objective.prediction, objective.schedule.name) != ("velocity", "linear"):
        raise AtollError(
            f"{content.job} predicts {objective.prediction} with the schedule {objective.schedule.name}, which Atoll "
            f"converts to a velocity on the linear path and a DiTPipeline does not{refused}"
        )
    classes = int(fields["num_embeds_ada_norm"])  # type: ignore[arg-type]
    if classes > NULL_CLASS:
        raise AtollError(f"{content.job} has {classes} classes, a DiTPipeline at most {NULL_CLASS}{refused}")
    if shape[1:] != (fields["sample_size"],) * 2:
        raise AtollError(f"{content.job}: a DiTPipeline needs square latents of the network's own size{refused}")
    if not isinstance(codec, Codec):
        raise AtollError(f"{content.job} has no autoencoder, which a DiTPipeline needs{refused}")
    if not hasattr(diffusers, "FlowMapEulerDiscreteScheduler"):
        raise AtollError(f"diffusers {diffusers.__version__} lacks its scheduler; it needs 0.39 or newer{refused}")
    autoencoder = _normalizing(codec.network, Statistics.of(content.statistics))
    if autoencoder is None:
        kind = type(codec.network).__name__
        raise AtollError(f"{kind} has no layer that can hold the normalization of each channel{refused}")

    for number in range(fields["num_layers"]):  # type: ignore[arg-type]
        name = _CLASSES.format(number)
        null = weights[name][-1:].expand(NULL_CLASS - classes, -1)
        weights[name] = torch.cat([weights[name], null])
    # The pipeline computes with the number of output channels, which a diffusers network may leave open.
    fields |= {"num_embeds_ada_norm": NULL_CLASS, "out_channels": fields["out_channels"] or fields["in_channels"]}
    folder = artifact.folder / "transformer"
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(weights, folder / WEIGHTS_FILE)
    artifact.write(f"transformer/{CONFIG_FILE}", (json.dumps(fields, indent=2) + "\n").encode())
    parts = {"vae": autoencoder, "scheduler": diffusers.FlowMapEulerDiscreteScheduler()}
    for name, part in parts.items():
        part.save_pretrained(artifact.folder / name)
    index = {CLASS_NAME: "DiTPipeline", "_diffusers_version": diffusers.__version__}
    index["id2label"] = {str(number): label for number, label in enumerate(content.labels)}
    index |= {name: ["diffusers", type(part).__name__] for name, part in parts.items()}
    index["transformer"] = ["diffusers", fields[CLASS_NAME]]
    artifact.write(INDEX_FILE, (json.dumps(index, indent=2) + "\n").encode())


def _normalizing(autoencoder: Any, statistics: Statistics) -> Any:
    """Return an autoencoder whose latents, times its scaling factor, are normalized; None if it cannot be one."""
    autoencoder = deepcopy(autoencoder).float()
    mean, std = torch.tensor(statistics.mean), torch.tensor(statistics.std)
    if not mean.any() and bool((std == std[0]).all()):
        autoencoder.register_to_config(scaling_factor=1 / statistics.std[0], shift_factor=None)
        return autoencoder
    if not hasattr(autoencoder, "post_quant_conv"):  # AutoencoderTiny
        return None
    # Decoding begins with W z + b, where z = std x + mean. Encoding ends with the mean and log-variance of z.
    count = len(mean)
    before: Any = autoencoder.post_quant_conv or _identity(count)
    after: Any = autoencoder.quant_conv or _identity(2 * count)
    before.bias.data += before.weight.data.flatten(1) @ mean
    before.weight.data *= std.view(1, -1, 1, 1)
    after.weight.data[:count] /= std.view(-1, 1, 1, 1)
    after.bias.data[:count] = (after.bias.data[:count] - mean) / std
    after.bias.data[count:] -= 2 * std.log()
    autoencoder.post_quant_conv, autoencoder.quant_conv = before, after
    used = {"use_quant_conv": True, "use_post_quant_conv": True}
    autoencoder.register_to_config(scaling_factor=1.0, shift_factor=None, **used)
    return autoencoder


def _identity(channels: int) -> nn.Conv2d:
    layer = nn.Conv2d(channels, channels, 1).requires_grad_(False)
    nn.init.dirac_(layer.weight)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer
