"""Verbs of shared runs: push, join, admit, status, pull, trust, keys."""

import json
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, Suppress, arg

from atoll.cli.verb import KeyFile, RunFolder
from atoll.core.errors import AtollError
from atoll.verify.untrusted import printable

if TYPE_CHECKING:
    from atoll.apps.share.remote_run import Access
    from atoll.core.distributed import DistContext
    from atoll.verify.signing import Signer

Url = Annotated[Positional[str], arg(metavar="URL")]


@dataclass(kw_only=True)
class Opened:
    """Options of the verbs that open a shared run."""

    trust: Annotated[
        str | None, arg(metavar="FINGERPRINT", help_behavior_hint="(default: that of the URL, or of the folder)")
    ] = None
    """Fingerprint of a shared run, if the URL has none."""
    unsigned: bool = False
    """Accept a shared run without its fingerprint. Anyone who can write to the store could have written it."""

    def access(self, url: str, signer: "Signer | None" = None) -> tuple[str, "Access"]:
        """Return the URL without its fragment, and how to open the run. A missing folder is an error."""
        from atoll.apps.share.remote_run import Access, split_url

        url, given = split_url(url, self.trust)
        # Opening a store would create the folder.
        path = url.removeprefix("file://")
        if "://" not in path and not Path(path).is_dir():
            raise AtollError(f"{url}: no such folder; expected a run, or the URL of one")
        return url, Access(given, self.unsigned, signer)


@dataclass
class Push:
    """Upload a prepared run to a store that contributors share."""

    folder: RunFolder
    """Folder of the run. The first push creates its root of trust, with you as the owner."""
    url: Annotated[
        Positional[str | None], arg(metavar="URL", help_behavior_hint="(default: that of the last push)")
    ] = None
    """Store: a path, file://, s3://bucket/prefix, gs://bucket/prefix or az://account/container/prefix."""
    key: KeyFile = None
    """Private key of an owner."""

    def run(self) -> None:
        """Upload all objects that the store lacks."""
        from atoll.apps.share.owners import push, pushed_url
        from atoll.apps.share.remote_run import split_url
        from atoll.apps.share.store import Store

        url, _ = split_url(self.url or pushed_url(self.folder))
        remote, sent = push(self.folder, Store.open(url), open_signer(self.key))
        for name in sent:
            print(f"uploaded: {url}/{name}")
        print(f"others open it as: {remote.url}")


@dataclass
class Join(Opened):
    """Train free experts of a shared run and publish them."""

    url: Url
    """Store of the shared run, with the fingerprint that its owner gave you: URL#sha256=…"""
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
    name: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: random)")] = None
    """Name of this worker that everybody who can read the store sees."""
    wait: bool = False
    """Wait for leases that expire until every expert is done, instead of exiting when no expert is free."""
    lease: float = 120.0
    """Seconds without renewal after which another worker may take over the expert."""
    publish_every: float = 300.0
    """Minimum number of seconds between two published checkpoints."""
    overrides: Annotated[dict[str, str], Suppress] = field(default_factory=dict)

    def run(self) -> None:
        """Train until no expert is left, or until Ctrl-C."""
        from atoll.apps.share.worker import check_overrides, follow
        from atoll.core.device import device
        from atoll.core.distributed import init_distributed

        check_overrides(self.overrides)
        with init_distributed(device()) as processes:
            if processes.is_main:
                self._work(processes)
            else:
                follow(processes)

    def _work(self, processes: "DistContext") -> None:
        from atoll.apps.share.worker import open_worker

        url, access = self.access(self.url, open_signer(self.key))
        options = {name: getattr(self, name) for name in ("objective", "network", "overrides", "publish_every")}
        options |= {"name": self.name} if self.name else {}
        worker = open_worker(url, self.folder, access, duration=self.lease, processes=processes, **options)
        print(f"working on {url} as {worker.name}, in {worker.folder}", flush=True)
        finished = worker.run(self.expert, self.wait)
        print(f"{finished} expert{'' if finished == 1 else 's'} finished", flush=True)
        if worker.failed:
            raise AtollError(f"failed: {', '.join(worker.failed)}; see above, and atoll status {url}")


@dataclass
class Admit(Opened):
    """Check proposed experts, and accept those that pass."""

    url: Url
    """Store of the shared run, with its fingerprint: URL#sha256=…"""
    folder: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: in the user cache)")] = None
    """Scratch folder for the downloads."""
    key: KeyFile = None
    """Private key of an admitter or owner."""
    json: bool = False
    """Print JSON."""

    def run(self) -> None:
        """Check every proposed expert."""
        from atoll.apps.share.admit import admit
        from atoll.apps.share.remote_run import RemoteRun, default_folder
        from atoll.apps.share.store import Store

        url, access = self.access(self.url, open_signer(self.key))
        folder = self.folder or default_folder(url)
        show(admit(RemoteRun.open(Store.open(url), folder, access), folder), self.json, "no expert waits for admission")


