"""Nodes of ComfyUI for ensembles: copy this folder to `custom_nodes` of a ComfyUI whose Python has Atoll.

The ensemble is an ordinary MODEL and its autoencoder an ordinary VAE, so ComfyUI's own nodes sample and decode:
KSampler with its samplers and schedulers, SamplerCustom, VAE Decode. A flow model has sigma = t, as SD3 in ComfyUI.
ComfyUI combines conditional and null rows itself, and each row is routed with its own condition: guidance is that of
`guidance_weights="separate"`.
"""

from typing import Any, ClassVar

import comfy.conds
import comfy.latent_formats
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import numpy as np
import torch
from torch import Tensor

import atoll
from atoll import flow
from atoll.core.errors import AtollError
from atoll.core.sizes import Size
from atoll.ensemble import RoutingState, Sampler, parse
from atoll.nets import Condition, concatenate

ROUTING, TRACE = "atoll_routing", "atoll_trace"
"""Where the options of a MODEL hold its routing, and the weights of its last sampling."""


class FlowSampling:
    """The linear path in the terms of ComfyUI: sigma is the time t, and the timestep 1000 t."""

    sigma_min, sigma_max = 0.001, 1.0  # of a grid of 1000 times, which some schedulers choose from
    sigmas = torch.arange(1, 1001) / 1000

    def timestep(self, sigma: Any) -> Any:
        return sigma * flow.TIMESTEP_SCALE

    def sigma(self, timestep: Any) -> Any:
        return timestep / flow.TIMESTEP_SCALE

    def percent_to_sigma(self, percent: float) -> float:
        return 1.0 - min(max(percent, 0.0), 1.0)

    def calculate_input(self, sigma: Tensor, noise: Tensor) -> Tensor:
        return noise

    def calculate_denoised(self, sigma: Tensor, model_output: Tensor, model_input: Tensor) -> Tensor:
        return model_input - sigma.view(-1, *[1] * (model_input.ndim - 1)) * model_output

    def noise_scaling(self, sigma: Tensor, noise: Tensor, latent_image: Tensor, max_denoise: bool = False) -> Tensor:
        return sigma * noise + (1.0 - sigma) * latent_image

    def inverse_noise_scaling(self, sigma: Tensor, latent: Tensor) -> Tensor:
        return latent / (1.0 - sigma)


class Conditions(comfy.conds.CONDRegular):
    """Conditions of a batch, which ComfyUI repeats and concatenates."""

    def process_cond(self, batch_size: int, device: Any, **_: Any) -> "Conditions":
        rows = torch.arange(batch_size) % len(self.cond.tensors()[0]) if self.cond.tensors() else slice(None)
        return Conditions(self.cond[rows].to(device))

    def can_concat(self, other: "Conditions") -> bool:
        mine, theirs = ([part.shape[1:] for part in (own.marked().tensors())] for own in (self.cond, other.cond))
        return bool(mine == theirs)

    def concat(self, others: "list[Conditions]") -> Condition:
        return concatenate([self.cond, *(other.cond for other in others)])

    def size(self) -> list[int]:
        return [1]


class EnsembleModel(comfy.model_base.BaseModel):  # type: ignore[misc]
    """The ensemble as a model of ComfyUI. It places its experts itself."""

    def __init__(self, sampler: Sampler) -> None:
        torch.nn.Module.__init__(self)  # not that of BaseModel, which builds a U-Net
        self.sampler, self.model_sampling = sampler, FlowSampling()
        self.latent_format = comfy.latent_formats.LatentFormat()
        self.latent_format.latent_channels = sampler.ensemble.shape[0]
        self.device, self.current_patcher = sampler.ensemble.device, None

    def apply_model(
        self, x: Tensor, t: Tensor, transformer_options: dict[str, Any], condition: Condition, **_: Any
    ) -> Tensor:
        """Return the predicted data (batch, C, H, W); times are equal within a batch."""
        state = RoutingState(trace=[])
        v = self.sampler.ensemble.velocity(
            x.float(), t[:1].float(), condition, routing=transformer_options[ROUTING], state=state
        )
        # Rows with the prompt, which ComfyUI marks by 0, in the order of the batch.
        marks, trace = transformer_options["cond_or_uncond"], transformer_options[TRACE]
        now, weights = float(t[0]), state.trace[0].weights.chunk(len(marks)) if state.trace else ()
        if trace and now > trace[-1][0]:
            trace.clear()  # the time only grows when another sampling starts
        trace += [(now, part) for mark, part in zip(marks, weights, strict=True) if mark == 0]
        return self.model_sampling.calculate_denoised(t, v, x)

    def extra_conds(self, **options: Any) -> dict[str, Any]:
        if "atoll" not in options:
            raise AtollError("this model takes the conditioning of the node Atoll Prompt")
        return {"condition": Conditions(options["atoll"])}

    def get_dtype(self) -> torch.dtype:
        return torch.float32  # of the states; the networks have their own

    def memory_required(self, *_: Any, **__: Any) -> int:
        return 0  # the cache of experts limits the memory


