"""Placement of experts on several devices."""

from collections.abc import Sequence

import torch

from atoll.experts.expert import ExpertReference


def spread_experts(references: Sequence[ExpertReference], devices: Sequence[torch.device]) -> tuple[torch.device, ...]:
    """Return a device for each expert, such that all devices hold about the same bytes, and get about the same use.

    Experts go largest first to the device with the fewest bytes so far, the classic heuristic of scheduling (longest
    processing time first). Experts are usually of one size; then the number of images of their clusters decides: a
    router sends images to experts about as often as their clusters occur in the data.
    """
    use = [reference.density.images if reference.density else 0.0 for reference in references]
    held = dict.fromkeys(devices, (0, 0.0))  # bytes and use of each device
    placed: dict[int, torch.device] = {}
    for number in sorted(range(len(references)), key=lambda number: (-references[number].size, -use[number])):
        device = min(devices, key=lambda device: held[device])
        size, used = held[device]
        held[device] = size + references[number].size, used + use[number]
        placed[number] = device
    return tuple(placed[number] for number in range(len(references)))
