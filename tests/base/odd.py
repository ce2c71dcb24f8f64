"""Made-up pipelines whose names, time and sign no library uses, and some that must be refused."""

from types import SimpleNamespace
from typing import Any

import torch
from diffusers import ConfigMixin, DDPMScheduler, DiffusionPipeline, FlowMatchEulerDiscreteScheduler, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

FLAWS = {
    "time": "moment is not a",
    "size": "own loop differs",
    "second time": "moment, pulse",
    "two calls": "2 times a step",
    "part": "picture may have it as a part",
    "output": "neither the network's output nor its negative",
    "no prompt": "depends on the prompt",
    "random": "words differs between two equal calls",
    "batch": "words of two images",
    "guidance inside": "neither the network's output",
    "noise": "own loop differs",
}
"""What is wrong with a pipeline, and a part of the message that refuses it."""


class OddNetwork(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Predicts the negative from (words, moment, picture), in this order; moment = 250 sigma + 3."""

    @register_to_config
    def __init__(self, channels: int = 4, width: int = 8) -> None:
        super().__init__()
        self.read = nn.Linear(width, channels)
        self.look = nn.Linear(channels, channels)

    def forward(self, words: Tensor, moment: Tensor, picture: Tensor, pulse: Tensor | float = 0) -> Tensor:
        """Return (batch, height, width, channels), as `picture`."""
        moment = moment + 0 * pulse
        mood = self.read(words).mean(1) + moment[:, None] / 250
        return torch.tanh(self.look(picture[..., : self.config.channels]) + mood[:, None, None])


class OddPipeline(DiffusionPipeline):  # type: ignore[misc]
    """States (batch, height, width, channels) of a twelfth of the size; the prompt is a tensor of its letters."""

    def __init__(self, transformer: Any, scheduler: Any, vae: Any = None, flaw: str | None = None) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)
        self.flaw = flaw

    @torch.no_grad()
    def __call__(
        self, prompt: list[str], height: int, width: int, num_inference_steps: int = 9, generator: Any = None, **_: Any
    ) -> Any:
        flaw, scheduler = self.flaw, self.scheduler
        words = [torch.tensor([[ord(letter) % 13 / 13] * 8 for letter in text]) for text in prompt]
        if flaw == "no prompt":
            words = [torch.ones(3, 8) for _ in words]
        if flaw == "random":
            words = [part + torch.rand(()) for part in words]
        text = torch.stack(words) if flaw != "batch" else torch.cat(words)[None].expand(len(prompt), -1, -1)
        x = torch.stack([torch.randn(height // 12, width // 12, 4, generator=own) for own in generator])
        scheduler.set_timesteps(num_inference_steps)
        for index, step in enumerate(scheduler.timesteps):
            sigma = step / 1000
            if flaw == "time":
                sigma = sigma**2
            if flaw == "size":
                sigma = sigma * height / 64
            moment = (250 * sigma + 3).expand(len(x))
            picture = torch.cat([x, x], -1) if flaw == "part" else x
            extra = {"pulse": moment * 2} if flaw == "second time" else {}
            output = self.transformer(text, moment, picture, **extra)
            if flaw == "two calls":
                output = 2 * output - self.transformer(0 * text, moment, picture)
            if flaw == "output":
                output = output**3
            if flaw == "guidance inside" and index == 2:
                output = 1.004 * output
            x = scheduler.step(-output, step, x).prev_sample
            if flaw == "noise":
                x = x + 0.01
        return SimpleNamespace(images=x)


SCHEDULERS: dict[str, Any] = {"velocity": FlowMatchEulerDiscreteScheduler(shift=2.0), "epsilon": DDPMScheduler()}
"""A scheduler for each prediction."""


def odd(flaw: str | None = None, prediction: str = "velocity") -> OddPipeline:
    """Return a pipeline, whole or with a flaw."""
    torch.manual_seed(0)
    return OddPipeline(OddNetwork(), SCHEDULERS[prediction], flaw=flaw)