class Autoencoder:
    """The autoencoder as a VAE of ComfyUI, for decoding."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def decode(self, samples: Tensor) -> Tensor:
        images = self.sampler.decode(samples.to(self.sampler.ensemble.device))
        return torch.from_numpy(np.stack([np.asarray(image) for image in images])).float() / 255


class Node:
    CATEGORY = "atoll"
    FUNCTION = "run"


class AtollLoader(Node):
    """Open a run, an export or a model on the hub."""

    RETURN_TYPES = ("MODEL", "VAE")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        limit = ("INT", {"default": 0, "min": 0, "max": 1024, "tooltip": "experts in memory at once; 0 is all"})
        return {"required": {"folder": ("STRING", {"default": "runs/demo"}), "max_loaded_experts": limit}}

    def run(self, folder: str, max_loaded_experts: int) -> tuple[Any, Any]:
        device = comfy.model_management.get_torch_device()
        sampler = atoll.load(folder, device=device, max_loaded_experts=max_loaded_experts or None)
        patcher = comfy.model_patcher.ModelPatcher(EnsembleModel(sampler), load_device=device, offload_device=device)
        patcher.model_options["transformer_options"] |= {ROUTING: "top-1", TRACE: []}
        return patcher, Autoencoder(sampler)


class AtollRouting(Node):
    """Choose the experts of every image and step."""

    RETURN_TYPES = ("MODEL",)
    INPUTS: ClassVar = {"model": ("MODEL",), "routing": ("STRING", {"default": "top-2"})}

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": cls.INPUTS}

    def run(self, model: Any, routing: str) -> tuple[Any]:
        if parse(routing).draws:
            raise AtollError(f"{routing} draws experts for an image; ComfyUI evaluates its rows separately")
        routed = model.clone()
        routed.model_options["transformer_options"] |= {ROUTING: routing, TRACE: []}
        return (routed,)


class AtollPrompt(AtollRouting):
    """Encode a prompt, a class (its name or number), or both; without either, it is the null condition."""

    RETURN_TYPES = ("CONDITIONING",)
    INPUTS: ClassVar = {
        "model": ("MODEL",),
        "text": ("STRING", {"default": "", "multiline": True}),
        "label": ("STRING", {"default": ""}),
    }

    def run(self, model: Any, text: str, label: str) -> tuple[Any]:
        sampler, known = model.model.sampler, model.model.sampler.ensemble.conditioning
        classes = [int(label) if label.isdecimal() else label] if label else None
        condition = sampler.encode([text] if text else None, classes)
        if not text and not label:
            condition = sampler.encode([""] if "text" in known else None, [0] if "label" in known else None)
            condition = condition.unconditional()
        return ([[None, {"atoll": condition}]],)


class AtollLatent(AtollRouting):
    """Latents without an image, in the shape of the model; width and height 0 are its default size."""

    RETURN_TYPES = ("LATENT",)
    SIDE: ClassVar = ("INT", {"default": 0, "min": 0, "max": 16384})
    INPUTS: ClassVar = {
        "model": ("MODEL",), "width": SIDE, "height": SIDE, "batch_size": ("INT", {"default": 1, "min": 1}),
    }  # fmt: skip

    def run(self, model: Any, width: int, height: int, batch_size: int) -> tuple[Any]:
        sampler = model.model.sampler
        size = sampler.latent_size(Size(height, width) if width or height else None)
        return ({"samples": torch.zeros(batch_size, sampler.ensemble.shape[0], size.height, size.width)},)


class AtollSigmas(AtollRouting):
    """The times of Atoll's solvers, for SamplerCustom."""

    RETURN_TYPES = ("SIGMAS",)
    INPUTS: ClassVar = {
        "steps": ("INT", {"default": 50, "min": 1}), "shift": ("FLOAT", {"default": 1.0, "min": 0.01, "step": 0.1}),
    }  # fmt: skip

    def run(self, steps: int, shift: float) -> tuple[Tensor]:
        return (torch.tensor(flow.solver_times(steps, shift)),)


class AtollExpertWeights(AtollRouting):
    """Draw the weights of a sampling: an image for each sample, a row for each expert, a column for each evaluation."""

    RETURN_TYPES = ("IMAGE",)
    INPUTS: ClassVar = {
        "model": ("MODEL",),
        "samples": ("LATENT", {"tooltip": "of the sampler, so that this node runs after it"}),
        "cell": ("INT", {"default": 16, "min": 1, "tooltip": "side of a square in pixels"}),
    }

    def run(self, model: Any, samples: Any, cell: int) -> tuple[Tensor]:
        trace = model.model_options["transformer_options"][TRACE]
        if not trace:
            raise AtollError("nothing was sampled with this MODEL; connect the one that the sampler takes")
        weights = torch.stack([weights for _, weights in trace], -1).float()  # (images, experts, evaluations)
        squares = weights.repeat_interleave(cell, 1).repeat_interleave(cell, 2)
        return (squares[..., None].repeat(1, 1, 1, 3),)


NODE_CLASS_MAPPINGS = {
    node.__name__: node
    for node in (AtollLoader, AtollRouting, AtollPrompt, AtollLatent, AtollSigmas, AtollExpertWeights)
}
NODE_DISPLAY_NAME_MAPPINGS = {name: f"Atoll {name.removeprefix('Atoll')}" for name in NODE_CLASS_MAPPINGS}
