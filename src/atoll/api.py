"""The verbs as functions: `atoll.prepare`, `train`, `launch`, `sample`, `evaluate` and `export`.

    import atoll

    atoll.prepare("runs/mine", progress=print)
    samples = atoll.sample("runs/mine", ["a red apple"], steps=25)

A dataclass declares the options of a verb once. Its fields are the arguments of the function, with their types, and the
options of the command line, with their help. The classes in `atoll.cli` inherit from it, and add what concerns printing
and files. A function prints nothing. It calls `progress` with an `Update`, and raises `AtollError` for invalid input.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, Protocol, TypeVar, cast, get_args, get_origin

from PIL.Image import Image
from tyro.conf import Fixed, Positional, Suppress, arg

from atoll.apps.evaluate.options import EvaluationOptions
from atoll.core import config as configuration
from atoll.core import layout, prepared
from atoll.core.errors import AtollError
from atoll.core.names import StageName
from atoll.core.options import Overrides, QuantizedLoadOptions, RunArgument, SampleSettings, part
from atoll.core.progress import OnProgress, listening, say
from atoll.core.sizes import Size

if TYPE_CHECKING:
    from atoll.apps.evaluate.results import EvaluationResult
    from atoll.apps.launch.launch import LaunchState
    from atoll.apps.launch.launcher import Launcher
    from atoll.apps.launch.steps import LaunchRequest
    from atoll.core.artifacts import Manifest
    from atoll.core.distributed import DistContext
    from atoll.ensemble import Sampler, Samples
    from atoll.train.spec import TrainSpec

__all__ = ["evaluate", "export", "launch", "prepare", "sample", "train"]

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
ModelArgument = Annotated[Positional[str | Path], arg(metavar="RUN")]
"""A run, an export or a hub name. On the command line it is a text: a path would drop the `./` that distinguishes a
folder from a name."""
PythonOnly = (Fixed, Suppress)
"""Marks of a field that is no option of the command line."""


class Arguments(Protocol[R_co]):
    """The arguments of a function, and its work."""

    @property
    def progress(self) -> OnProgress | None: ...

    def call(self) -> R_co: ...


def function(arguments: Callable[P, Arguments[R]]) -> Callable[P, R]:
    """Return the function whose arguments are the fields of a dataclass."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = arguments(*args, **kwargs)
        with listening(given.progress):
            return given.call()

    call.__name__ = call.__qualname__ = arguments.__name__.removesuffix("Arguments").lower()
    call.__doc__ = arguments.__doc__
    # For help() and notebooks: the arguments without their marks for the command line.
    known: Any = arguments
    plain = [
        each.replace(annotation=get_args(each.annotation)[0]) if get_origin(each.annotation) is Annotated else each
        for each in inspect.signature(known).parameters.values()
    ]
    call.__signature__ = inspect.Signature(plain, return_annotation=known.call.__annotations__["return"])  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in plain}
    return call


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """What every function takes."""

    progress: Annotated[OnProgress | None, *PythonOnly] = None
    """Python only: called with the state of the work, and with messages."""


@dataclass(frozen=True, kw_only=True)
class Configured(Reporting):
    """What functions take that read the settings of a run."""

    overrides: Overrides = field(default_factory=dict)
    """Settings of the run by dotted key, such as `{"train.lr": 1e-4}`. They replace those of atoll.yaml."""

    @property
    def texts(self) -> dict[str, str]:
        """The overrides as they would be typed."""
        return {key: value if isinstance(value, str) else json.dumps(value) for key, value in self.overrides.items()}


