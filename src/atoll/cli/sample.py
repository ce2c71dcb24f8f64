"""Verb of sampling: sample."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from tyro.conf import arg

from atoll.api import SampleArguments
from atoll.core import layout


@dataclass(frozen=True)
class Sample(SampleArguments):
    __doc__ = SampleArguments.__doc__

    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: RUN/samples)")] = None
    """Folder for the images; existing files are overwritten."""
    save_routing: bool = False
    """Also save routing.png, a plot of the routing weights over time."""
    plan: bool = False
    """Print the estimated memory use and exit."""
    json: bool = False
    """Print JSON."""
    epilog: ClassVar = """
examples:
  atoll sample runs/mine "a red apple" "a panda" --steps 25 --guidance-scale 2
  atoll sample runs/mine --num-images 64 --routing top-2 --out images
"""

    def run(self) -> None:
        """Sample and save the images."""
        from atoll.core.device import device
        from atoll.core.distributed import init_distributed
        from atoll.ensemble.memory_plan import plan_memory
        from atoll.ensemble.saving import save

        with init_distributed(device()) as processes:
            sampler = self.open(processes)
            if self.plan:
                # Memory depends on the largest batch, its number of different prompts, and whether guidance doubles it.
                given, rows = max(len(self.prompts), len(self.labels)), min(self.batch_size, self.count)
                weak = self.guidance == "autoguidance" and self.guidance_scale != 1
                guided = weak or (self.guidance_scale != 1 and given > 0)
                plan = plan_memory(sampler, rows, min(rows, max(given, 1)), guided, size=self.image_size, weak=weak)
                print(json.dumps(plan.to_dict()) if self.json else "\n".join(plan.lines()))
                return
            samples = self.generate(sampler, processes, trace=self.save_routing)
        if processes.rank > 0:
            return
        # An export may be a hub name or a shared folder, so its images go to the working directory.
        is_run = (Path(self.folder) / layout.CONFIG_FILE).is_file()
        files = save(samples, self.out or (Path(self.folder) / layout.SAMPLES if is_run else Path("samples")))
        quantized = sampler.ensemble.cache.quantization_error
        for name, error in quantized.items():
            print(f"{name}: int8 weights change its velocity by {error:.2%}", file=sys.stderr)
        if self.json:
            about = {"missing": sampler.missing, "quantization_error": quantized}
            print(json.dumps({**files, **samples.to_dict(), **about}, ensure_ascii=False))
        else:
            routing = f"; routing: {files['routing']}" if self.save_routing else ""
            print(f"{len(samples.images)} images: {files['grid']}{routing}")
