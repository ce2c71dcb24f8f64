"""`atoll join`: take a free expert of a shared run, fetch its shards, train it, publish it, take the next."""

import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Unpack
from zlib import crc32

from atoll import flow
from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact, Manifest
from atoll.core.config import Config
from atoll.core.errors import AtollError
from atoll.core.layout import MANIFEST_FILE
from atoll.core.manifests import CHECKPOINT, EXPERT, SHARDS
from atoll.core.policy import Policy
from atoll.core.signing import Signer, verify
from atoll.core.untrusted import Refused, strict_json
from atoll.islands.admission import Contribution, check_declaration, check_files, check_loss
from atoll.islands.checkpoint_publisher import Reporter, checkpoint_keys, is_checkpoint_key
from atoll.islands.leases import DURATION, Lease, LeaseLost, News, Seen, State, survey
from atoll.islands.remote_run import open_config, settle
from atoll.islands.safetensors_headers import safetensors_header
from atoll.islands.store import Store
from atoll.islands.transfer import commit, fetch, read_manifest, signature_key, upload
from atoll.train.cost import parameter_count
from atoll.train.job import train_job
from atoll.train.loop import Requeue
from atoll.train.spec import TrainSpec, made_from, resolve_job

POLL_SECONDS = 5.0
CHOSEN = (
    *("total_images", "batch_size", "grad_accum_steps", "lr", "warmup_images", "lr_schedule", "beta2", "weight_decay"),
    *("max_grad_norm", "precision", "ema"),
    *("conditioning", "cfg_dropout", "activation_checkpointing", "compile", "save_every", "seed"),
)
"""Settings of training that a contributor may choose; they travel with the lease, so that another can go on."""
LOCAL = {"train.sample_every": "0", "train.trackers": "[]"}
"""Settings that are this machine's own affair: they do not travel."""


