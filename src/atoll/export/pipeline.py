"""The ensemble as a pipeline of diffusers.

    pipe = AtollPipeline.from_pretrained("emoji-export")       # a folder that atoll export wrote, or its hub name
    images = pipe("a red apple", num_inference_steps=50, guidance_scale=4.0, routing="top-2", seed=0).images

Experts and router are components like any other. All experts are in memory; to have fewer, use `atoll.load`, which
opens the same folder.
"""

import inspect
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import ConfigMixin, DiffusionPipeline, FlowMatchEulerDiscreteScheduler, ModelMixin
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from torch import Tensor, nn

from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError, unknown
from atoll.core.layout import MANIFEST_FILE
from atoll.core.manifests import PIPELINE, NetworkContent, PipelineContent
from atoll.data.encoders import Encoders
from atoll.data.stages.latents import Codec, PixelCodec
from atoll.data.stages.text import TextEncoder
from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.sampler import Sampler
from atoll.ensemble.samples import Samples
from atoll.experts import stored
from atoll.experts.density import Density
from atoll.experts.expert import Declaration, DeviceOptions, ExpertReference, OpenRouter
from atoll.experts.expert_cache import weights_of
from atoll.experts.folder import COMPONENTS, PIPELINE_CLASS, ModelIndex, fetch, forget_paths, refusal
from atoll.experts.folder import verify as verify_folder
from atoll.export.model_card import CARD_FILE
from atoll.nets import Condition, Router

__all__ = ["AtollPipeline", "ExpertModel", "RouterModel"]

OUTPUTS = ("pil", "np", "pt", "latent")
_OPTIONAL = ("vae", "text_encoder", "tokenizer", "router")


class _Declared(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """A network with what it declares, as diffusers wants its models: saved to a folder and read from it."""

    def __init__(self, network: nn.Module, content: NetworkContent, density: Density | None = None) -> None:
        super().__init__()
        self.network = network.eval().requires_grad_(False)
        self.content = content
        self.density = density
        self.register_to_config(declaration=content.model_dump(mode="json"))

    def declaration(self) -> Declaration:
        """What the network says of itself."""
        return Declaration.of(self.content)

    def forward(self, x: Tensor, time: Tensor, condition: Condition | None = None) -> Tensor:
        """The network's own answer, in terms of its own objective; `time` is on the 0..1000 scale."""
        answer: Tensor = self.network(x, time, condition)
        return answer

    def save_pretrained(self, save_directory: str | Path, safe_serialization: bool = True, **_: Any) -> None:
        """Write the network and its declaration; always safetensors."""
        _only_safetensors(safe_serialization)
        stored.write(Path(save_directory), self.network, self.content, density=self.density)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        subfolder: str | None = None,
        dtype: torch.dtype | None = None,
        torch_dtype: torch.dtype | None = None,
        **_: Any,
    ) -> "_Declared":
        """Read what `save_pretrained` wrote; diffusers says `dtype` in some places and `torch_dtype` in others."""
        folder = Path(pretrained_model_name_or_path) / (subfolder or "")
        found = stored.Stored.open(folder)
        return cls(found.network().to(dtype or torch_dtype or torch.float32), found.content, found.reference().density)


class ExpertModel(_Declared):
    """An expert."""

    def member(self) -> ExpertReference:
        """As an expert of an ensemble, in memory already."""
        return ExpertReference(self.declaration(), lambda: self.network, weights_of(self.network), None, self.density)


class RouterModel(_Declared):
    """The router."""

    def opened(self, dtype: torch.dtype) -> OpenRouter:
        """Ready to answer."""
        if not isinstance(self.network, Router):
            raise AtollError(f"the component router holds a {type(self.network).__name__}, not a router")
        return OpenRouter(self.declaration(), self.network, dtype)


class AtollPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Many experts as one: expert_0, expert_1, …, router, vae, text_encoder, tokenizer, scheduler."""

    _optional_components: ClassVar = list(_OPTIONAL)
    expert_0: ExpertModel
    router: RouterModel | None
    vae: Any
    text_encoder: Any
    tokenizer: Any
    scheduler: Any

    def __new__(cls, **components: Any) -> "AtollPipeline":
        """A pipeline of as many experts as there are."""
        count = sum(name.startswith("expert_") for name in components)
        made: AtollPipeline = super().__new__(cls if "_experts" in cls.__dict__ else _sized(count))
        return made

    def __init__(self, **components: Any) -> None:
        super().__init__()
        self.register_modules(**{**dict.fromkeys(_OPTIONAL), **components})

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> "AtollPipeline":
        """Open a folder that `atoll export` or `save_pretrained` wrote, here or on the hub; every file is checked."""
        folder = fetch(pretrained_model_name_or_path)
        index = ModelIndex.of(folder)
        if not index.exported:
            raise refusal(folder, index)
        verify_folder(folder, index)
        sized = _sized(len(index.expert_names(folder)))
        if "device_map" not in options:
            options.setdefault("low_cpu_mem_usage", False)  # the other way needs accelerate
        if options.pop("trust_remote_code", False) or options.pop("custom_pipeline", None):
            raise AtollError("AtollPipeline runs no code that comes with a model; leave trust_remote_code out")
        options["use_safetensors"] = True
        pipe: AtollPipeline = super(AtollPipeline, sized).from_pretrained(folder, trust_remote_code=False, **options)
        return pipe

    def save_pretrained(self, save_directory: str | Path, safe_serialization: bool = True, **options: Any) -> None:
        """Write all components, and a manifest with the hash of every file."""
        _only_safetensors(safe_serialization)
        if options.pop("push_to_hub", False):
            raise AtollError(f"save the pipeline first, then: hf upload OWNER/NAME {save_directory}")
        folder = Path(save_directory).resolve()
        (folder / MANIFEST_FILE).unlink(missing_ok=True)
        artifact = Artifact(folder.parent, folder.name)
        artifact.begin(PIPELINE, {"saved_by": PIPELINE_CLASS})
        super().save_pretrained(folder, safe_serialization=True, **options)
        forget_paths(folder)
        artifact.commit(PipelineContent(experts=len(self.experts)), exclude=[CARD_FILE])

    @property
    def experts(self) -> list[ExpertModel]:
        """The experts, in order."""
        return [getattr(self, name) for name in _names(self._experts)]

    def sampler(self) -> Sampler:
        """Return the same components as `atoll.load` would; made anew, for components can be replaced."""
        members = [expert.member() for expert in self.experts]
        placement = DeviceOptions(self.expert_0.device, self.expert_0.dtype)
        router = self.router.opened(placement.dtype) if self.router is not None and len(members) > 1 else None
        return Sampler(Ensemble(members, router, placement=placement), Encoders(self._codec, self._texts))

    def _codec(self) -> Codec | PixelCodec:
        pixels = self.expert_0.content.latents.autoencoder == "pixels"
        return PixelCodec() if pixels else Codec(self._needed("vae"), self.vae.device)

    def _texts(self) -> TextEncoder:
        text, encoder = self.expert_0.content.text, self._needed("text_encoder")
        assert text is not None
        return TextEncoder(encoder, self.tokenizer, text.max_tokens, device=encoder.device)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 4.0,
        *,
        routing: str | None = None,
        label: str | int | list[str | int] | None = None,
        cluster: int | list[int] | None = None,
        num_images_per_prompt: int = 1,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        batch_size: int = 64,
        **settings: Any,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Pictures of prompts, of classes (`label`), of both, or of anything.

        The same `seed` gives the same pictures as `atoll.load(…).sample`; a `generator` gives it if there is none.
        `output_type` is pil, np, pt, or latent. The scheduler integrates, unless a `solver` is named. Further keywords
        are those of `atoll.ensemble.Settings`: guidance_interval, rescale, solver, shift and
        scheduler_times. With `scheduler_times=True` a plain flow-matching scheduler keeps the times of its own
        `set_timesteps`, as other diffusers pipelines do.
        """
        if output_type not in OUTPUTS:
            raise AtollError(unknown("output_type", output_type, OUTPUTS))
        sampler = self.sampler()
        settings |= {"steps": num_inference_steps, "guidance_scale": guidance_scale, "seed": _seed(seed, generator)}
        if routing is not None:
            settings["routing"] = routing
        if "solver" not in settings:
            settings = {**self._integration(sampler, settings.get("scheduler_times", False)), **settings}
        if sampler.scheduler is not None and "shift" in settings:
            raise AtollError("the pipeline's scheduler has a shift of its own; set it there, or name a solver")
        told = [_repeated(part, num_images_per_prompt) for part in (prompt, label, cluster)]
        count = max([len(part) for part in told if part is not None], default=num_images_per_prompt)
        made = sampler.generate(told[0], told[1], count, clusters=told[2], batch_size=batch_size, **settings)
        images = _as(made, output_type)
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _integration(self, sampler: Sampler, scheduler_times: bool) -> dict[str, str | float]:
        """Plain Euler steps are made by Atoll's own solver, on even times; all others by the scheduler itself."""
        plain = FlowMatchEulerDiscreteScheduler(shift=self.scheduler.config.get("shift", 1.0))
        ours, known = _settings(self.scheduler), _settings(plain)
        if type(self.scheduler) is type(plain) and ours == known and not scheduler_times:
            return {"solver": "euler", "shift": self.scheduler.config.shift}
        sampler.scheduler = self.scheduler
        return {"solver": "flow-euler"} if scheduler_times else {}

    def _needed(self, name: str) -> Any:
        component = getattr(self, name)
        if component is None:
            raise AtollError(f"this pipeline has no {name}, which its experts need")
        return component


