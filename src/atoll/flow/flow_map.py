"""The flow map of a velocity field, and the target with which a few-step student learns it from noise alone.

The flow of dx/dt = v(x, t) moves the state x at time t to X(s) at the earlier time s = t - d. A student predicts the
*average velocity* F over a step of length d, so that one step is

    f(x, t, d) = x - d F(x, t, d),        f = X(t - d) for the exact F                             (1)

X(t) = x, so (1) holds at d = 0 whatever F is. The derivative of (1) with respect to d must therefore agree with that of
the flow, dX(t - d)/dd = -v(X, t - d):

    F + d dF/dd = v(f(x, t, d), t - d)                                                             (2)

The loss is the squared error of F against (2) with the current student inside, as a constant:

    target = v(f, t - d) - d dF/dd                                                                 (3)

This is FreeFlow's predictor (arXiv 2511.19428). It needs no data: the first step begins at noise, and (3) evaluates the
teacher v where the student arrives. The error is 0 exactly if (2) holds for all d, that is, if f is the flow.

**Several steps.** With S equal steps, step i = 0 … S-1 goes from t_i = 1 - i/S to t_{i+1}. The student learns (2) for
each i with d in (0, 1/S]. Step i begins at x_i = f(x_{i-1}, t_{i-1}, 1/S), where the student's own steps before it end,
x_0 being noise: the states that it meets in sampling. If F is exact for the steps before i, then x_i lies on the
trajectory of the teacher, and the exact F of step i completes it. So S exact steps compose to the flow from 1 to 0.

**Correction.** Errors of early lengths move the states at which (3) evaluates the teacher, and nothing brings them
back. FreeFlow's corrector compares distributions instead. A sample x0 of the student is noised to
x_r = (1 - r) x0 + r n. Let q_r be the density of such states and v_q their marginal velocity E[n - x0 | x_r], which an
online network learns from them. The score of q_r is -(x_r + (1 - r) v_q) / r, and that of the teacher's p_r has its v.
Hence for x0 = x - d F the gradient of the Kullback-Leibler divergence of q_r from p_r is

    d KL / dF = d (1 - r)² / r  E[v_q(x_r, r) - v(x_r, r)]                                         (4)

The correction is the difference in (4). It is 0 if the student samples the teacher's distribution. The factor is left
to the distribution of r, as in FreeFlow.
"""

from collections.abc import Callable

from torch import Tensor

from atoll.core.device import upload
from atoll.flow.schedules import broadcast
from atoll.flow.solvers import VelocityField

AverageVelocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""average(x, t, d): the mean velocity between the times t and t - d (batch,) on the trajectory through x (batch, …)."""
DIFFERENCE = 0.005
"""Half the distance of the two values of the central difference. The embedding of d changes over tenths, so its error
is far below that of a network, and so is the rounding error of float32 divided by it (1e-5)."""


def step_targets(
    velocity: VelocityField,
    average: AverageVelocity,
    x: Tensor,
    t: Tensor,
    d: Tensor,
    *,
    longest: float,
    at_d: Tensor | None = None,
) -> Tensor:
    """Return the targets (3) for states x (batch, …) at times t (batch,), with lengths d (batch,) in (0, longest].

    Times and lengths are on the CPU, as for a `VelocityField`. The derivative is a central difference, one-sided at the
    ends of the interval, beyond which nothing is trained. `at_d` is average(x, t, d), if it is known. Call it without
    gradients.
    """
    low, high = (d - DIFFERENCE).clamp(min=0), (d + DIFFERENCE).clamp(max=longest)
    span, length = (broadcast(upload(part, x.device), x) for part in (high - low, d))
    derivative = (average(x, t, high) - average(x, t, low)) / span
    arrived = x - length * (average(x, t, d) if at_d is None else at_d)
    return velocity(arrived, t - d) - length * derivative


def correction(
    velocity: VelocityField, online: VelocityField, sample: Tensor, r: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the difference v_q - v in (4) of samples x0 (batch, …), and the loss of the online velocity (batch,).

    The difference has no gradient; the gradient of the loss is that of the online network. Times r are on the CPU.
    """
    share = broadcast(upload(r, sample.device), sample)
    noised = (1 - share) * sample + share * noise
    student = online(noised, r)
    loss = (student - (noise - sample)).square().flatten(1).mean(1)
    return student.detach() - velocity(noised, r), loss