@dataclass
class Worker:
    """A contributor at work."""

    store: Store
    folder: Path
    config: Config
    policy: Policy | None = None
    signer: Signer | None = None
    objective: str | None = None
    network: str | None = None
    overrides: dict[str, str] = field(default_factory=dict)
    duration: float = DURATION
    publish_every: float = 300.0
    name: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    stop: threading.Event = field(default_factory=threading.Event)
    _over: set[int] = field(default_factory=set)
    """Experts that need no second look: finished, or failed here."""
    failed: list[str] = field(default_factory=list)
    """Jobs that failed here."""

    def run(self, expert: int | None = None, wait: bool = False, limit: int | None = None) -> int:
        """Work until nothing is left to take (or, with `wait`, to do) or someone says stop; how many were finished."""
        finished = 0
        with _stopping(self.stop):
            while not self.stop.is_set() and (limit is None or finished < limit):
                lease, unfinished = self._take(expert)
                if lease is not None:
                    with lease:
                        finished += self._work(lease, int(lease.job.split("/")[1]))
                elif not unfinished or not wait:
                    print("nothing left to take" if unfinished else "every expert is done", flush=True)
                    break
                else:
                    self.stop.wait(min(POLL_SECONDS, self.duration / 3))
        return finished

    def _take(self, expert: int | None) -> tuple[Lease | None, bool]:
        """The lease of a free expert, and whether any is unfinished. Workers start looking in different places."""
        count = self.config.clusters.count
        start = crc32(self.name.encode()) % count
        wanted = [expert] if expert is not None else [(start + k) % count for k in range(count)]
        seen, unfinished = survey(self.store, "leases/experts"), False
        for number in wanted:
            self.config.objective(number)  # refuses a number that does not exist
            if number in self._over:
                continue
            try:
                lease, is_open = self._take_one(number, seen.get(layout.expert_job(number)))
            except Refused as reason:  # what stands in the place of one expert does not keep us from the others
                print(f"{layout.expert_job(number)} is passed over: {reason}", flush=True)
                self._over.add(number)
                continue
            unfinished |= is_open
            if lease is not None:
                print(f"{lease.job}: taken", flush=True)
                return lease, True
        return None, unfinished

    def _take_one(self, number: int, seen: Seen | None) -> tuple[Lease | None, bool]:
        """Return the lease of one expert if it is free, and whether the expert is unfinished."""
        job = layout.expert_job(number)
        if seen is not None and (not seen.free or (self._judged and seen.proposed)):
            settle(self.store, job, seen)
            done = seen.record.state == "done"
            self._over |= {number} if done else set()
            return None, not done
        if self.store.entry(f"{layout.final(job)}/{MANIFEST_FILE}"):
            self._over.add(number)
            return None, False
        return Lease.take(self.store, job, self.duration, holder=self.name, choice=self._choice(number)), True

    @property
    def _judged(self) -> bool:
        """Whether contributions wait until someone lets them in."""
        return bool(self.policy and self.policy.admitters)

    def _choice(self, expert: int) -> dict[str, str]:
        """The contributor's own settings, as dotted overrides that are valid for this expert."""
        chosen = {f"experts.{expert}": self.objective, f"networks.{expert}": self.network}
        choice = {key: value for key, value in chosen.items() if value is not None} | self.overrides
        check_choice(choice)
        return choice

    def _work(self, lease: Lease, expert: int) -> bool:
        """Train one expert and publish it; whether it is finished."""
        try:
            spec, resumed = self._job(lease, expert)
            reporter = Reporter(
                self.store,
                lease,
                spec,
                signer=self.signer,
                every=self.publish_every,
                stop=self.stop,
                resumed=resumed,
            )
            send = True
            try:
                manifest = train_job(spec, reporter)
            except KeyboardInterrupt:
                send = False
                raise
            finally:
                reporter.close(send)
            self._publish(lease, spec, manifest, expert=expert)
            self._over.add(expert)
            return True
        except Requeue:
            if lease.lost:
                print(f"{lease.job}: the lease was lost; nothing was published", flush=True)
            else:
                self.stop.set()
                self._end(lease, "released")
                print(f"{lease.job}: left at {lease.record.images:,} images; another can go on from there", flush=True)
        except LeaseLost as lost:
            print(f"{lost}; nothing was published", flush=True)
        except (AtollError, RuntimeError) as error:
            self._over.add(expert)
            self.failed.append(lease.job)
            print(f"{lease.job} failed: {error}", flush=True)
            self._end(lease, "failed", why=str(error), failures=lease.record.failures + 1)
        return False

    def _end(self, lease: Lease, state: State, **news: Unpack[News]) -> None:
        """Give the lease up, if it is still ours."""
        try:
            lease.end(state, **news)
        except LeaseLost as lost:
            print(lost, flush=True)

    def _job(self, lease: Lease, expert: int) -> tuple[TrainSpec, set[str]]:
        """The job, with its data here and its last published checkpoint in place, and the keys of that checkpoint."""
        own = layout.shards(expert)
        data = read_manifest(self.store, own)
        if data is None:
            raise AtollError(f"{self.store.url} has no {own}; publish it with: atoll push RUN {self.store.url}")
        fetch(self.store, own, data, target=Artifact(self.folder, own))
        choice = dict(lease.record.choice)
        try:
            check_choice(choice)
            spec = self._job_of(expert, choice)
        except AtollError as error:
            print(f"{lease.job}: the settings of the worker before are not used: {error}", flush=True)
            lease.renew(choice=self._choice(expert), checkpoint=None, images=0)
            spec = self._job_of(expert, self._choice(expert))
        forget_other(spec)
        pointer = lease.record.checkpoint
        return spec, set() if pointer is None else self._continue_from(pointer, spec)

    def _job_of(self, expert: int, choice: dict[str, str]) -> TrainSpec:
        config = configuration.load(self.folder, {**LOCAL, **choice})
        spec = resolve_job(self.folder, config, "expert", expert=expert)
        check_allowed(spec, self.policy or Policy())
        return spec

    def _continue_from(self, pointer: str, spec: TrainSpec) -> set[str]:
        """Fetch another worker's checkpoint, and return its keys; one that is not plainly good is passed over."""
        name, _, digest = pointer.partition("@")
        try:
            manifest = read_manifest(self.store, name, digest)
            if manifest is None:
                raise Refused("it is no longer there")
            check_checkpoint(manifest, spec)
            key = signature_key(name, digest, "publish")
            signature = strict_json(self.store.read(key, 4096) or b"null", key)
            verify(self.policy, "publish", name, manifest=manifest, signature=signature)
            images = CHECKPOINT.parse(manifest, spec.job).images
            target = Artifact(self.folder, layout.checkpoint(spec.job, images))
            fetch(self.store, name, manifest, target=target)
            for file in manifest.files:
                if file.endswith(".safetensors"):
                    safetensors_header(target.path(file))
            print(f"{spec.job}: going on from {images:,} images", flush=True)
            return checkpoint_keys(name, manifest)
        except AtollError as error:
            print(f"{spec.job}: the published checkpoint is passed over: {error}", flush=True)
            return set()

    def _publish(self, lease: Lease, spec: TrainSpec, manifest: Manifest, *, expert: int) -> None:
        """Check the result as any other contribution, upload it, and commit it with the lease's last record."""
        data = Artifact(self.folder, layout.shards(expert))
        offered = Contribution(expert, manifest, data.open(SHARDS), self.policy or Policy())
        check_declaration(offered)
        check_files(offered, spec.result)
        check_loss(offered, spec.result, data)
        lease.check()
        upload(self.store, spec.result, manifest, name=spec.result.name)
        if self.signer is not None:
            key = signature_key(spec.result.name, manifest.digest, "publish")
            self.store.write(key, self.signer.sign("publish", spec.result.name, manifest))
        # Nobody needs the checkpoints of any attempt at this job once it is finished.
        listed = self.store.entries(layout.checkpoints(spec.job))
        old = [entry.key for entry in listed if is_checkpoint_key(entry.key, spec.job)]
        state: State = "proposed" if self._judged else "done"
        lease.end(state, manifest=manifest.digest, images=spec.settings.total_images, checkpoint=None)
        if not self._judged:
            commit(self.store, spec.result.name, manifest)
        self.store.delete(old)  # what came after the lease ended is another's
        print(f"{spec.job}: {'waits for admission' if self._judged else 'published'}", flush=True)


