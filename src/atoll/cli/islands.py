"""Verbs of several machines: launch, and those of shared runs: push, join, admit, status, pull, keys."""

import json
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from atoll.cli.verb import KeyFile, Overrides, RunFolder
from atoll.core import config as configuration
from atoll.core.errors import AtollError

if TYPE_CHECKING:
    from atoll.core.signing import Signer


@dataclass
class Launch:
    """Run all remaining jobs of a run on this machine, Slurm or Ray."""

    folder: RunFolder
    """Folder of the run."""
    on: Literal["local", "slurm", "ray"] = "local"
    """Where to run the jobs."""
    jobs: tuple[Literal["prepare", "experts", "router", "monolith", "student"], ...] = ("prepare", "experts", "router")
    """Kinds of jobs to run."""
    experts: Annotated[tuple[int, ...], arg(help_behavior_hint="(default: all)")] = ()
    """Experts to train, by number."""
    prepare_workers: int = 1
    """Number of jobs that divide each of the stages ingest, features, latents and text."""
    max_parallel: Annotated[
        int | None, arg(metavar="N", help_behavior_hint="(default: local: by GPUs, or 1; slurm: no limit)")
    ] = None
    """Maximum number of jobs that run at the same time."""
    retries: int = 3
    """Retry a job at most this many times in a row without progress."""
    wait: bool = False
    """Slurm and Ray: wait until all jobs have ended. Local jobs are always waited for."""
    print: bool = False
    """Print the commands or scripts of all jobs and exit."""
    json: bool = False
    """Print the submitted jobs as JSON."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Submit the jobs, or print them."""
        run = self.folder.resolve()
        config = configuration.load(run, self.overrides)
        from contextlib import redirect_stdout

        from atoll.launch.base import LaunchSettings
        from atoll.launch.launch import as_dict, open_launcher, show, submit
        from atoll.launch.plan import LaunchRequest

        launcher = open_launcher(self.on, LaunchSettings(run, config.island, self.retries, self.max_parallel))
        request = LaunchRequest(self.jobs, self.experts, self.prepare_workers, self.overrides)
        if self.print:
            print(show(launcher, run, config, request=request))
            return
        with redirect_stdout(sys.stderr):  # Ray prints about its nodes there
            found = submit(launcher, run, config, request=request, wait=self.wait)
        if self.json:
            print(json.dumps(as_dict(found)))


@dataclass
class Push:
    """Upload a prepared run to a store that contributors share."""

    folder: RunFolder
    """Folder of the run; an optional policy.json in it limits who may publish what."""
    url: Annotated[Positional[str], arg(metavar="URL")]
    """Store: a path, file://, s3://bucket/prefix, gs://bucket/prefix or az://account/container/prefix."""
    key: KeyFile = None
    """Private key to sign finished networks with, if the policy requires signatures."""

    def run(self) -> None:
        """Upload all objects that the store lacks."""
        from atoll.core.policy import policy_of
        from atoll.islands.remote_run import push
        from atoll.islands.store import Store

        signer = open_signer(self.key) if policy_of(self.folder) else None
        for name in push(self.folder, Store.open(self.url), signer):
            print(f"uploaded: {self.url}/{name}")


