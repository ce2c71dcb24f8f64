"""Open a run, an exported folder or a release as a sampler."""

from collections.abc import Sequence
from pathlib import Path

import torch

from atoll.core.device import compute_dtype, parse_devices
from atoll.core.errors import AtollError
from atoll.core.layout import CONFIG_FILE
from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.sampler import Sampler
from atoll.experts.expert import DeviceOptions, open_router
from atoll.experts.folder import is_folder, open_folder
from atoll.experts.run import open_run


def load(
    source: str | Path,
    model: str = "experts",
    *,
    max_loaded_experts: int | None = None,
    device: str | torch.device | None = None,
    devices: str | Sequence[str] | None = None,
    dtype: str | torch.dtype | None = None,
    strict: bool = False,
    routing: str = "top-1",
    quantize: str | None = None,
    compile: bool = False,
    verify: bool = False,
) -> Sampler:
    """Open a run, a folder written by `atoll export`, or the Paris release; the latter two also by their hub names.

    `model` is `experts` (all experts with the router), one of them (`expert:3`), `monolith`, `student` or `merged`.
    Experts are spread over `devices` (such as "cuda:0,cuda:1"), by default all visible accelerators; everything else is
    on the first of them. `device` names a single one. The default `dtype` is bfloat16 on accelerators and float32 on
    CPUs. At most `max_loaded_experts` experts are on each device at once; None means all. Experts that are not finished
    are listed in `.missing`, and the model works without them; with `strict` they are an error. `verify` checks the
    hash of every file; a copy of a shared run is always checked against its signed snapshot.
    """
    used = parse_devices(devices if device is None else [str(device)])
    options = DeviceOptions(used[0], compute_dtype(used[0], dtype), quantize, compile, used)
    run = Path(source)
    if (run / CONFIG_FILE).is_file():
        opened = open_run(run, model, verify=verify, strict=strict)
    elif is_folder(source):
        opened = open_folder(source, model)
    else:
        raise AtollError(f"{run} is not a run: it has no {CONFIG_FILE}; nor is it a pipeline folder or a hub name")
    opened.encoders.place(options.device, options.dtype)
    router = None if opened.router is None else open_router(opened.router, options)
    ensemble = Ensemble(
        opened.experts, router, device_options=options, max_loaded_experts=max_loaded_experts, routing=routing
    )
    return Sampler(ensemble, opened.encoders, opened.missing)
