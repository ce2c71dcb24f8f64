"""The verbs of the finished experts: pictures of them, and a folder for others."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from atoll.core import layout
from atoll.core.names import SOLVERS


@dataclass
class Sample:
    """Make pictures with all experts as one model, or with one of them, the monolith or the student."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run; or an exported one, or its name on the hub."""
    prompts: Annotated[Positional[tuple[str, ...]], arg(metavar="PROMPT")] = ()
    """What the pictures shall show; none for pictures of anything."""
    labels: tuple[str, ...] = ()
    """Classes, for experts that are told classes."""
    count: int | None = None
    """Number of pictures, taking prompts and labels in turn; default one for each, or 16 without any."""
    model: str = "experts"
    """experts, expert:K, monolith or student."""
    routing: str = "top-1"
    """full, top-K, threshold-P, nucleus-P, drawn, sample-1, oracle, nearest, or several over time: top-2@0.6,top-1."""
    clusters: tuple[int, ...] = ()
    """The clusters of the pictures, for --routing oracle."""
    steps: int = 50
    """Steps of the solver."""
    guidance: float = 4.0
    """Classifier-free guidance; 1 is none."""
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    """Times between which guidance acts."""
    rescale: float = 0.0
    """Share by which the spread of guided velocities is moved back to that of unguided ones."""
    solver: Literal[SOLVERS] = "euler"  # type: ignore[valid-type]
    """How velocity is integrated."""
    shift: float = 1.0
    """More steps near noise (above 1) or near data (below)."""
    scheduler_times: bool = False
    """Keep the scheduler's own times with --solver flow-euler or flow-heun, as diffusers pipelines and Paris do."""
    seed: int = 0
    """The same seed gives the same pictures."""
    batch: int = 64
    """Pictures that are made at once."""
    resident: int | None = None
    """Experts in memory at once; default all."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the networks."""
    quantise: Literal["int8"] | None = None
    """Keep weights in eight bits."""
    compile: bool = False
    """torch.compile."""
    strict: bool = False
    """Refuse to work while experts are missing."""
    out: Path | None = None
    """Folder of the pictures; default RUN/samples, or samples for what is not a run. What is there is replaced."""
    trace: bool = False
    """Also draw which experts made each picture, step by step."""
    plan: bool = False
    """Print what it would take in memory, and do nothing."""
    json: bool = False
    """Print what was made as JSON."""

    def run(self) -> None:
        """Sample, write the files, and say where they are."""
        from atoll.ensemble import load
        from atoll.ensemble.images import save

        sampler = load(
            self.folder, self.model, resident=self.resident, dtype=self.dtype, strict=self.strict,
            quantise=self.quantise, compile=self.compile,
        )  # fmt: skip
        given = max(len(self.prompts), len(self.labels))
        count = self.count or max(given, len(self.clusters)) or 16
        if self.plan:
            rows = min(self.batch, count)
            plan = sampler.plan(rows, min(rows, max(given, 1)), self.guidance != 1 and given > 0)
            print(json.dumps(plan.to_dict()) if self.json else "\n".join(plan.lines()))
            return
        samples = sampler.generate(
            self.prompts or None, self.labels or None, count, clusters=self.clusters or None, batch=self.batch,
            trace=self.trace, routing=self.routing, steps=self.steps, guidance=self.guidance,
            guidance_interval=self.guidance_interval, rescale=self.rescale, solver=self.solver, shift=self.shift,
            scheduler_times=self.scheduler_times, seed=self.seed,
        )  # fmt: skip
        is_run = (self.folder / layout.CONFIG_FILE).is_file()
        files = save(samples, self.out or (self.folder / layout.SAMPLES if is_run else Path("samples")))
        quantized = sampler.ensemble.cache.quantisation_error
        for name, error in quantized.items():
            print(f"{name}: eight bits change its velocity by {error:.2%}", file=sys.stderr)
        if self.json:
            about = {"missing": sampler.missing, "quantisation_error": quantized}
            print(json.dumps({**files, **samples.to_dict(), **about}, ensure_ascii=False))
        else:
            trace = f"; routing: {files['trace']}" if self.trace else ""
            print(f"{len(samples.images)} pictures: {files['grid']}{trace}")


@dataclass
class Export:
    """Write a model of a run as a diffusers folder with a model card; AtollPipeline and atoll.load open it."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    destination: Annotated[Positional[Path], arg(metavar="DST")]
    """Folder to write. The same export again does nothing."""
    model: str = "experts"
    """experts (all of them, with the router), monolith, student or expert:K."""
    licence: str | None = None
    """Licence of the weights, for the card; an identifier as the hub knows them, such as mit or cc-by-4.0."""
    json: bool = False
    """Print what was written as JSON."""

    def run(self) -> None:
        """Export, and say how to open it."""
        from atoll.export.writer import export

        made = export(self.folder, self.destination, self.model, licence=self.licence)
        if self.json:
            print(json.dumps({"folder": str(self.destination), "digest": made.digest, **made.content}))
            return
        size = sum(entry.size for entry in made.files.values())
        print(f"{self.destination}: {len(made.files)} files, {size / 1e6:.1f} MB; its card is README.md. To use it:")
        print(f'  AtollPipeline.from_pretrained("{self.destination}"), or atoll.load("{self.destination}")')