@dataclass(frozen=True)
class PrepareArguments(Configured):
    """Cluster and encode images into shards, one set per expert."""

    folder: RunArgument
    """Folder of the run."""
    images: Annotated[Iterable[tuple[Image, str | Mapping[str, object]]] | None, *PythonOnly] = None
    """Python only: images with captions, or with metadata (caption, label, id, license, …), instead of `data.source`.
    They are stored in RUN/images first. That cannot be resumed; everything after it can, without `images`."""
    _: KW_ONLY
    stage: Annotated[Sequence[StageName], arg(help_behavior_hint="(default: all)")] = ()
    """Stages to run; finished stages are skipped."""
    worker: Annotated[str | None, arg(metavar="I/N", help_behavior_hint="(default: one for each visible GPU)")] = None
    """Index of this worker, and number of workers that divide the images. The last one to end does the rest."""

    def call(self) -> None:
        if self.images is not None:
            from atoll.data.python_images import store

            store(Path(self.folder), self.images)
        # The configuration is read before torch is imported: mistakes in it are reported at once.
        config = configuration.load(self.folder, self.texts)
        from atoll.data.chunks import WorkerShare
        from atoll.data.prepare import prepare

        worker = WorkerShare.parse(self.worker or "0/1")
        if self.worker is None and not self.stage:
            from atoll.apps.launch.launch import prepare_on_all_gpus

            prepare_on_all_gpus(Path(self.folder), config, self.texts)
        # After workers, this reports that all stages are done. If there were none, it does all the work.
        prepare(Path(self.folder), config, self.stage, worker=worker)


@dataclass(frozen=True)
class TrainArguments(Configured):
    """Train or resume one expert, the router or a dense network."""

    folder: RunArgument
    """Folder of the run."""
    _: KW_ONLY
    expert: Annotated[int | None, arg(metavar="K", help_behavior_hint="")] = None
    """Train the expert of this cluster on the shards of this cluster; with --student, its few-step student."""
    router: bool = False
    """Train the router on the data of all clusters."""
    start: bool = False
    """Train the shared start of the experts on the data of all clusters (shared_start.flops_share)."""
    monolith: bool = False
    """Train the monolith: one dense model on the data of all clusters, as a baseline."""
    student: bool = False
    """Train the student: one dense model distilled from the trained experts (student.steps: in few steps)."""
    match_flops: Annotated[Path | None, arg(metavar="RUN", help_behavior_hint="")] = None
    """Train for as many FLOPs as all experts of this run and their shared start, instead of train.total_images."""

    @property
    def jobs(self) -> list[layout.JobKind]:
        """The kinds of jobs that were chosen."""
        jobs = [name for name in ("router", "start", "monolith", "student") if getattr(self, name)]
        jobs += ["expert"] if self.expert is not None and jobs != ["student"] else []
        return cast(list[layout.JobKind], jobs)

    def config(self) -> configuration.Config:
        """Return the settings of the run."""
        config = configuration.load(self.folder, self.texts)
        prepared.check_overrides(Path(self.folder), config, self.texts)
        return config

    def spec(self, config: configuration.Config) -> "TrainSpec":
        """Return the job."""
        from atoll.train.spec import resolve_job

        if len(self.jobs) != 1:
            raise AtollError("choose what to train: one of --expert K, --router, --start, --monolith, --student")
        return resolve_job(Path(self.folder), config, self.jobs[0], expert=self.expert, match_flops=self.match_flops)

    def call(self) -> "Manifest":
        spec = self.spec(self.config())
        from atoll.apps.launch.train_lease import train_lease
        from atoll.train.job import train_job

        with train_lease(spec) as callback:
            return train_job(spec, callback)