@dataclass
class Status(Opened):
    """Print the state of every job of a local or shared run."""

    url: Annotated[Positional[str], arg(metavar="RUN")]
    """Folder of a local run, or URL of a shared one with its fingerprint: URL#sha256=…"""
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

        from atoll.apps.share.remote_run import RemoteRun, is_local
        from atoll.apps.share.status import as_table, status, watch
        from atoll.apps.share.store import Store

        url, access = self.access(self.url)
        store, console = Store.open(url), Console()
        remote = None if is_local(store) else RemoteRun.open(store, None, access)
        # In a terminal, the table is redrawn in place. A pipe or file gets every refresh as a new table.
        refreshes = watch(store, remote, self.every) if self.watch else [status(store, remote)]
        with suppress(KeyboardInterrupt) if self.watch else nullcontext():
            if self.watch and console.is_terminal and not self.json:
                with Live(console=console) as screen:
                    for lines in refreshes:
                        screen.update(as_table(lines, url), refresh=True)
            for lines in refreshes:
                if self.json:
                    print(json.dumps([asdict(line) for line in lines]), flush=True)
                else:
                    console.print(as_table(lines, url))


@dataclass
class Pull(Opened):
    """Download and verify the finished experts of a shared run."""

    url: Url
    """Store of the shared run, with its fingerprint: URL#sha256=…"""
    folder: RunFolder
    """Folder of the local run."""
    shards: bool = False
    """Also download the shards of all clusters."""
    json: bool = False
    """Print JSON."""

    def run(self) -> None:
        """Download, verify, and print what was refused."""
        from atoll.apps.share.pull import pull
        from atoll.apps.share.remote_run import RemoteRun
        from atoll.apps.share.store import Store

        url, access = self.access(self.url)
        verdicts = pull(RemoteRun.open(Store.open(url), self.folder, access), self.folder, self.shards)
        show(verdicts, self.json, "the store has no finished expert")
        if refused := [job for job, verdict in verdicts.items() if verdict.startswith("refused")]:
            raise AtollError(f"refused: {', '.join(refused)}")


@dataclass
class Trust:
    """Print or change who may publish and admit in a shared run."""

    folder: Annotated[Positional[str], arg(metavar="RUN")]
    """Folder of a shared run; show also takes its URL."""
    action: Annotated[
        Positional[Literal["show", "invite", "add", "withdraw", "rotate", "set", "renew"]], arg(metavar="[ACTION]")
    ] = "show"
    """show, invite, add, withdraw, rotate, set or renew. All but show make the next version of the root."""
    words: Annotated[Positional[tuple[str, ...]], arg(metavar="[WORD ...]", help_behavior_hint="(default: none)")] = ()
    """invite NAME KEY; add publisher|admitter|owner NAME KEY; withdraw network JOB or key NAME; rotate NAME KEY;
    set FIELD VALUE."""
    experts: Annotated[tuple[int, ...], arg(help_behavior_hint="(default: all)")] = ()
    """With invite and add publisher: numbers of the experts that this key may publish."""
    push: bool = False
    """Publish the new version at once, as invite does."""
    key: KeyFile = None
    """Private key of an owner."""
    json: bool = False
    """Print JSON."""

    def run(self) -> None:
        """Print the root, or change and publish it."""
        from atoll.apps.share.owners import change, describe, push, pushed_url, show_root
        from atoll.apps.share.store import Store

        if self.action == "show":
            trust = show_root(self.folder)
            print(json.dumps(trust.current.model_dump(mode="json")) if self.json else describe(trust))
            return
        run, signer, publish = Path(self.folder), open_signer(self.key), self.push or self.action == "invite"
        url = pushed_url(run) if publish else None
        root = change(run, self.action, self.words, experts=self.experts, signer=signer)
        if url is None:
            print(f"version {root.version} of the root; publish it with: atoll push {run}")
            return
        remote, _ = push(run, Store.open(url), signer)
        print(f"version {root.version} of the root is published")
        if self.action == "invite":
            print(f"send this line to {self.words[0]}: atoll join '{remote.url}'")


@dataclass
class Keys:
    """Print your public key; create the key pair if there is none."""

    key: KeyFile = None
    """File of the private key; the environment variable ATOLL_KEY sets another default."""

    def run(self) -> None:
        """Print the public key."""
        print(open_signer(self.key).public)


def open_signer(file: Path | None) -> "Signer":
    """Load or create the private key."""
    from atoll.verify.signing import Signer, default_key_file

    return Signer.open(file or default_key_file())


def show(verdicts: dict[str, str], as_json: bool, nothing: str) -> None:
    """Print the outcome of each job."""
    if as_json:
        print(json.dumps(verdicts))
    else:
        print("\n".join(f"{job}: {printable(verdict)}" for job, verdict in verdicts.items()) or nothing)
