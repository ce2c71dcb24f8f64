"""A DiT-S/2 overfits one batch under every objective."""

import pytest
import torch

from atoll.flow import OBJECTIVES, objective
from atoll.nets import Condition, DiT, DiTConfig

QUICK = ("flow-matching",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in OBJECTIVES])
def test_s2_overfits_one_batch(name):
    torch.manual_seed(0)
    network = DiT(DiTConfig.named("DiT-S/2", size=8, text_width=16, num_classes=4))
    generator = torch.Generator().manual_seed(1)
    x0, text = torch.randn(4, 4, 8, 8, generator=generator), torch.randn(4, 5, 16, generator=generator)
    condition = Condition(text, label=torch.arange(4)).drop(torch.tensor([False, False, False, True]))
    goal = objective(name)
    noised = goal.corrupt(x0, seed=0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(60):
        loss = goal.loss(network(noised.input, noised.timestep, condition), noised).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if losses[-1] < 0.05 * losses[0]:
            return
    pytest.fail(f"the loss only fell from {losses[0]:.3f} to {losses[-1]:.3f}")
