"""Fixtures shared by all tests."""

import torch

# Tests run in two workers on two cores: one thread each, or they wait for one another.
torch.set_num_threads(1)
