"""Predictions of networks, and the conversion of each one to any other.

With z = alpha x0 + sigma eps:

    epsilon        eps
    x0             x0
    v_prediction   alpha eps - sigma x0          (Salimans and Ho 2022)
    velocity       alpha' x0 + sigma' eps        (eps - x0 on the linear path)
    score          -eps / sigma                  (gradient of the log-density)

Each is linear in (x0, eps). Given z, the pair (x0, eps) is therefore a linear combination of z and the prediction. This
inverse can divide by an alpha or sigma that goes to 0. Then the division is regularized at the resolution of the dtype,
such that the pair stays consistent with z: alpha x0 + sigma eps = z always holds.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.errors import unknown
from atoll.core.names import PREDICTIONS, Prediction
from atoll.flow.schedules import Coefficients, Schedule


class CleanAndNoise(NamedTuple):
    """An estimate of the clean image and the matching estimate of the noise: z = alpha x0 + sigma eps."""

    x0: Tensor
    eps: Tensor


class PairWeights(NamedTuple):
    """x0 = x0_state · z + x0_output · y and eps = eps_state · z + eps_output · y, for a prediction y at state z."""

    x0_state: Tensor
    x0_output: Tensor
    eps_state: Tensor
    eps_output: Tensor


def check_prediction(name: str) -> None:
    """Raise an error for an unknown prediction."""
    if name not in PREDICTIONS:
        raise ValueError(unknown("prediction", name, PREDICTIONS))


def pair_weights(prediction: Prediction, c: Coefficients, resolution: float) -> PairWeights:
    """Return the linear map from (state, prediction) to (x0, eps).

    `resolution` is the relative rounding error of state and prediction (finfo.eps): an error of that size is amplified
    to order 1 at most.
    """
    check_prediction(prediction)
    alpha, sigma = c.alpha, c.sigma
    zero, one = torch.zeros_like(alpha), torch.ones_like(alpha)
    if prediction == "x0":
        # eps = (z - alpha y) / sigma. Where sigma vanishes, eps is cut off, and x0 takes the remaining part of z.
        inverse, remainder = _regularized_inverse(sigma, resolution)
        return PairWeights(
            remainder * _regularized_inverse(alpha, resolution)[0], sigma * inverse, inverse, -alpha * inverse
        )
    if prediction in ("epsilon", "score"):
        # x0 = (z - sigma eps) / alpha, with the roles exchanged. For the score y, eps = -sigma y.
        inverse, remainder = _regularized_inverse(alpha, resolution)
        scale = one if prediction == "epsilon" else -sigma
        eps_state = remainder * _regularized_inverse(sigma, resolution)[0]
        return PairWeights(inverse, -sigma * inverse * scale, eps_state, alpha * inverse * scale)
    if prediction == "v_prediction":
        # The map (x0, eps) -> (z, y) is a rotation times sqrt(alpha² + sigma²), so its inverse is always stable.
        norm = alpha**2 + sigma**2
        return PairWeights(alpha / norm, -sigma / norm, sigma / norm, alpha / norm)
    # Velocity: Cramer's rule. The determinant alpha sigma' - sigma alpha' is positive wherever the log-SNR falls; it is
    # 1 on the linear path.
    determinant = alpha * c.d_sigma - sigma * c.d_alpha
    weights = PairWeights(c.d_sigma / determinant, -sigma / determinant, -c.d_alpha / determinant, alpha / determinant)
    return PairWeights(*(weight + zero for weight in weights))


def to_pair(output: Tensor, x: Tensor, t: Tensor, *, prediction: Prediction, schedule: Schedule) -> CleanAndNoise:
    """Convert a prediction at state x (batch, …) and time t (batch,) to the pair (x0, eps)."""
    pair = _wide_pair(output, x, t, prediction=prediction, schedule=schedule)
    return CleanAndNoise(pair.x0.to(x.dtype), pair.eps.to(x.dtype))


def from_pair(pair: CleanAndNoise, t: Tensor, prediction: Prediction, *, schedule: Schedule) -> Tensor:
    """Convert a pair (x0, eps) at time t to a prediction."""
    check_prediction(prediction)
    _check_same_shape(pair.x0, pair.eps)
    c = schedule.at(t, pair.x0)
    if prediction == "epsilon":
        return pair.eps
    if prediction == "x0":
        return pair.x0
    if prediction == "v_prediction":
        value = c.alpha * pair.eps - c.sigma * pair.x0
    elif prediction == "velocity":
        value = c.d_alpha * pair.x0 + c.d_sigma * pair.eps
    else:
        value = -pair.eps * _regularized_inverse(c.sigma, torch.finfo(pair.eps.dtype).eps)[0]
    return value.to(pair.x0.dtype)


def convert(
    output: Tensor, x: Tensor, t: Tensor, *, source: Prediction, target: Prediction, schedule: Schedule
) -> Tensor:
    """Convert a prediction at state x and time t to another one under the same schedule."""
    if source == target:
        check_prediction(source)
        _check_same_shape(output, x)
        return output
    return from_pair(_wide_pair(output, x, t, prediction=source, schedule=schedule), t, target, schedule=schedule).to(
        x.dtype
    )


def _wide_pair(output: Tensor, x: Tensor, t: Tensor, *, prediction: Prediction, schedule: Schedule) -> CleanAndNoise:
    """Return the pair in at least float32, so that half-precision inputs are rounded once, at the end."""
    _check_same_shape(output, x)
    w = pair_weights(prediction, schedule.at(t, x), coarser_resolution(output, x))
    return CleanAndNoise(w.x0_state * x + w.x0_output * output, w.eps_state * x + w.eps_output * output)


def coarser_resolution(output: Tensor, x: Tensor) -> float:
    """Return the larger relative rounding error of the output of a network and the state.

    The output of a bfloat16 network has an error of 2^-7, even if the state and the solver are float32.
    """
    return max(torch.finfo(output.dtype).eps, torch.finfo(x.dtype).eps)


def _regularized_inverse(value: Tensor, resolution: float) -> tuple[Tensor, Tensor]:
    """Return 1/value as value/(value² + resolution²), which is 0 at 0, and the remainder 1 - value · inverse."""
    scale = value**2 + resolution**2
    return value / scale, resolution**2 / scale


def _check_same_shape(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise ValueError(f"prediction and state must have equal shapes, got {tuple(a.shape)} and {tuple(b.shape)}")
