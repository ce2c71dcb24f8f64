"""The `atoll` command. Verbs stand in pipeline order; heavy imports stay inside the verb that needs them."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, cast

import tyro
import yaml
from tyro.conf import Positional, Suppress, arg

from atoll import __version__
from atoll import config as configuration
from atoll.errors import AtollError, unknown
from atoll.islands import verbs as shared
from atoll.presets import NOTES, PRESETS
from atoll.studio import verbs as studio
from atoll.vocabulary import SOLVERS

if TYPE_CHECKING:
    from atoll.data.prepare import Preparation

Overrides = Annotated[dict[str, str], Suppress]
"""Dotted options (`--section.key VALUE`), taken out of the command line before the verb reads its own."""


class Verb(Protocol):
    """One verb: a dataclass of its options with the work in `run`."""

    overrides: Overrides

    def run(self) -> None:
        """Do the work."""


@dataclass
class Init:
    """Write RUN/atoll.yaml from a preset."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the new run."""
    preset: Literal[tuple(PRESETS)] = "emoji"  # type: ignore[valid-type]
    """Settings to start from."""
    force: bool = False
    """Replace an atoll.yaml that is already there."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Write the file, complete and commented."""
        config = configuration.resolve(PRESETS[self.preset], self.overrides, source="command line")
        file = self.folder / configuration.CONFIG_FILE
        if file.exists() and not self.force:
            raise AtollError(f"{file} exists; edit it, or replace it with --force")
        self.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(configuration.to_yaml(config, NOTES.get(self.preset)), encoding="utf-8")
        print(f"wrote {file} from preset {self.preset!r}; check it with: atoll config {self.folder}")


@dataclass
class Config:
    """Check a run's atoll.yaml and print it resolved: every key with the value that counts."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    json: bool = False
    """Print JSON instead of YAML."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Print the resolved configuration."""
        resolved = configuration.load(self.folder, self.overrides).model_dump(mode="json")
        print(json.dumps(resolved) if self.json else yaml.safe_dump(resolved, sort_keys=False), end="")


@dataclass
class Prepare:
    """Turn the source's pictures into each island's shards; what is done is not done again."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    stage: tuple[Literal["ingest", "features", "clusters", "latents", "text", "shards"], ...] = ()
    """Only these stages, instead of all."""
    shard: Annotated[str, arg(metavar="i/n")] = "0/1"
    """This job's share of the stages features, latents and text: 0/4, 1/4, 2/4 and 3/4 make up the whole."""
    dry_run: bool = False
    """Show the source and what would be done, and do nothing."""
    json: bool = False
    """With --dry-run: print the plan as JSON."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Do the stages, or show the plan."""
        config = configuration.load(self.folder, self.overrides)
        from atoll.data.chunks import Share
        from atoll.data.prepare import Preparation, prepare

        share = Share.parse(self.shard)
        if self.dry_run:
            self.show(Preparation(self.folder, config))
        else:
            prepare(self.folder, config, self.stage, share)

    def show(self, work: "Preparation") -> None:
        """Print the plan."""
        from atoll.data.source import describe

        plan = [step for step in work.plan() if not self.stage or step["stage"] in self.stage]
        if self.json:
            print(json.dumps(plan))
            return
        describe(work.source)
        for step in plan:
            print(f"{step['stage']:<9} {step['state']:<22} {step['uses']:<28} {self.folder / step['folder']}")


@dataclass
class Train:
    """Train one expert, the router, the dense monolith or a distilled student; again, it resumes."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    expert: int | None = None
    """The expert of this cluster, from its own shards alone."""
    router: bool = False
    """The router, from the data of all clusters."""
    monolith: bool = False
    """The dense model that an ensemble is measured against: all data, one network."""
    student: bool = False
    """A dense model that learns from the finished experts."""
    match_flops: Annotated[Path | None, arg(metavar="RUN")] = None
    """Train for as many FLOPs as all experts of this run together."""
    dry_run: bool = False
    """Print what it would cost in memory, FLOPs and time, and do nothing; alone, for all jobs. Needs no data."""
    gpus: int | None = None
    """With --dry-run: processes that share one job."""
    json: bool = False
    """With --dry-run: print JSON."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Train, or tell the cost."""
        jobs = [name for name in ("router", "monolith", "student") if getattr(self, name)]
        jobs += ["expert"] if self.expert is not None else []
        if len(jobs) > 1 or not (jobs or self.dry_run):
            raise AtollError("say what to train: one of --expert K, --router, --monolith, --student")
        config = configuration.load(self.folder, self.overrides)
        from atoll.train.estimate import show_estimate, show_survey
        from atoll.train.jobs import Job, run_job
        from atoll.train.loop import REQUEUE, Requeue

        if not jobs:
            show_survey(self.folder, config, self.gpus, self.json)
            return
        job = Job(self.folder, config, cast(Any, jobs[0]), self.expert, self.match_flops)
        if self.dry_run:
            show_estimate(job, self.gpus, self.json)
            return
        try:
            run_job(job)
        except Requeue as stop:
            print(f"atoll: {stop}", file=sys.stderr)
            sys.exit(REQUEUE)


