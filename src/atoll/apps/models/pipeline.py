"""The ensemble as a diffusers pipeline.

    pipe = AtollPipeline.from_pretrained("emoji-export")  # written by atoll export, its name on the Hub, or a run
    images = pipe("a red apple", num_inference_steps=50, guidance_scale=4.0, routing="top-2", seed=0).images

Experts and router are ordinary components, so the placement of diffusers works, with accelerate (the extra `offload`):
`from_pretrained(…, device_map="balanced")` spreads the experts over all GPUs, and `enable_model_cpu_offload()` keeps
them in the memory of the host. `atoll.load(folder, max_loaded_experts=1)` saves as much memory and is faster: it copies
the next expert while the one before it computes.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from diffusers import ConfigMixin, DiffusionPipeline, FlowMatchEulerDiscreteScheduler, ModelMixin
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from torch import Tensor, nn

from atoll.apps.models.model_card import CARD_FILE
from atoll.core import layout
from atoll.core.artifacts import Artifact, Manifest
from atoll.core.errors import AtollError, suggest_keywords, unknown
from atoll.core.layout import CONFIG_FILE, MANIFEST_FILE
from atoll.core.manifests import PIPELINE, NetworkContent, PipelineContent
from atoll.core.names import GuidanceName, GuidanceWeights, SolverName
from atoll.core.networks import BaseConfig
from atoll.data.density import Density
from atoll.encoders.autoencoder import Codec, PixelCodec
from atoll.encoders.encoders import Encoders
from atoll.encoders.text import TextEncoder
from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.sampler import STEP_TENSORS, OnStepEnd, Sampler, load
from atoll.experts import network_folder
from atoll.experts.expert import Declaration, DeviceOptions, NetworkReference, OpenExpert, OpenRouter
from atoll.experts.expert_cache import weight_bytes
from atoll.experts.pipeline_folder import (
    COMPONENTS,
    PIPELINE_CLASS,
    ModelIndex,
    fetch,
    remove_source_paths,
    unsupported_folder,
)
from atoll.experts.pipeline_folder import verify as verify_folder
from atoll.experts.run import network_manifests, open_run, public_content
from atoll.flow import check_scheduler
from atoll.nets import Condition, Router, build

__all__ = ["AtollPipeline", "ExpertModel", "RouterModel"]

OUTPUTS = ("pil", "np", "pt", "latent")
_OPTIONAL = ("vae", "text_encoder", "tokenizer", "router")


def _offloaded(component: Any) -> bool:
    """Return whether accelerate keeps the weights on the CPU, and moves them when `forward` is called."""
    return hasattr(component, "_hf_hook") and component.device.type in ("cpu", "meta")


class _Declared(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """A network with its manifest content, as a diffusers model: it can be saved to a folder and loaded from it."""

    def __init__(self, network: nn.Module, content: NetworkContent, density: Density | None = None) -> None:
        super().__init__()
        self.network = network.eval().requires_grad_(False)
        self.content = content
        self.density = density
        self.register_to_config(declaration=content.model_dump(mode="json"))

    def declaration(self) -> Declaration:
        """Return the declaration of the network: clusters, objective, conditioning and latent space."""
        return Declaration.of(self.content)

    def forward(self, x: Tensor, time: Tensor, condition: Condition | None = None) -> Tensor:
        """Return the output of the network in its prediction type; `time` is on the 0..1000 scale."""
        output: Tensor = self.network(x, time, condition)
        return output

    def save_pretrained(self, save_directory: str | Path, safe_serialization: bool = True, **_: Any) -> None:
        """Write the network and its declaration; always safetensors."""
        _only_safetensors(safe_serialization)
        network_folder.write(Path(save_directory), self.network, self.content, density=self.density)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        subfolder: str | None = None,
        dtype: torch.dtype | None = None,
        torch_dtype: torch.dtype | None = None,
        device_map: str | dict[str, Any] | None = None,
        **_: Any,
    ) -> "_Declared":
        """Load a network that `save_pretrained` wrote."""
        # diffusers passes `dtype` in some places and `torch_dtype` in others.
        folder = Path(pretrained_model_name_or_path) / (subfolder or "")
        found = network_folder.NetworkFolder.open(folder)
        network = found.network().to(dtype or torch_dtype or torch.float32)
        # A dictionary comes from a pipeline that is spread over devices, which moves the network itself.
        network = network.to(device_map) if isinstance(device_map, str) else network
        return cls(network, found.content, found.reference().density)

    # diffusers builds an empty model from these two, to measure its size for device_map="balanced".

    @classmethod
    def load_config(
        cls, pretrained_model_name_or_path: str | Path, **_: Any
    ) -> tuple[dict[str, str], dict[str, Any], None]:
        """Return the folder, which has the declaration; no options are left over, and there is no commit."""
        return {"folder": str(pretrained_model_name_or_path)}, {}, None

    @classmethod
    def from_config(cls, config: dict[str, str], **_: Any) -> "_Declared":
        """Build the network of a folder without its weights."""
        content = network_folder.NetworkFolder.open(Path(config["folder"])).content
        return cls(build(content.network), content)

    @property
    def offloaded(self) -> bool:
        """Whether the weights are on the CPU until `forward` is called."""
        return _offloaded(self)


class ExpertModel(_Declared):
    """An expert."""

    def reference(self) -> NetworkReference:
        """Return the expert as a reference for an ensemble; its network is already in memory."""
        # An offloaded network runs through this module, because the hooks of accelerate are on it.
        network = self if self.offloaded else self.network
        return NetworkReference(self.declaration(), lambda: network, weight_bytes(self.network), None, self.density)


class RouterModel(_Declared):
    """The router."""

    def forward(self, x: Tensor, time: Tensor, condition: Condition | None = None) -> Tensor:
        """Return the calibrated logits (batch, clusters)."""
        return self._router.logits(x, time, condition)

    def logits(self, x: Tensor, time: Tensor, condition: Condition | None = None) -> Tensor:
        """Return `forward`, with the hooks of accelerate."""
        logits: Tensor = self(x, time, condition)
        return logits

    def opened(self, dtype: torch.dtype) -> OpenRouter:
        """Return the router for an ensemble."""
        return OpenRouter(self.declaration(), cast(Router, self) if self.offloaded else self._router, dtype)

    @property
    def _router(self) -> Router:
        if not isinstance(self.network, Router):
            raise AtollError(f"the component router holds a {type(self.network).__name__}, not a router")
        return self.network


class AtollPipeline(DiffusionPipeline):  # type: ignore[misc]
    """The ensemble as a pipeline: expert_0, expert_1, …, router, vae, text_encoder, tokenizer, scheduler."""

    _optional_components: ClassVar = list(_OPTIONAL)
    _callback_tensor_inputs: ClassVar = list(STEP_TENSORS)
    _interrupt = False
    expert_0: ExpertModel
    router: RouterModel | None
    vae: Any
    text_encoder: Any
    tokenizer: Any
    scheduler: Any

    def __new__(cls, **components: Any) -> "AtollPipeline":
        """Create a pipeline of the class for this number of experts."""
        count = sum(name.startswith("expert_") for name in components)
        pipe: AtollPipeline = super().__new__(cls if "_experts" in cls.__dict__ else _sized(count))
        return pipe

    def __init__(self, **components: Any) -> None:
        super().__init__()
        self.register_modules(**{**dict.fromkeys(_OPTIONAL), **components})

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> "AtollPipeline":
        """Load a folder that `atoll export` or `save_pretrained` wrote, local or on the Hub, or the experts of a run.

        Every file is verified.
        """
        if (Path(pretrained_model_name_or_path) / CONFIG_FILE).is_file():
            return cls._of_run(Path(pretrained_model_name_or_path), **options)
        folder = fetch(pretrained_model_name_or_path)
        index = ModelIndex.of(folder)
        if not index.exported:
            raise unsupported_folder(folder, index)
        if index.standalone:
            raise AtollError(
                f"{folder} has its own code, which Atoll does not run; open it with atoll.load, or with "
                "DiffusionPipeline.from_pretrained(…, trust_remote_code=True)"
            )
        stored = verify_folder(folder, index.names(folder))
        sized = _sized(len(stored) - index.has_router)
        if "device_map" not in options:
            options.setdefault("low_cpu_mem_usage", False)  # True would need accelerate
        if options.pop("trust_remote_code", False) or options.pop("custom_pipeline", None):
            raise AtollError("AtollPipeline runs no code of a model; leave trust_remote_code and custom_pipeline out")
        options["use_safetensors"] = True
        pipe: AtollPipeline = super(AtollPipeline, sized).from_pretrained(folder, trust_remote_code=False, **options)
        return pipe

    @classmethod
    def _of_run(
        cls,
        run: Path,
        *,
        torch_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> "AtollPipeline":
        if options:
            raise AtollError(
                f"{', '.join(options)}: a run takes only torch_dtype; for anything else, use an export: "
                f"atoll export {run} FOLDER"
            )
        opened = open_run(run, "experts", strict=True, find_base=False)
        if isinstance(opened.experts[0].declaration.network, BaseConfig):
            raise AtollError(f"the experts of {run} are networks of a base; use atoll.attach(pipe, {str(run)!r})")
        sampler = load(run, device="cpu", dtype="float32", strict=True)
        experts = [expert.name for expert in sampler.ensemble.declarations]
        trained = network_manifests(run, experts, router=sampler.ensemble.router is not None)
        pipe = cls(**dict(components(sampler, trained)))
        return pipe if (dtype or torch_dtype) is None else pipe.to(dtype or torch_dtype)

    def save_pretrained(self, save_directory: str | Path, safe_serialization: bool = True, **options: Any) -> None:
        """Write all components, and a manifest with the SHA-256 of every file."""
        _only_safetensors(safe_serialization)
        if options.pop("push_to_hub", False):
            raise AtollError(f"save the pipeline first, then: hf upload OWNER/NAME {save_directory}")
        folder = Path(save_directory).resolve()
        (folder / MANIFEST_FILE).unlink(missing_ok=True)
        artifact = Artifact(folder.parent, folder.name)
        artifact.begin(PIPELINE, {"saved_by": PIPELINE_CLASS})
        super().save_pretrained(folder, safe_serialization=True, **options)
        remove_source_paths(folder)
        artifact.commit(PipelineContent(experts=len(self.experts)), exclude=[CARD_FILE])

    def enable_sequential_cpu_offload(self, *_: Any, **__: Any) -> None:
        """Raise an error: the blocks share conditions that single layers cannot compute."""
        raise AtollError("the experts cannot be offloaded layer by layer; use enable_model_cpu_offload()")

    @property
    def experts(self) -> list[ExpertModel]:
        """The experts, in the order of their numbers."""
        return [getattr(self, name) for name in _names(self._experts)]

    def sampler(self) -> Sampler:
        """Return a sampler with the components of this pipeline, like that of `atoll.load`."""
        # Not cached: components of a diffusers pipeline can be replaced at any time.
        experts = self.experts
        router = self.router if self.router is not None and len(experts) > 1 else None
        # The states are where the router is. With a device map every component has its own device.
        ensemble = Ensemble(
            [expert.reference() for expert in experts],
            None if router is None else router.opened(experts[0].dtype),
            device_options=DeviceOptions(self._device_of(router or experts[0]), experts[0].dtype),
            expert_devices=[self._device_of(expert) for expert in experts],
        )
        for number, expert in enumerate(experts):
            if expert.offloaded:  # the cache must not move it
                opened = OpenExpert.of(expert.declaration(), expert, ensemble.normalization, expert.dtype)
                ensemble.cache.put(number, opened)
        return Sampler(ensemble, Encoders(lambda *_: self._codec(), lambda *_: self._texts()))

    def _codec(self) -> Codec | PixelCodec:
        pixels = self.expert_0.content.latents.autoencoder == "pixels"
        return PixelCodec() if pixels else Codec(self._needed("vae"), self._device_of(self.vae), self.vae.dtype)

    def _texts(self) -> TextEncoder:
        text, encoder = self.expert_0.content.text, self._needed("text_encoder")
        assert text is not None
        device = self._device_of(encoder)
        return TextEncoder(encoder, self.tokenizer, text.max_tokens, device=device, dtype=encoder.dtype)

    def _device_of(self, component: Any) -> torch.device:
        """Return the device on which a component computes."""
        device: torch.device = self._execution_device if _offloaded(component) else component.device
        return device

    @property
    def interrupt(self) -> bool:
        """Whether the call ends after the current step; a callback or another thread sets `_interrupt`."""
        return self._interrupt

    def encode_prompt(self, prompt: str | list[str]) -> dict[str, Tensor | None]:
        """Return the encoded text as keywords of the call, which then needs no text encoder."""
        return self.sampler().encode_prompt(prompt)

    @suggest_keywords
    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 4.0,
        *,
        negative_prompt: str | list[str] | None = None,
        prompt_embeds: Tensor | None = None,
        prompt_attention_mask: Tensor | None = None,
        pooled_prompt_embeds: Tensor | None = None,
        label: str | int | list[str | int] | None = None,
        cluster: int | list[int] | None = None,
        num_images_per_prompt: int = 1,
        width: int | None = None,
        height: int | None = None,
        guidance_rescale: float | None = None,
        guidance_interval: tuple[float, float] | None = None,
        guidance: GuidanceName | None = None,
        guidance_weights: GuidanceWeights | None = None,
        routing: str | None = None,
        solver: SolverName | None = None,
        shift: float | None = None,
        scheduler_times: bool | None = None,
        seed: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        callback_on_step_end: OnStepEnd | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        output_type: str = "pil",
        return_dict: bool = True,
        batch_size: int = 64,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Generate images from text prompts, classes (`label`), both, or unconditionally.

        The arguments are those of `Sampler.generate`, and the same `seed` gives the same images. `output_type` is pil,
        np, pt or latent. The scheduler integrates the velocity, unless `solver` names another solver. With
        `scheduler_times=True` a flow-matching scheduler uses the times of its `set_timesteps`, as in other diffusers
        pipelines.
        """
        if output_type not in OUTPUTS:
            raise AtollError(unknown("output_type", output_type, OUTPUTS))
        sampler = self.sampler()
        if solver is None:
            solver, own_shift = self._integration(sampler, bool(scheduler_times))
            if sampler.scheduler is not None and shift is not None:
                raise AtollError(
                    "the scheduler of the pipeline already has a shift; set it there, or pass solver= as well"
                )
            shift = own_shift if shift is None else shift
        self._interrupt = False

        def on_step_end(_: Any, step: int, timestep: Tensor, tensors: dict[str, Any]) -> dict[str, Any] | None:
            changed = callback_on_step_end and callback_on_step_end(self, step, timestep, tensors)
            sampler.interrupt = self._interrupt
            return changed

        samples = sampler.generate(
            prompt, negative_prompt=negative_prompt, prompt_embeds=prompt_embeds,
            prompt_attention_mask=prompt_attention_mask, pooled_prompt_embeds=pooled_prompt_embeds, label=label,
            cluster=cluster, num_images_per_prompt=num_images_per_prompt, width=width, height=height,
            num_inference_steps=num_inference_steps, guidance_scale=guidance_scale, guidance_rescale=guidance_rescale,
            guidance_interval=guidance_interval, guidance=guidance, guidance_weights=guidance_weights, routing=routing,
            solver=solver, shift=shift, scheduler_times=scheduler_times, seed=seed, generator=generator,
            latents=latents, callback_on_step_end=on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs, batch_size=batch_size,
        )  # fmt: skip
        self.maybe_free_model_hooks()
        images: Any = samples.latents if output_type == "latent" else samples.images
        if output_type in ("np", "pt"):
            images = np.stack([np.asarray(image) for image in images]).astype(np.float32) / 255
        if output_type == "pt":
            images = torch.from_numpy(images).permute(0, 3, 1, 2)
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _integration(self, sampler: Sampler, scheduler_times: bool) -> tuple[SolverName | None, float | None]:
        """Return the solver and the shift that correspond to the scheduler of the pipeline; None are the defaults."""
        # A FlowMatchEulerDiscreteScheduler with default settings and any shift is Euler's method, which Atoll's solver
        # computes on evenly spaced times, bit-equal to `atoll.load`. Any other scheduler does the steps itself.
        plain = FlowMatchEulerDiscreteScheduler(shift=self.scheduler.config.get("shift", 1.0))
        ours, known = (
            {key: value for key, value in dict(each.config).items() if not key.startswith("_")}
            for each in (self.scheduler, plain)
        )
        if type(self.scheduler) is type(plain) and ours == known and not scheduler_times:
            return "euler", self.scheduler.config.shift
        check_scheduler(self.scheduler)  # before the text encoder and the experts run
        sampler.scheduler = self.scheduler
        return "flow-euler" if scheduler_times else None, None

    def _needed(self, name: str) -> Any:
        component = getattr(self, name)
        if component is None:
            raise AtollError(f"this pipeline has no {name}, but its experts need one")
        return component