@dataclass(frozen=True)
class LaunchArguments(Configured):
    """Run all remaining jobs of a run here or on any scheduler."""

    folder: RunArgument
    """Folder of the run."""
    _: KW_ONLY
    on: Literal["local", "slurm", "ray"] | tuple[Literal["command"], str] = "local"
    """Where to run the jobs; `command TEMPLATE` submits each with a command, in which {command} is its script."""
    jobs: tuple[Literal["prepare", "start", "experts", "router", "monolith", "student", "students"], ...] = (
        *("prepare", "experts", "router"),
    )
    """Kinds of jobs to run. Experts include the shared start, if the run has one; students are of one expert each."""
    experts: Annotated[tuple[int, ...], arg(help_behavior_hint="(default: all)")] = ()
    """Experts to train, or whose students to train, by number."""
    prepare_workers: int = 1
    """Number of jobs that divide the pass over the images, and of those that divide the stages text and shards."""
    max_parallel: Annotated[
        int | None, arg(metavar="N", help_behavior_hint="(default: local: by GPUs, or 1; slurm: no limit)")
    ] = None
    """Maximum number of jobs that run at the same time."""
    retries: int = 3
    """Retry a job at most this many times in a row without progress."""
    wait: bool = False
    """All but local: wait until all jobs have ended. Local jobs are always waited for."""

    def request(self, *, store: bool) -> "tuple[Launcher, configuration.Config, LaunchRequest]":
        """Return the launcher, the settings and the request; with `store`, write overrides into atoll.yaml."""
        run, overrides = Path(self.folder).resolve(), self.texts
        config = configuration.load(run, overrides)
        import sys

        if store and config != configuration.load(run):
            given = ", ".join(f"{key} {value}" for key, value in overrides.items())
            # Before the first job, overrides become the settings of the run, so that later commands need not repeat
            # them. Afterwards, finished and unfinished jobs may differ.
            if layout.jobs(run):
                say(f"for the jobs of this launch only: {given}", file=sys.stderr)
            else:
                configuration.store(run, overrides)
                overrides = {}
                say(f"written into {Path(self.folder) / layout.CONFIG_FILE}: {given}", file=sys.stderr)
        from atoll.apps.launch.launch import LAUNCHERS
        from atoll.apps.launch.launcher import LaunchSettings
        from atoll.apps.launch.steps import LaunchRequest

        # The machine that submits may have no GPU. So the run decides: nobody chooses bfloat16 to train on CPUs.
        gpus = int(config.train.precision == "bfloat16")
        if self.on != "local" and config.island.gpus == "auto":
            requested = "one GPU" if gpus else "no GPU; set island.gpus to train on GPUs"
            say(f"island.gpus is auto: jobs request {requested}", file=sys.stderr)
        name, *template = (self.on,) if isinstance(self.on, str) else self.on
        settings = LaunchSettings(run, config.island, self.retries, self.max_parallel, gpus)
        launcher = LAUNCHERS[name](settings, *template)
        return launcher, config, LaunchRequest(self.jobs, self.experts, self.prepare_workers, overrides)

    def call(self) -> "LaunchState":
        launcher, config, request = self.request(store=True)
        from atoll.apps.launch.launch import submit

        return submit(launcher, config, request, wait=self.wait)


