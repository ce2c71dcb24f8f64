"""Verb of sampling: sample."""

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

from tyro.conf import OmitArgPrefixes, Positional, arg

from atoll.cli.verb import ModelArgument
from atoll.core import layout
from atoll.core.options import QuantizedLoadOptions, SampleSettings
from atoll.core.sizes import Size


@dataclass
class Sample:
    """Generate images with the experts or a dense model."""

    folder: ModelArgument
    """Folder of the run, folder of an export (`./NAME`), or hub name of an export (`OWNER/NAME`)."""
    prompts: Annotated[Positional[tuple[str, ...]], arg(metavar="[PROMPT ...]", help_behavior_hint="")] = ()
    """Text prompts. Omit them for unconditional samples."""
    labels: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: none)")] = ()
    """Class labels, by name or number."""
    num_images: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: one per prompt, or 16)")] = None
    """Number of images; prompts and labels repeat in order."""
    size: Annotated[str | None, arg(metavar="WIDTHxHEIGHT", help_behavior_hint="(default: that of most images)")] = None
    """Size of the images in pixels, such as 96x64."""
    model: str = "experts"
    """Model to sample from: experts, students, expert:K, monolith, student or merged."""
    clusters: Annotated[tuple[int, ...], arg(help_behavior_hint="(default: none)")] = ()
    """Cluster of each image, for --routing oracle."""
    settings: Annotated[SampleSettings, OmitArgPrefixes] = field(default_factory=SampleSettings)
    batch_size: int = 64
    """Images per batch."""
    load: Annotated[QuantizedLoadOptions, OmitArgPrefixes] = field(default_factory=QuantizedLoadOptions)
    strict: bool = False
    """Fail if an expert is missing instead of sampling without it."""
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
        from atoll.ensemble import load
        from atoll.ensemble.memory_plan import plan_memory
        from atoll.ensemble.saving import save

        size = None if self.size is None else Size.parse(self.size)
        given = max(len(self.prompts), len(self.labels))
        count = self.num_images or max(given, len(self.clusters)) or 16
        with init_distributed(device()) as processes:
            options = replace(self.load, devices=processes.only_device(self.load.devices))
            sampler = load(self.folder, self.model, strict=self.strict, **vars(options))
            if self.plan:
                # Memory depends on the largest batch, its number of different prompts, and whether guidance doubles it.
                rows, guided = min(self.batch_size, count), self.settings.guidance_scale != 1 and given > 0
                plan = plan_memory(sampler, rows, min(rows, max(given, 1)), guided, size=size)
                print(json.dumps(plan.to_dict()) if self.json else "\n".join(plan.lines()))
                return
            samples = sampler.generate(
                self.prompts or None, label=self.labels or None, cluster=self.clusters or None, num_images=count,
                batch_size=self.batch_size, trace=self.save_routing, processes=processes, settings=self.settings,
                **({} if size is None else vars(size)),
            )  # fmt: skip
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
