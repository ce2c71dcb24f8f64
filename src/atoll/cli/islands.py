"""The verbs of many machines: launch, and those of shared runs: push, join, admit, status, pull, keys."""

import json
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from atoll.cli.verb import Overrides
from atoll.core import config as configuration
from atoll.core.errors import AtollError

if TYPE_CHECKING:
    from atoll.core.signing import Signer

KeyFile = Annotated[Path | None, arg(metavar="FILE")]


@dataclass
class Launch:
    """Submit every missing job of a run, on this machine, on Slurm or on Ray; again, it submits what is left."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    on: Literal["local", "slurm", "ray"] = "local"
    """Where."""
    jobs: tuple[Literal["prepare", "experts", "router", "monolith", "student"], ...] = ("prepare", "experts", "router")
    """Which kinds of jobs."""
    experts: tuple[int, ...] = ()
    """Only these experts, instead of all."""
    shares: int = 1
    """Jobs that ingest, features, latents and text are each divided into."""
    at_once: int | None = None
    """Jobs that run side by side at most; on this machine the default is one, or as many as have their GPUs."""
    retries: int = 3
    """How often a job may die in a row without having got further."""
    wait: bool = False
    """Slurm and Ray: stay until everything has ended. On this machine it always does."""
    print: bool = False
    """Show exactly what would be submitted, and submit nothing."""
    json: bool = False
    """Print what was submitted as JSON."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Submit, or show what would be."""
        run = self.folder.resolve()
        config = configuration.load(run, self.overrides)
        from contextlib import redirect_stdout

        from atoll.launch.base import Setting
        from atoll.launch.launch import as_dict, open_launcher, show, submit
        from atoll.launch.plan import Wish

        launcher = open_launcher(self.on, Setting(run, config.island, self.retries, self.at_once))
        wish = Wish(self.jobs, self.experts, self.shares, self.overrides)
        if self.print:
            print(show(launcher, run, config, wish=wish))
            return
        with redirect_stdout(sys.stderr):  # Ray tells of its nodes there
            found = submit(launcher, run, config, wish=wish, wait=self.wait)
        if self.json:
            print(json.dumps(as_dict(found)))


@dataclass
class Push:
    """Put a prepared run into a store that islands share."""

    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run; its policy.json, if there is one, says who may publish what."""
    url: Annotated[Positional[str], arg(metavar="URL")]
    """A path, file://, s3://bucket/prefix, gs://bucket/prefix or az://account/container/prefix."""
    key: KeyFile = None
    """Private key to sign finished networks with, where the policy asks for it; null is one's own (atoll keys)."""

    def run(self) -> None:
        """Send what is not there yet."""
        from atoll.core.policy import policy_of
        from atoll.islands.remote_run import push
        from atoll.islands.store import Store

        signer = open_signer(self.key) if policy_of(self.folder) else None
        for name in push(self.folder, Store.open(self.url), signer):
            print(f"{self.url}/{name} is there")


@dataclass
class Join:
    """Work on a shared run: take a free expert, train it from its own shards, publish it, take the next."""

    url: Annotated[Positional[str], arg(metavar="URL")]
    """Where the run is shared."""
    expert: int | None = None
    """Only this expert."""
    objective: str | None = None
    """Objective of your own choice, within the run's policy: flow-matching, ddpm, …"""
    network: str | None = None
    """Network of your own choice, within the run's policy: DiT-S/2, …"""
    folder: Path | None = None
    """Where this machine keeps its part of the run; null is a folder in the user's cache."""
    key: KeyFile = None
    """Private key to sign with; null is one's own (atoll keys)."""
    name: str | None = None
    """How others see you; null is host and process."""
    wait: bool = False
    """When nothing is free, wait for what others give up, until every expert is done."""
    lease: float = 120.0
    """Seconds of silence after which others may take over."""
    publish_every: float = 300.0
    """Seconds between two published checkpoints, at least."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Work until nothing is left, or until Ctrl-C."""
        from atoll.islands.worker import check_choice, open_worker

        check_place(self.url)
        check_choice(self.overrides)
        name = {} if self.name is None else {"name": self.name}
        worker = open_worker(
            self.url,
            self.folder,
            signer=open_signer(self.key) if self.key or find_spec("cryptography") else None,
            objective=self.objective,
            network=self.network,
            overrides=self.overrides,
            duration=self.lease,
            publish_every=self.publish_every,
            **name,
        )
        print(f"working on {self.url} as {worker.name}, in {worker.folder}", flush=True)
        finished = worker.run(self.expert, self.wait)
        print(f"{finished} expert{'' if finished == 1 else 's'} finished", flush=True)
        if worker.failed:
            raise AtollError(f"failed: {', '.join(worker.failed)}; see above, and atoll status {self.url}")