@dataclass(frozen=True)
class SampleArguments(Reporting, QuantizedLoadOptions, SampleSettings):
    """Generate images with the experts or a dense model."""

    folder: ModelArgument
    """Folder of the run, folder of an export (`./NAME`), or hub name of an export (`OWNER/NAME`)."""
    prompts: Annotated[Positional[Sequence[str]], arg(metavar="[PROMPT ...]", help_behavior_hint="")] = ()
    """Text prompts. Omit them for unconditional samples."""
    _: KW_ONLY
    labels: Annotated[Sequence[str], arg(help_behavior_hint="(default: none)")] = ()
    """Class labels, by name or number."""
    num_images: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: one per prompt, or 16)")] = None
    """Number of images; prompts and labels repeat in order."""
    size: Annotated[str | None, arg(metavar="WIDTHxHEIGHT", help_behavior_hint="(default: that of most images)")] = None
    """Size of the images in pixels, such as 96x64."""
    model: str = "experts"
    """Model to sample from: experts, students, expert:K, monolith, student or merged."""
    clusters: Annotated[Sequence[int], arg(help_behavior_hint="(default: none)")] = ()
    """Cluster of each image, for --routing oracle."""
    batch_size: int = 64
    """Images per batch."""
    strict: bool = False
    """Fail if an expert is missing instead of sampling without it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prompts", "labels"):  # one text is a sequence of letters, too
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, (value,))

    @property
    def count(self) -> int:
        """Number of images."""
        return self.num_images or max(len(self.prompts), len(self.labels), len(self.clusters)) or 16

    @property
    def image_size(self) -> Size | None:
        """Size of the images; None for the default of the model."""
        return None if self.size is None else Size.parse(self.size)

    def open(self, processes: "DistContext") -> "Sampler":
        """Load the model."""
        from atoll.ensemble import load

        options = part(QuantizedLoadOptions, self)
        devices = processes.only_device(options.devices)
        return load(self.folder, self.model, strict=self.strict, **vars(replace(options, devices=devices)))

    def generate(self, sampler: "Sampler", processes: "DistContext", *, trace: bool = True) -> "Samples":
        """Generate the images."""
        return sampler.generate(
            self.prompts or None, label=self.labels or None, cluster=self.clusters or None, num_images=self.count,
            batch_size=self.batch_size, trace=trace, processes=processes, settings=part(SampleSettings, self),
            **({} if self.image_size is None else vars(self.image_size)),
        )  # fmt: skip

    def call(self) -> "Samples":
        from atoll.core.device import device
        from atoll.core.distributed import init_distributed

        with init_distributed(device()) as processes:
            return self.generate(self.open(processes), processes)


@dataclass(frozen=True)
class EvaluateArguments(Configured, EvaluationOptions):
    """Compute FID, KID, diversity and diagnostics of a run.

    All models and routings start from the same noise; diagnostics are in float32.
    """

    folder: RunArgument
    """Folder of the run."""

    def call(self) -> "EvaluationResult | None":
        """Under torchrun, only the main process returns the result."""
        config = configuration.load(self.folder, self.texts)
        from atoll.apps.evaluate.evaluation import evaluate
        from atoll.core.device import device
        from atoll.core.distributed import init_distributed

        with init_distributed(device()) as processes:
            options = replace(part(EvaluationOptions, self), devices=processes.only_device(self.devices))
            return evaluate(Path(self.folder), config, options, processes=processes)


@dataclass(frozen=True)
class ExportArguments(Reporting):
    """Write a model of a run as a diffusers folder with a model card."""

    folder: RunArgument
    """Folder of the run."""
    destination: Annotated[Positional[str | Path], arg(metavar="DST")]
    """Folder to write."""
    _: KW_ONLY
    model: str = "experts"
    """Model to export: experts or students (with the router), expert:K, monolith, student or merged."""
    merge: bool = False
    """On a base model: write one expert as a whole network, with its adapter in the weights of the base."""
    standalone: bool = False
    """Also write the code of the pipeline, so that diffusers opens the folder without Atoll."""
    dit_pipeline: bool = False
    """Write one class-conditional DiT as a DiTPipeline of diffusers, which opens without Atoll and without code."""
    license: Annotated[str | None, arg(metavar="ID", help_behavior_hint="(default: none)")] = None
    """License of the weights for the model card, as a hub identifier such as mit or cc-by-4.0."""
    push: Annotated[str | None, arg(metavar="OWNER/NAME", help_behavior_hint="(default: none)")] = None
    """Upload the folder to this model repository of the hub, which is created as a private one if it is missing."""

    def call(self) -> "Manifest":
        from atoll.apps.models.export import export
        from atoll.apps.models.publish import publish

        destination = Path(self.destination)
        made = export(
            Path(self.folder),
            destination,
            self.model,
            license=self.license,
            merge=self.merge,
            standalone=self.standalone,
            dit_pipeline=self.dit_pipeline,
        )
        if self.push is not None:
            publish(destination, self.push, made)
        return made


prepare = function(PrepareArguments)
train = function(TrainArguments)
launch = function(LaunchArguments)
sample = function(SampleArguments)
evaluate = function(EvaluateArguments)
export = function(ExportArguments)
