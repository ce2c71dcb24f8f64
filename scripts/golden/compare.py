"""Compare tensors and images by group and name, bit for bit or within the tolerances for another machine."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = Mapping[str, NDArray[Any]]
Results = Mapping[str, Tensors]
"""Tensors and images by group and name."""
Rows = Mapping[str, tuple[int, list[str]]]
"""For each group, the number of its tensors or images, and a line for each difference."""

MAX_UPDATE_ERROR = 1e-2
"""Tolerance for the weights on another machine: norm of the difference over the norm of the update. With the kernels of
torch, MKL and oneDNN for older processors it is 2e-4 to 5e-4; half precision alone gives 2e-4."""
MAX_IMAGE_ERROR = 2
"""Tolerance for the images on another machine, of 255. With those kernels the difference is 1."""
MAX_LINES = 3
"""Maximum number of differences printed per group."""


DELETED = (":balanced", ":log_prior")
"""Tensors of the golden commit that the present code lacks: two unused tensors of routers."""


def bit_differences(golden: Tensors, present: Tensors) -> list[str]:
    """Return a line for each tensor or image that is missing, added or not equal bit for bit."""
    lines = mismatches(golden, present)
    for name in sorted(golden):
        old, new = golden[name], present.get(name)
        if new is None or old.shape != new.shape or (old.dtype == new.dtype and old.tobytes() == new.tobytes()):
            continue
        apart = np.abs(new.astype(np.float64) - old.astype(np.float64))
        dtype = "" if old.dtype == new.dtype else f"{old.dtype} became {new.dtype}, "
        lines.append(f"{name}: {dtype}{(apart != 0).sum()} of {apart.size} values differ, by at most {apart.max():.3g}")
    return lines


def update_differences(golden: Tensors, present: Tensors) -> list[str]:
    """Return a line if a training's update is not the same within the tolerance."""
    if lines := mismatches(golden, present):
        return lines
    error = norm({name: present[name].astype(np.float64) - golden[name] for name in golden}) / norm(golden)
    return [] if error <= MAX_UPDATE_ERROR else [f"the weights differ by {error:.1e} of the update's norm"]


def image_differences(golden: Tensors, present: Tensors) -> list[str]:
    """Return a line for each image that is missing, added or not the same within the tolerance."""
    lines = mismatches(golden, present)
    for name in () if lines else sorted(golden):
        apart = int(np.abs(present[name].astype(int) - golden[name].astype(int)).max())
        lines += [f"{name}: differs by up to {apart} of 255"] if apart > MAX_IMAGE_ERROR else []
    return lines


def mismatches(golden: Tensors, present: Tensors) -> list[str]:
    """Return a line for each tensor or image that only one side has, or that has another shape."""
    old, new = ({name: str(tensor.shape) for name, tensor in side.items()} for side in (golden, present))
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return [f"{name}: golden {old.get(name, 'missing')}, present {new.get(name, 'missing')}" for name in names]


def norm(tensors: Tensors) -> float:
    """Return the Euclidean norm over all tensors."""
    return float(np.sqrt(sum(np.square(tensor.astype(np.float64)).sum() for tensor in tensors.values())))


def compare(golden: Results, present: Results, differences: Callable[[Tensors, Tensors], list[str]]) -> Rows:
    """Compare group by group, without the deleted tensors."""
    kept = {
        group: {name: tensor for name, tensor in tensors.items() if not name.endswith(DELETED)}
        for group, tensors in golden.items()
    }
    both = {group: (kept.get(group, {}), present.get(group, {})) for group in (*present, *kept)}
    return {group: (max(map(len, pair)), differences(*pair)) for group, pair in both.items()}


def report(rows: Rows, *, same: str = "equal") -> int:
    """Print each group with its differences, or `same` if it has none; return the exit code."""
    width = max(map(len, rows))
    for group, (count, lines) in rows.items():
        print(f"  {group:<{width}}  {count:>4}  {'DIFFERENT' if lines else same}")
        more = [f"and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
        print("".join(f"      {line}\n" for line in [*lines[:MAX_LINES], *more]), end="")
    different = sum(bool(lines) for _, lines in rows.values())
    total = sum(count for count, _ in rows.values())
    print(f"DIFFERENT: {different} of {len(rows)} groups" if different else f"{same}: {total} tensors and images")
    return int(different > 0)
