"""Verbs that use trained experts: sample, export."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from atoll.cli.verb import Devices, DType, MaxLoadedExperts, ModelName, RunFolder
from atoll.core import layout
from atoll.core.names import SOLVERS, GuidanceWeights
from atoll.core.sizes import Size

if TYPE_CHECKING:
    from atoll.experts.validation import Processes


@dataclass
class Sample:
    """Generate images with the experts or a dense model."""

    folder: ModelName
    """Folder of the run, folder of an export (`./NAME`), or hub name of an export (`OWNER/NAME`)."""
    prompts: Annotated[Positional[tuple[str, ...]], arg(metavar="PROMPT", help_behavior_hint="")] = ()
    """Text prompts. Omit them for unconditional samples."""
    labels: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: none)")] = ()
    """Class labels, by name or number."""
    num_images: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: one per prompt, or 16)")] = None
    """Number of images; prompts and labels repeat in order."""
    size: Annotated[str | None, arg(metavar="WIDTHxHEIGHT", help_behavior_hint="(default: that of most images)")] = None
    """Size of the images in pixels, such as 96x64."""
    model: str = "experts"
    """Model to sample from: experts, expert:K, monolith, student or merged."""
    routing: str = "top-1"
    """Rule: full, top-K, threshold-P, nucleus-P, drawn, sample-1, oracle, nearest, or a schedule: top-2@0.6,top-1."""
    clusters: Annotated[tuple[int, ...], arg(help_behavior_hint="(default: none)")] = ()
    """Cluster of each image, for --routing oracle."""
    steps: int = 50
    """Number of solver steps."""
    guidance_scale: float = 4.0
    """Classifier-free guidance scale; 1 disables guidance."""
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    """Interval of times t (0 is data, 1 is noise) in which guidance is applied."""
    guidance_weights: GuidanceWeights = "separate"
    """Expert weights of the unconditional velocity: those of the prompt, or those of the router without the prompt."""
    rescale: float = 0.0
    """Guidance rescale from 0 to 1: moves the standard deviation of the guided velocity to that of the conditional."""
    solver: Literal[SOLVERS] = "euler"  # type: ignore[valid-type]
    """ODE solver."""
    shift: float = 1.0
    """Timestep shift; values above 1 take more steps at high noise."""
    scheduler_times: bool = False
    """Use the scheduler's own timesteps with --solver flow-euler or flow-heun, as diffusers pipelines and Paris do."""
    seed: int = 0
    """Random seed of the initial noise."""
    batch_size: int = 64
    """Images per batch."""
    max_loaded_experts: MaxLoadedExperts = None
    """Maximum number of experts on each device at once."""
    devices: Devices = None
    """Devices to spread the experts over, such as cuda:0,cuda:1."""
    dtype: DType = "auto"
    """Precision of the networks."""
    quantize: Annotated[Literal["int8"] | None, arg(metavar="int8", help_behavior_hint="(default: off)")] = None
    """Store the weights of linear layers as 8-bit integers."""
    compile: bool = False
    """Compile the networks with torch.compile."""
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

    def run(self) -> None:
        """Sample and save the images."""
        if "RANK" not in os.environ:
            self._sample(self.devices)
            return
        # Several processes under torchrun. The import takes a second, which others need not wait for.
        from atoll.core.device import device
        from atoll.train.distributed import init_distributed

        with init_distributed(device()) as context:
            self._sample(context.only_device(self.devices), context)

    def _sample(self, devices: str | None, processes: "Processes | None" = None) -> None:
        from atoll.ensemble import load
        from atoll.ensemble.images import save
        from atoll.experts.validation import ALONE

        processes, size = processes or ALONE, None if self.size is None else Size.parse(self.size)
        sampler = load(
            self.folder, self.model, max_loaded_experts=self.max_loaded_experts, dtype=self.dtype, strict=self.strict,
            devices=devices, quantize=self.quantize, compile=self.compile,
        )  # fmt: skip
        given = max(len(self.prompts), len(self.labels))
        count = self.num_images or max(given, len(self.clusters)) or 16
        if self.plan:
            # Memory depends on the largest batch, its number of different prompts, and whether guidance doubles it.
            rows = min(self.batch_size, count)
            plan = sampler.plan(rows, min(rows, max(given, 1)), self.guidance_scale != 1 and given > 0, size=size)
            print(json.dumps(plan.to_dict()) if self.json else "\n".join(plan.lines()))
            return
        samples = sampler.generate(
            self.prompts or None, self.labels or None, count, clusters=self.clusters or None, size=size,
            batch_size=self.batch_size, trace=self.save_routing, processes=processes, routing=self.routing,
            steps=self.steps,
            guidance_scale=self.guidance_scale, guidance_interval=self.guidance_interval,
            guidance_weights=self.guidance_weights, rescale=self.rescale,
            solver=self.solver, shift=self.shift, scheduler_times=self.scheduler_times, seed=self.seed,
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


@dataclass
class Export:
    """Write a model of a run as a diffusers folder with a model card."""

    folder: RunFolder
    """Folder of the run."""
    destination: Annotated[Positional[Path], arg(metavar="DST")]
    """Folder to write."""
    model: str = "experts"
    """Model to export: experts (with the router), expert:K, monolith, student or merged."""
    license: Annotated[str | None, arg(metavar="ID", help_behavior_hint="(default: none)")] = None
    """License of the weights for the model card, as a hub identifier such as mit or cc-by-4.0."""
    json: bool = False
    """Print JSON."""

    def run(self) -> None:
        """Export, and print how to load the folder."""
        from atoll.export.writer import export

        made = export(self.folder, self.destination, self.model, license=self.license)
        if self.json:
            print(json.dumps({"folder": str(self.destination), "digest": made.digest, **made.content}))
            return
        size = sum(entry.size for entry in made.files.values())
        print(f"{self.destination}: {len(made.files)} files, {size / 1e6:.1f} MB; its card is README.md. To use it:")
        print(f'  AtollPipeline.from_pretrained("{self.destination}"), or atoll.load("{self.destination}")')