def components(sampler: Sampler, trained: Mapping[str, Manifest]) -> Iterator[tuple[str, Any]]:
    """Yield the components of a run's model by name, None for those that it does not need; one is loaded at a time.

    `trained` has the manifests of its networks by their jobs.
    """
    ensemble = sampler.ensemble
    for number, reference in enumerate(ensemble.references):
        content = public_content(reference.declaration.name, trained[reference.declaration.name])
        content = content.model_copy(update={"clusters": reference.declaration.clusters})
        yield f"expert_{number}", ExpertModel(reference.open(), content, reference.density)
    router = ensemble.router
    yield "router", router and RouterModel(router.network, public_content(layout.ROUTER, trained[layout.ROUTER]))
    codec = sampler.encoders.autoencoder()
    encoder = sampler.encoders.text_encoder() if ensemble.conditioning & {"text", "pooled"} else None
    yield "vae", codec.network if isinstance(codec, Codec) else None
    yield "text_encoder", encoder and encoder.network
    yield "tokenizer", encoder and encoder.tokenizer
    yield "scheduler", FlowMatchEulerDiscreteScheduler()


def _names(count: int) -> list[str]:
    return [f"expert_{number}" for number in range(count)]


@cache
def _sized(count: int) -> type[AtollPipeline]:
    """Return the pipeline class for a number of experts."""
    # diffusers reads the names of the components from the signature of __init__, which is fixed for a class. So each
    # number of experts gets a subclass whose signature names expert_0 to expert_(N-1).
    if count < 1:
        raise AtollError("a pipeline needs at least one expert: expert_0=…")

    def __init__(self: AtollPipeline, **components: Any) -> None:  # noqa: N807
        AtollPipeline.__init__(self, **components)

    order = "->".join(["text_encoder", "router", *_names(count), "vae"])
    kind = inspect.Parameter.KEYWORD_ONLY
    parts = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    parts += [inspect.Parameter(name, kind) for name in (*_names(count), "scheduler")]
    parts += [inspect.Parameter(name, kind, default=None) for name in _OPTIONAL]
    __init__.__signature__ = inspect.Signature(parts)  # type: ignore[attr-defined]
    parts_of_class = {"__init__": __init__, "_experts": count, "__module__": COMPONENTS, "model_cpu_offload_seq": order}
    return type(PIPELINE_CLASS, (AtollPipeline,), parts_of_class)


def _only_safetensors(safe_serialization: bool) -> None:
    if not safe_serialization:
        raise AtollError("safe_serialization=False would write pickles; Atoll writes and reads safetensors only")
