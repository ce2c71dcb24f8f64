"""The device that networks run on. This is the only module of core that imports torch."""

import torch


def device() -> torch.device:
    """Return the accelerator if this machine has a usable one, else the processor."""
    # Without the check, a CUDA build of torch returns CUDA even on machines without a GPU or its driver.
    kind = torch.accelerator.current_accelerator(check_available=True)
    # With its index: the current device is per thread, so "cuda" alone could mean another GPU in another thread.
    return torch.device("cpu") if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())