def _names(count: int) -> list[str]:
    return [f"expert_{number}" for number in range(count)]


@cache
def _sized(count: int) -> type[AtollPipeline]:
    """The pipeline class for a number of experts: diffusers learns the components from the signature of __init__."""
    if count < 1:
        raise AtollError("a pipeline needs at least one expert: expert_0=…")

    def __init__(self: AtollPipeline, **components: Any) -> None:  # noqa: N807
        AtollPipeline.__init__(self, **components)

    kind = inspect.Parameter.KEYWORD_ONLY
    parts = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    parts += [inspect.Parameter(name, kind) for name in (*_names(count), "scheduler")]
    parts += [inspect.Parameter(name, kind, default=None) for name in _OPTIONAL]
    __init__.__signature__ = inspect.Signature(parts)  # type: ignore[attr-defined]
    return type(PIPELINE_CLASS, (AtollPipeline,), {"__init__": __init__, "_experts": count, "__module__": COMPONENTS})


def _only_safetensors(safe_serialization: bool) -> None:
    if not safe_serialization:
        raise AtollError("safe_serialization=False would write pickles; Atoll writes and reads safetensors only")


def _seed(seed: int | None, generator: torch.Generator | None) -> int:
    if generator is not None and not isinstance(generator, torch.Generator):
        raise AtollError("give one generator, or a seed: every picture's noise is a function of seed and position")
    if seed is not None or generator is None:
        return seed or 0
    return int(torch.randint(2**31, (), generator=generator, device=generator.device))


def _settings(scheduler: Any) -> dict[str, object]:
    """Return the settings of a scheduler, whichever it has, to compare them."""
    return {key: value for key, value in dict(scheduler.config).items() if not key.startswith("_")}


def _repeated(told: Any, times: int) -> list[Any] | None:
    """One thing or several to be told, each so many times in a row."""
    several = told if isinstance(told, list | tuple) or told is None else [told]
    return None if several is None else [part for part in several for _ in range(times)]


def _as(made: Samples, output_type: str) -> Any:
    if output_type == "pil":
        return made.images
    if output_type == "latent":
        return made.latents
    pixels = np.stack([np.asarray(image) for image in made.images]).astype(np.float32) / 255
    return pixels if output_type == "np" else torch.from_numpy(pixels).permute(0, 3, 1, 2)