@dataclass
class Launch:
    """Submit every missing job of a run, on this machine, on Slurm or on Ray; again, it submits what is left."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    on: Literal["local", "slurm", "ray", "sky"] = "local"
    """Where; sky writes a SkyPilot task file for machines of a cloud that join the run at --url."""
    jobs: tuple[Literal["prepare", "experts", "router", "monolith", "student"], ...] = ("prepare", "experts", "router")
    """Which kinds of jobs."""
    experts: tuple[int, ...] = ()
    """Only these experts, instead of all."""
    shares: int = 1
    """Jobs that features, latents and text are each divided into."""
    at_once: int | None = None
    """Jobs that run side by side at most; on this machine the default is one, or as many as have their GPUs."""
    retries: int = 3
    """How often a job may die in a row without having got further."""
    wait: bool = False
    """Slurm and Ray: stay until everything has ended. On this machine it always does."""
    print: bool = False
    """Show exactly what would be submitted, and submit nothing."""
    url: str | None = None
    """sky: where the run is shared (s3://bucket/run)."""
    json: bool = False
    """Print what was submitted as JSON."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Submit, or show what would be."""
        run = self.folder.resolve()
        config = configuration.load(run, self.overrides)
        if self.on == "sky":
            from atoll.islands.launchers.sky import write_task

            print(write_task(run, config, self.url, dry=self.print), end="")
            return
        from contextlib import redirect_stdout

        from atoll.islands.launchers.base import Setting
        from atoll.islands.launchers.launch import as_dict, as_lines, finish, open_launcher, show, submit
        from atoll.islands.launchers.plan import Wish

        launcher = open_launcher(self.on, Setting(run, config.island, self.retries, self.at_once))
        wish = Wish(self.jobs, self.experts, self.shares, self.overrides)
        if self.print:
            print(show(launcher, run, config, wish))
            return
        with redirect_stdout(sys.stderr):  # Ray tells of its nodes there
            found = submit(launcher, run, config, wish)
            print("\n".join(as_lines(found)), flush=True)
            if self.wait or launcher.stays:
                finish(found, run, config, wish)
        if self.json:
            print(json.dumps(as_dict(found)))


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
    routing: str = "top-2"
    """full, top-K, top-K-equal, threshold-P, nucleus-P, sample-1, oracle, nearest, or several over time:
    top-2@0.6,top-1."""
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
    seed: int = 0
    """The same seed gives the same pictures."""
    route_every: int = 1
    """Ask the router at every so many evaluations only."""
    sticky: float = 0.0
    """How much more probable another expert must be to replace the present one."""
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
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Sample, write the files, and say where they are."""
        from atoll.ensemble import load
        from atoll.ensemble.pictures import save

        ensemble = load(
            self.folder, self.model, resident=self.resident, dtype=self.dtype, strict=self.strict,
            quantise=self.quantise, compile=self.compile,
        )  # fmt: skip
        given = max(len(self.prompts), len(self.labels))
        count = self.count or max(given, len(self.clusters)) or 16
        plan = ensemble.plan(min(self.batch, count), min(count, max(given, 1)), self.guidance != 1 and given > 0)
        if self.plan:
            print(json.dumps(plan.to_dict()) if self.json else "\n".join(plan.lines()))
            return
        print("\n".join(plan.lines()), file=sys.stderr)
        samples = ensemble.generate(
            self.prompts or None, self.labels or None, count, clusters=self.clusters or None, batch=self.batch,
            trace=self.trace, routing=self.routing, steps=self.steps, guidance=self.guidance,
            guidance_interval=self.guidance_interval, rescale=self.rescale, solver=self.solver, shift=self.shift,
            seed=self.seed, route_every=self.route_every, sticky=self.sticky,
        )  # fmt: skip
        is_run = (self.folder / configuration.CONFIG_FILE).is_file()
        files = save(samples, self.out or (self.folder / "samples" if is_run else Path("samples")))
        for name, error in ensemble.quantisation_error.items():
            print(f"{name}: eight bits change its velocity by {error:.2%}", file=sys.stderr)
        if self.json:
            about = {"missing": ensemble.missing, "quantisation_error": ensemble.quantisation_error}
            print(json.dumps({**files, **samples.to_dict(), **about}, ensure_ascii=False))
        else:
            trace = f"; routing: {files['trace']}" if self.trace else ""
            print(f"{len(samples.images)} pictures: {files['grid']}{trace}")


@dataclass
class Evaluate:
    """Figures of every model of a run, each with its protocol, and diagnostics; again, it continues."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    samples: int = 2048
    """Pictures that are drawn of each model."""
    models: tuple[str, ...] = ()
    """experts, monolith, student, expert:K, singles (every expert alone); default what is there of the first three."""
    routings: tuple[str, ...] = ("top-1", "top-2", "full")
    """Routings under which the experts are evaluated."""
    steps: int = 50
    """Steps of the solver."""
    guidance: float = 4.0
    """Classifier-free guidance; 1 is none."""
    solver: Literal[SOLVERS] = "euler"  # type: ignore[valid-type]
    """How velocity is integrated."""
    seed: int = 0
    """Of noise; every model and routing starts from the same."""
    extractors: tuple[str, ...] = ("inception",)
    """Networks to look through: inception (FID and KID as published), inception:FILE, efficientnet-lite0, or a vision
    model of transformers by name or folder."""
    reference: Literal["train", "held-out"] = "train"
    """The real pictures to compare with."""
    references: int = 10_000
    """Real pictures at most."""
    prompts: Literal["held-out", "train"] = "held-out"
    """Whose captions or classes the pictures are drawn for: unseen ones ask for more than was taught."""
    diversity: tuple[int, int] = (32, 4)
    """Prompts, and pictures of each, for the diversity within prompts."""
    lpips: Path | None = None
    """Weights of LPIPS (AlexNet) as .safetensors or .pt; without, diversity is measured on the first extractor."""
    clip: str | None = None
    """An image-text model by name or folder, for the alignment of pictures with their prompts."""
    held_out: int = 512
    """Held-out samples that the diagnostics use."""
    followed: int = 32
    """Samples that are followed from noise to data, with N and with 2 N steps."""
    skip: tuple[Literal["metrics", "diversity", "diagnostics", "trajectories"], ...] = ()
    """Parts to leave out."""
    batch: int = 64
    """Pictures that are made at once."""
    resident: int | None = None
    """Experts in memory at once; default all."""
    allow_few: bool = False
    """Give figures of few samples all the same; they are biased, and the floor beside them tells how much."""
    json: bool = False
    """Print all figures as JSON instead of tables."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Evaluate, and print."""
        from contextlib import redirect_stdout

        config = configuration.load(self.folder, self.overrides)
        from atoll.ensemble import Settings
        from atoll.evaluate import Options, evaluate
        from atoll.evaluate.table import show

        settings = Settings(steps=self.steps, guidance=self.guidance, solver=self.solver, seed=self.seed)
        options = Options(
            self.samples, self.models, self.routings, settings, self.extractors, self.reference, self.references,
            self.diversity, self.lpips, self.clip, self.held_out, self.followed, self.skip, self.batch, self.resident,
            self.allow_few, self.prompts,
        )  # fmt: skip
        with redirect_stdout(sys.stderr):
            answer = evaluate(self.folder, config, options)
        if self.json:
            print(json.dumps(answer))
        else:
            show(answer)


@dataclass
class Report:
    """Write one page that tells what happened in a run, pictures first; pictures that are missing are drawn."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    prompts: tuple[str, ...] = ()
    """What the pictures show; default a few captions of each cluster, seen and held out."""
    routings: tuple[str, ...] = ()
    """Routings to show; default those of the last evaluation."""
    steps: int | None = None
    """Steps of the solver; default as in the last evaluation, as are the next two."""
    guidance: float | None = None
    """Classifier-free guidance; 1 is none."""
    seed: int | None = None
    """The same seed gives the same pictures."""
    out: Path | None = None
    """File to write; default RUN/report.html."""
    json: bool = False
    """Print where the page is as JSON."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Write the page, and say where it is."""
        from contextlib import redirect_stdout

        config = configuration.load(self.folder, self.overrides)
        from atoll.evaluate.report import Options, report

        options = Options(self.prompts, self.routings or None, self.steps, self.guidance, self.seed)
        with redirect_stdout(sys.stderr):
            page = report(self.folder, config, options, self.out)
        print(json.dumps({"report": str(page)}) if self.json else f"report: {page}")


@dataclass
class Demo:
    """The whole journey on some emoji: prepare, experts, router, monolith, figures, report; again, it continues."""

    minutes: float = 15.0
    """Time it may take on two cores; more trains longer."""
    run_folder: Annotated[Path, arg(name="run", metavar="DIR")] = Path("runs/demo")
    """Folder of the run."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Do what is left to do."""
        from atoll.demo import demo

        if self.overrides:
            raise AtollError(
                "the demo takes no settings; change RUN/atoll.yaml, or start from: atoll init --preset demo"
            )
        demo(self.run_folder, self.minutes)


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
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Export, and say how to open it."""
        from atoll.ensemble.export import export

        made = export(self.folder, self.destination, self.model, self.licence)
        if self.json:
            print(json.dumps({"folder": str(self.destination), "digest": made.digest, **made.facts}))
            return
        size = sum(entry.size for entry in made.files.values())
        print(f"{self.destination}: {len(made.files)} files, {size / 1e6:.1f} MB; its card is README.md. To use it:")
        print(f'  AtollPipeline.from_pretrained("{self.destination}"), or atoll.load("{self.destination}")')


@dataclass
class Convert:
    """Bring other people's checkpoints in, or write an expert in someone else's layout."""

    source: Annotated[Positional[Path], arg(metavar="SRC")]
    """A .pt or .safetensors file, or a folder that holds one; the layout is told by the names of its tensors."""
    destination: Annotated[Positional[Path], arg(metavar="DST")]
    """Folder to write: config.json, the weights, and conversion.json with the account."""
    to: str = "atoll"
    """atoll, flow-matching (a DDPM DiT becomes an expert as in HDDM), dit, diffusers-dit, diffusers-pixart, paris
    or paris-router."""
    fold: bool = True
    """flow-matching: fold AdaLN-Zero into AdaLN-Single by least squares."""
    text_width: int = 768
    """flow-matching: width of the text tokens the expert will be told; 0 for none."""
    keep_labels: bool = False
    """flow-matching: keep the class embedding."""
    final: Literal["new", "keep"] = "new"
    """flow-matching: a new final layer, or the source's without its variance channels."""
    time: Literal["steps", "snr", "same"] = "steps"
    """flow-matching: network time to timestep by 999 t, by equal signal-to-noise ratio, or unchanged."""
    heads: int | None = None
    """Attention heads, where neither config.json nor a known width tells them."""
    seed: int = 0
    """flow-matching: seed of the new weights."""
    force: bool = False
    """Write into a folder that is not empty."""
    json: bool = False
    """Print the content of conversion.json instead of the table."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Convert, and print what was done."""
        from rich.console import Console

        from atoll.nets.convert import CONVERSION_FILE, as_table, convert
        from atoll.nets.fold import FlowMatchingOptions

        options = FlowMatchingOptions(self.fold, self.text_width, self.keep_labels, self.final, self.time, self.seed)
        conversion = convert(self.source, self.destination, self.to, options, self.heads, self.force)
        if self.json:
            print((self.destination / CONVERSION_FILE).read_text(encoding="utf-8"), end="")
        else:
            Console().print(as_table(conversion, self.source, self.destination))


VERBS: dict[str, type[Verb]] = {
    "demo": Demo,
    "init": Init,
    "config": Config,
    "prepare": Prepare,
    "train": Train,
    "launch": Launch,
    "push": shared.Push,
    "join": shared.Join,
    "admit": shared.Admit,
    "status": shared.Status,
    "pull": shared.Pull,
    "keys": shared.Keys,
    "sample": Sample,
    "evaluate": Evaluate,
    "report": Report,
    "convert": Convert,
    "export": Export,
    "serve": studio.Serve,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; 0 is success, 2 is input that was refused."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"atoll {__version__}")
        return 0
    try:
        name, *rest = arguments
        if name not in VERBS:
            raise AtollError(f"{unknown('verb', name, VERBS)}\nsee: atoll --help")
        rest, overrides = split_overrides(rest)
        verb = tyro.cli(VERBS[name], args=rest, prog=f"atoll {name}")
        verb.overrides = overrides
        verb.run()
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        return 2
    return 0


def overview() -> str:
    """The help of `atoll` itself."""
    verbs = [f"  {name:<10} {(verb.__doc__ or '').splitlines()[0]}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "usage: atoll VERB [options]",
            "",
            "Decentralized diffusion models: isolated experts, one model.",
            "",
            "verbs, in the order of a run:",
            *verbs,
            "",
            "atoll VERB --help tells the options of one verb. Any key of a run's atoll.yaml can be",
            "overridden on the command line: --clusters.count 4 (keys: atoll config RUN).",
        ]
    )


def split_overrides(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Part `--section.key VALUE` and `--section.key=VALUE` from the verb's own options."""
    rest: list[str] = []
    overrides: dict[str, str] = {}
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if not (name.startswith("--") and "." in name):
            rest.append(argument)
            continue
        following = value if equals else next(remaining, None)
        if following is None:
            raise AtollError(f"{name} needs a value: {name} VALUE")
        overrides[name.removeprefix("--")] = following
    return rest, overrides


if __name__ == "__main__":
    sys.exit(main())
