"""A network outside Atoll, as a user would write one, for tests/nets/test_own.py."""

import torch
from torch import Tensor, nn

from atoll.nets import Condition


class ConvExpert(nn.Module):
    """Two convolutions with the time and the mean text token as biases."""

    def __init__(self, channels: int, text_width: int = 0, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.time = nn.Linear(1, width)
        self.text = nn.Linear(text_width, width) if text_width else None
        self.last = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x: Tensor, timestep: Tensor, condition: Condition | None = None) -> Tensor:
        hidden = self.first(x) + self.time(timestep.reshape(-1, 1) / 1000)[:, :, None, None]
        if self.text is not None and condition is not None and condition.text is not None:
            text = self.text(condition.text.mean(1))
            if condition.dropped is not None:
                text = torch.where(condition.dropped[:, None], 0.0, text)
            hidden = hidden + text[:, :, None, None]
        return self.last(nn.functional.silu(hidden))
