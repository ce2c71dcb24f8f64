"""Experts of any architecture behind one small protocol: the DiT of Atoll, or a diffusers model."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from atoll.core.networks import DIFFUSERS_CLASSES, ConfigJson, DiffusersConfig, DiffusersName, NetworkConfig
from atoll.nets.conditioning import Condition, check_labels


@runtime_checkable
class Expert(Protocol):
    """The interface of an expert for training and the ensemble; it is also a torch.nn.Module."""

    def __call__(self, x: Tensor, timestep: Tensor, condition: Condition | None = None) -> Tensor:
        """Return the prediction for noisy images x (batch, channels, height, width) at timesteps from 0 to 1000.

        It has the shape of x, or twice its channels if the network also predicts a learned variance.
        """

    @property
    def config(self) -> NetworkConfig:
        """The specification from which `build` makes an equal network."""


class DiffusersExpert(nn.Module, ABC):
    """A diffusers model as an expert. Subclasses define how it takes its conditioning."""

    class_name: DiffusersName

    def __init__(self, **config: Any) -> None:
        import diffusers

        super().__init__()
        self.model: Any = getattr(diffusers, DIFFUSERS_CLASSES[self.class_name])(**config)
        self.channels: int = self.model.config.in_channels

    def forward(self, x: Tensor, timestep: Tensor, condition: Condition | None = None) -> Tensor:
        """Call the model with the parts of the condition that it takes; drop a learned variance."""
        times = timestep.reshape(-1).expand(len(x)).float()
        condition = condition or Condition()
        condition = condition.marked() if self.training else condition
        output: Tensor = self.model(x, timestep=times, return_dict=False, **self.arguments(x, condition))[0]
        return output[:, : self.channels]

    @abstractmethod
    def arguments(self, x: Tensor, condition: Condition) -> dict[str, Tensor | None]:
        """Return the keyword arguments of the model for a condition."""

    @property
    def config(self) -> DiffusersConfig:
        """The class name and the diffusers configuration of the model."""
        fields = {key: value for key, value in dict(self.model.config).items() if not key.startswith("_")}
        return DiffusersConfig(self.class_name, fields)


def _with_null(given: Tensor | None, null: Tensor, dropped: Tensor | None, *, batch: int) -> Tensor:
    """Replace missing or dropped conditions by the null condition: tokens (tokens, width), or a vector (width,)."""
    if given is None:
        return null.expand(batch, *null.shape)
    if dropped is None:
        return given
    return torch.where(dropped.view(-1, *[1] * (given.ndim - 1)), null.to(given.dtype), given)


def _labels(label: Tensor | None, null: int, dropped: Tensor | None, *, x: Tensor) -> Tensor:
    if label is None:
        return torch.full((len(x),), null, device=x.device)
    check_labels(label, null)
    label = torch.where(label < 0, null, label)  # images without a label have -1
    return label if dropped is None else torch.where(dropped, null, label)


class PixArtExpert(DiffusersExpert):
    """PixArt-alpha of diffusers, conditioned on text tokens."""

    class_name = "PixArtExpert"

    def __init__(self, **config: Any) -> None:
        super().__init__(**{"use_additional_conditions": False, **config})
        # 0.02 is the standard deviation with which DiT initializes its embeddings, of the null class too.
        self.null_text = nn.Parameter(torch.randn(1, self.model.config.caption_channels) * 0.02)

    def arguments(self, x: Tensor, condition: Condition) -> dict[str, Tensor | None]:
        """Return text tokens with their mask."""
        text = _with_null(condition.text, self.null_text, condition.dropped, batch=len(x))
        mask = None if condition.text is None else condition.text_mask
        if mask is not None and condition.dropped is not None:
            mask = mask | condition.dropped[:, None]
        return {"encoder_hidden_states": text, "encoder_attention_mask": mask}


class DiTExpert(DiffusersExpert):
    """DiT of diffusers, conditioned on class labels."""

    class_name = "DiTExpert"

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        for block in self.model.transformer_blocks:
            # The training loop drops conditions, with its reproducible random numbers; the network must not.
            block.norm1.emb.class_embedder.dropout_prob = 0.0

    def arguments(self, x: Tensor, condition: Condition) -> dict[str, Tensor | None]:
        """Return class labels; the row after the last class is the null class."""
        return {"class_labels": _labels(condition.label, self.model.config.num_embeds_ada_norm, condition.dropped, x=x)}


class SD3Expert(DiffusersExpert):
    """SD3 transformer of diffusers, the MMDiT of the DDM paper, conditioned on text tokens and pooled text.

    The output of its joint attention depends on the number of text tokens. `null_tokens` is the number of null tokens
    that replace a missing text. It should be the text length of training, because a dropped text has that many.
    """

    class_name = "SD3Expert"

    def __init__(self, null_tokens: int = 1, **config: Any) -> None:
        super().__init__(**config)
        self.null_tokens = null_tokens
        self.null_text = nn.Parameter(torch.randn(1, self.model.config.joint_attention_dim) * 0.02)
        self.null_pooled = nn.Parameter(torch.randn(self.model.config.pooled_projection_dim) * 0.02)

    def arguments(self, x: Tensor, condition: Condition) -> dict[str, Tensor | None]:
        """Return text tokens and pooled text. SD3 takes no mask: padding tokens are part of its text."""
        null = self.null_text if condition.text is not None else self.null_text.expand(self.null_tokens, -1)
        return {
            "encoder_hidden_states": _with_null(condition.text, null, condition.dropped, batch=len(x)),
            "pooled_projections": _with_null(condition.pooled, self.null_pooled, condition.dropped, batch=len(x)),
        }

    @property
    def config(self) -> DiffusersConfig:
        """The class name, the diffusers configuration, and the number of null tokens if it is not 1."""
        config = super().config
        added: ConfigJson = {"null_tokens": self.null_tokens} if self.null_tokens != 1 else {}
        return replace(config, fields={**config.fields, **added})


class UNetExpert(DiffusersExpert):
    """UNet2D of diffusers, conditioned on class labels or unconditioned; its last class embedding is the null class.

    So `num_class_embeds` is one more than the number of classes.
    """

    class_name = "UNetExpert"

    def arguments(self, x: Tensor, condition: Condition) -> dict[str, Tensor | None]:
        """Return class labels if the network has them."""
        classes = self.model.config.num_class_embeds
        return {"class_labels": _labels(condition.label, classes - 1, condition.dropped, x=x)} if classes else {}


KINDS: dict[str, type[DiffusersExpert]] = {
    kind.class_name: kind for kind in (PixArtExpert, DiTExpert, SD3Expert, UNetExpert)
}