@dataclass
class Join:
    """Train free experts of a shared run and publish them."""

    url: Annotated[Positional[str], arg(metavar="URL")]
    """Store of the shared run."""
    expert: Annotated[int | None, arg(metavar="K", help_behavior_hint="(default: any free expert)")] = None
    """Train only this expert."""
    objective: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: that of the run)")] = None
    """Objective to train with, if the policy of the run allows it: flow-matching, ddpm, …"""
    network: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: that of the run)")] = None
    """Network to train, if the policy of the run allows it: DiT-S/2, …"""
    folder: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: in the user cache)")] = None
    """Local folder for shards and checkpoints."""
    key: KeyFile = None
    """Private key to sign with."""
    name: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: host and process id)")] = None
    """Name of this worker that other contributors see."""
    wait: bool = False
    """Wait for leases that expire until every expert is done, instead of exiting when no expert is free."""
    lease: float = 120.0
    """Seconds without renewal after which another worker may take over the expert."""
    publish_every: float = 300.0
    """Minimum number of seconds between two published checkpoints."""
    overrides: Overrides = field(default_factory=dict)

    def run(self) -> None:
        """Train until no expert is left, or until Ctrl-C."""
        from atoll.islands.worker import check_overrides, open_worker

        check_folder(self.url)
        check_overrides(self.overrides)
        name = {} if self.name is None else {"name": self.name}
        # Signing is optional unless the policy requires it, so the package cryptography is, too.
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
    """Check proposed experts, and accept those that pass."""

    url: Annotated[Positional[str], arg(metavar="URL")]
    """Store of the shared run."""
    folder: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: in the user cache)")] = None
    """Scratch folder for the downloads."""
    key: KeyFile = None
    """Private key of an admitter."""
    json: bool = False
    """Print JSON."""

    def run(self) -> None:
        """Check every proposed expert."""
        from atoll.islands.remote_run import admit
        from atoll.islands.store import Store
        from atoll.islands.worker import default_folder

        check_folder(self.url)
        verdicts = admit(Store.open(self.url), self.folder or default_folder(self.url), open_signer(self.key))
        show(verdicts, self.json, "no expert waits for admission")


@dataclass
class Status:
    """Print the state of every job of a local or shared run."""

    url: Annotated[Positional[str], arg(metavar="RUN")]
    """Folder or URL of the run."""
    watch: bool = False
    """Refresh the table until Ctrl-C."""
    every: float = 5.0
    """With --watch, seconds between two refreshes."""
    json: bool = False
    """Print JSON."""

    def run(self) -> None:
        """Print the table once or repeatedly."""
        from rich.console import Console
        from rich.live import Live

        from atoll.islands.status import as_json, as_table, status, watch
        from atoll.islands.store import Store

        check_folder(self.url)
        store, console = Store.open(self.url), Console()
        # In a terminal, the table is redrawn in place. A pipe or file gets every refresh as a new table.
        refreshes = watch(store, self.every) if self.watch else [status(store)]
        with suppress(KeyboardInterrupt) if self.watch else nullcontext():
            if self.watch and console.is_terminal and not self.json:
                with Live(console=console) as screen:
                    for lines in refreshes:
                        screen.update(as_table(lines, self.url), refresh=True)
            for lines in refreshes:
                print(as_json(lines), flush=True) if self.json else console.print(as_table(lines, self.url))


@dataclass
class Pull:
    """Download and verify the finished experts of a shared run."""

    url: Annotated[Positional[str], arg(metavar="URL")]
    """Store of the shared run."""
    folder: RunFolder
    """Folder of the local run."""
    shards: bool = False
    """Also download the shards of all clusters."""
    json: bool = False
    """Print JSON."""

    def run(self) -> None:
        """Download, verify, and print what was refused."""
        from atoll.islands.remote_run import pull
        from atoll.islands.store import Store

        check_folder(self.url)
        verdicts = pull(Store.open(self.url), self.folder, self.shards)
        show(verdicts, self.json, "the store has no finished expert")
        if refused := [job for job, verdict in verdicts.items() if verdict.startswith("refused")]:
            raise AtollError(f"refused: {', '.join(refused)}")


@dataclass
class Keys:
    """Print your public key; create the key pair if there is none."""

    key: KeyFile = None
    """File of the private key; the environment variable ATOLL_KEY sets another default."""

    def run(self) -> None:
        """Print the public key."""
        print(open_signer(self.key).public)


def check_folder(url: str) -> None:
    """Raise an error for a missing path, because opening a store would create it."""
    path = url.removeprefix("file://")
    if "://" not in path and not Path(path).is_dir():
        raise AtollError(f"{url}: no such folder; expected a run, or the URL of one")


def open_signer(file: Path | None) -> "Signer":
    """Load or create the private key."""
    from atoll.core.signing import Signer, default_key_file

    try:
        return Signer.open(file or default_key_file())
    except ImportError as error:
        raise AtollError("signing needs the package cryptography; pip install 'atoll[islands]'") from error


def show(verdicts: dict[str, str], as_json: bool, nothing: str) -> None:
    """Print the outcome of each job."""
    if as_json:
        print(json.dumps(verdicts))
    else:
        print("\n".join(f"{job}: {verdict}" for job, verdict in verdicts.items()) or nothing)