@dataclass
class Admit:
    """Check the contributions that wait in a shared run, and let in those that pass."""

    url: Annotated[Positional[str], arg(metavar="URL")]
    """Where the run is shared."""
    folder: Path | None = None
    """Scratch for quarantine; null is a folder in the user's cache."""
    key: KeyFile = None
    """Private key of an admitter; null is one's own (atoll keys)."""
    json: bool = False
    """Print JSON."""

    def run(self) -> None:
        """Judge every contribution that waits."""
        from atoll.islands.remote_run import admit
        from atoll.islands.store import Store
        from atoll.islands.worker import default_folder

        check_place(self.url)
        verdicts = admit(Store.open(self.url), self.folder or default_folder(self.url), open_signer(self.key))
        show(verdicts, self.json, "nothing waits for admission")


@dataclass
class Status:
    """Every job of a run, here or shared: done, running, stale, failed, free."""

    url: Annotated[Positional[str], arg(metavar="RUN")]
    """Folder or URL of the run."""
    watch: bool = False
    """Show it again every few seconds, until Ctrl-C."""
    every: float = 5.0
    """Seconds between two looks, with --watch."""
    json: bool = False
    """Print JSON."""

    def run(self) -> None:
        """Look, once or again and again."""
        from rich.console import Console
        from rich.live import Live

        from atoll.islands.status import as_json, as_table, status, watch
        from atoll.islands.store import Store

        check_place(self.url)
        store, console = Store.open(self.url), Console()
        looks = watch(store, self.every) if self.watch else [status(store)]
        with suppress(KeyboardInterrupt) if self.watch else nullcontext():
            if self.watch and console.is_terminal and not self.json:
                with Live(console=console) as screen:
                    for lines in looks:
                        screen.update(as_table(lines, self.url), refresh=True)
            for lines in looks:
                print(as_json(lines), flush=True) if self.json else console.print(as_table(lines, self.url))


@dataclass
class Pull:
    """Bring the finished networks of a shared run into a folder, each checked before it comes in."""

    url: Annotated[Positional[str], arg(metavar="URL")]
    """Where the run is shared."""
    folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder for it; sample from it with atoll.load."""
    shards: bool = False
    """Bring the data of all clusters too."""
    json: bool = False
    """Print JSON."""

    def run(self) -> None:
        """Fetch, check, and tell what was refused."""
        from atoll.islands.remote_run import pull
        from atoll.islands.store import Store

        check_place(self.url)
        verdicts = pull(Store.open(self.url), self.folder, self.shards)
        show(verdicts, self.json, "nothing is there")
        if refused := [job for job, verdict in verdicts.items() if verdict.startswith("refused")]:
            raise AtollError(f"refused: {', '.join(refused)}")


@dataclass
class Keys:
    """Print one's own public key, for a run's policy; the private one is made if there is none."""

    key: KeyFile = None
    """File of the private key; null is ATOLL_KEY, or atoll/key.pem among the user's settings."""

    def run(self) -> None:
        """Print it."""
        print(open_signer(self.key).public)


def check_place(url: str) -> None:
    """A path that is not there is a slip of the pen: opening a store would make the folder."""
    path = url.removeprefix("file://")
    if "://" not in path and not Path(path).is_dir():
        raise AtollError(f"{url}: no such folder; expected a run, or the URL of one")


def open_signer(file: Path | None) -> "Signer":
    """One's own private key."""
    from atoll.core.signing import Signer, default_key_file

    try:
        return Signer.open(file or default_key_file())
    except ImportError as error:
        raise AtollError("signing needs the package cryptography; pip install 'atoll[islands]'") from error


def show(verdicts: dict[str, str], as_json: bool, nothing: str) -> None:
    """Print what became of each job."""
    if as_json:
        print(json.dumps(verdicts))
    else:
        print("\n".join(f"{job}: {verdict}" for job, verdict in verdicts.items()) or nothing)