def check_choice(choice: dict[str, str]) -> None:
    """A choice may name an objective, a network and settings of training, nothing that reaches into a machine."""
    for key in choice:
        section, _, name = key.partition(".")
        if section not in ("experts", "networks") and not (section == "train" and name.split(".")[0] in CHOSEN):
            raise AtollError(
                f"--{key} is not for contributors to choose; possible: experts, networks, {', '.join(CHOSEN)}"
            )


def check_allowed(spec: TrainSpec, policy: Policy) -> None:
    """Refuse before training what would be refused after it."""
    allowed = policy.objectives
    if allowed is not None and spec.objective not in [flow.objective(name).spec for name in allowed]:
        raise AtollError(f"the run's policy allows the objectives {', '.join(allowed)} only")
    kind = spec.network.class_name
    if kind not in policy.networks:
        raise AtollError(f"the run's policy allows the networks {', '.join(policy.networks)} only, not {kind}")
    count = parameter_count(spec.network)
    if count > policy.max_parameters:
        raise AtollError(f"the network has {count:,} parameters; the run's policy allows {policy.max_parameters:,}")


def check_checkpoint(manifest: Manifest, spec: TrainSpec) -> None:
    """A checkpoint must be of this very job: made from the same data, network, objective and settings."""
    try:
        images = CHECKPOINT.parse(manifest, spec.job).images
    except AtollError as error:
        raise Refused(f"it is no checkpoint of this job: {error}") from error
    if images > spec.settings.total_images:
        raise Refused("it is no checkpoint of this job: it has seen more images than the job has")
    if Manifest("", made_from(spec), {}, {}).to_json() != Manifest("", manifest.made_from, {}, {}).to_json():
        raise Refused("it was made with other settings")
    room = (4 + len(spec.settings.ema)) * 4 * parameter_count(spec.network) + (1 << 24)
    if sum(entry.size for entry in manifest.files.values()) > room:
        raise Refused(f"it is larger than the {room:,} bytes that this network's state takes")


def forget_other(spec: TrainSpec) -> None:
    """Remove from this machine's copy what an earlier attempt made with other settings."""
    inputs = made_from(spec)
    folder = spec.run / spec.job
    checkpoints = sorted((spec.run / layout.checkpoints(spec.job)).glob("[0-9]*")) if folder.is_dir() else []
    try:
        spec.result.check(EXPERT, {**inputs, "images": spec.settings.total_images})
        for path in checkpoints:
            Artifact(spec.run, layout.checkpoint(spec.job, int(path.name))).check(CHECKPOINT, inputs)
    except AtollError:
        shutil.rmtree(folder)


@contextmanager
def _stopping(stop: threading.Event) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks for an orderly end; the second Ctrl-C ends at once."""

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()
        print("leaving: the checkpoint is saved and published first (Ctrl-C again to leave without)", flush=True)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_worker(url: str, folder: Path | None, **how: Any) -> Worker:
    """A worker on the run at a URL, with its local copy in `folder`."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise AtollError("atoll join works with one process; for several GPUs on one expert use atoll launch")
    store = Store.open(url)
    store.probe()
    folder = folder or default_folder(url)
    config, policy = open_config(store, folder)
    signer = how.pop("signer")
    listed = policy.publishers.values() if policy else ()
    if listed and (signer is None or signer.public not in listed):
        mine = "none" if signer is None else signer.public
        raise AtollError(f"{url}: its policy does not list your key ({mine}); ask its owner to add it")
    return Worker(store, folder, config, policy, signer, **how)


def default_folder(url: str) -> Path:
    """Where this machine keeps its part of a shared run."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    safe = "".join(letter if letter.isalnum() else "-" for letter in url)
    return cache / "atoll" / f"{safe[-60:].strip('-')}-{crc32(url.encode()):08x}"
