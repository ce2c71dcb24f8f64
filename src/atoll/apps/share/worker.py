"""`atoll join`: acquire a free expert of a shared run, download what it needs, train it, publish it, and repeat.

Under torchrun, only the main process uses the store. It announces each job to the others, which `follow` it: they
train with it, from the folder that it has filled, and wait while it measures and uploads.
"""

import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from zlib import crc32

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from atoll.apps.share.admission import check_allowed, check_network, find_base
from atoll.apps.share.checkpoint_publisher import CheckpointPublisher, checkpoint_keys, is_checkpoint_key
from atoll.apps.share.lease_records import LeaseState, list_leases, new_name
from atoll.apps.share.leases import DURATION, Lease, LeaseLost
from atoll.apps.share.measured import check_expert
from atoll.apps.share.pull import pull_start
from atoll.apps.share.remote_run import Access, RemoteRun, default_folder
from atoll.apps.share.shared_settings import check_choice
from atoll.apps.share.store import Store
from atoll.apps.share.transfer import fetch, read_manifest, upload
from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact, Manifest
from atoll.core.config import Config
from atoll.core.device import compute_dtype, device, dtype_name
from atoll.core.distributed import ALONE, DistContext
from atoll.core.errors import AtollError, first_line
from atoll.core.manifests import CHECKPOINT, EXPERT
from atoll.core.networks import BASE, BaseConfig
from atoll.experts.cost import parameter_count
from atoll.train.checkpoints import load_weights
from atoll.train.job import build_task, train_job
from atoll.train.loop import Requeue
from atoll.train.spec import TrainSpec, made_from, resolve_job
from atoll.train.tasks import ExpertTask
from atoll.verify.trust import Network
from atoll.verify.untrusted import Refused, printable

# A choice: short compared with a lease (120 s), long compared with the time to list all leases.
POLL_SECONDS = 5.0
"""Seconds between two checks for a free expert with `--wait`."""
CONTRIBUTOR_KEYS = (
    *("total_images", "batch_size", "grad_accum_steps", "lr", "warmup_images", "lr_schedule", "beta2", "weight_decay"),
    *("optimizer", "max_grad_norm", "precision", "ema"),
    *("conditioning", "cfg_dropout", "activation_checkpointing", "compile", "save_every", "seed"),
)
"""Keys of `train` that a contributor may set. They are stored in the lease, so that another worker can resume."""
LOCAL_KEYS = ("train.parallel",)
"""Settings that a contributor may set for this machine. Weights do not depend on them, so they are not in the lease."""
LOCAL_OVERRIDES = {"train.sample_every": "0", "train.trackers": "[]"}
"""Settings of every worker that do not affect the weights: no preview samples and no experiment trackers."""


@dataclass
class Worker:
    """A contributor of a shared run."""

    remote: RemoteRun
    folder: Path
    config: Config
    """The shared settings, with those of this machine."""
    objective: str | None = None
    network: str | None = None
    overrides: dict[str, str] = field(default_factory=dict)
    duration: float = DURATION
    publish_every: float = 300.0
    name: str = field(default_factory=new_name)
    stop: threading.Event = field(default_factory=threading.Event)
    processes: DistContext = ALONE
    _skipped: set[int] = field(default_factory=set)
    """Experts to skip from now on: finished, or failed on this machine."""
    failed: list[str] = field(default_factory=list)
    """Jobs that failed on this machine."""

    @property
    def local(self) -> dict[str, str]:
        """The overrides that only matter on this machine."""
        return {key: value for key, value in self.overrides.items() if key in LOCAL_KEYS}

    @property
    def store(self) -> Store:
        """The store of the run."""
        return self.remote.store

    def run(self, expert: int | None = None, wait: bool = False, limit: int | None = None) -> int:
        """Train experts until none is free (with `wait`: until all are done) or `stop` is set.

        Return the number of finished experts.
        """
        finished = 0
        with _stop_on_signals(self.stop):
            while not self.stop.is_set() and (limit is None or finished < limit):
                lease, unfinished = self._acquire_any(expert)
                if lease is not None:
                    with lease:
                        finished += self._train_expert(lease, int(lease.job.split("/")[1]))
                elif not unfinished or not wait:
                    print(self._summary(expert), flush=True)
                    break
                else:
                    self.processes.on_main(dict)  # the other processes do not wait for days
                    self.stop.wait(min(POLL_SECONDS, self.duration / 3))
        self.processes.on_main(lambda: None)
        return finished

    def _summary(self, expert: int | None) -> str:
        """Return what has become of the experts that this worker may train."""
        done = self.remote.networks()
        leases = list_leases(self.store, layout.EXPERT_LEASES, authority=self.remote).leases
        numbers = range(self.config.clusters.count) if expert is None else [expert]
        left = [job for job in map(layout.expert_job, numbers) if job not in done and self._may_publish(job)]
        waiting = [job for job in left if job in leases and leases[job].waiting]
        others = [job for job in left if job not in waiting and job not in self.failed]
        states = {"failed here": self.failed, "waiting for admission": waiting, "not free": others}
        found = [f"{state}: {', '.join(jobs)}" for state, jobs in states.items() if jobs]
        return "; ".join(found) or "all done"

    def _acquire_any(self, expert: int | None) -> tuple[Lease | None, bool]:
        """Return the lease of a free expert, or None, and whether any expert is unfinished."""
        # Each worker begins its search at a different expert, so that workers rarely race for the same lease.
        count = self.config.clusters.count
        start = crc32(self.name.encode()) % count
        wanted = [expert] if expert is not None else [(start + k) % count for k in range(count)]
        self.remote.refresh()
        leases = list_leases(self.store, layout.EXPERT_LEASES, authority=self.remote).leases
        finished = self.remote.networks()
        unfinished = False
        for number in wanted:
            self.config.objective(number)  # raises an error if there is no such expert
            job = layout.expert_job(number)
            if number in self._skipped or job in finished or not self._may_publish(job):
                continue
            unfinished = True
            found = leases.get(job)
            withdrawn = found is not None and found.record.manifest in self.remote.trust.current.withdrawn
            if found is not None and not withdrawn and (found.waiting or not found.free):
                continue
            options: dict[str, Any] = {
                "holder": self.name,
                "overrides": self._overrides_for(number),
                "authority": self.remote,
            }
            try:
                lease = Lease.acquire(self.store, job, self.duration, over=found, **options)
                if lease is not None and withdrawn:
                    lease.renew(manifest=None, checkpoint=None, images=0, published=0)
            except Refused as reason:  # hostile objects of one expert must not stop work on the others
                print(f"{job} is skipped: {reason}", flush=True)
                self._skipped.add(number)
                continue
            if lease is not None:
                print(f"{lease.job}: lease acquired", flush=True)
                return lease, True
        return None, unfinished

    def _may_publish(self, job: str) -> bool:
        """Return whether the root delegates this expert to this worker."""
        return self.remote.trust.current.signer_name(self.remote.key, "publish", layout.final(job)) is not None

    def _overrides_for(self, expert: int) -> dict[str, str]:
        """Return the contributor's settings as dotted overrides for this expert."""
        chosen = {f"experts.{expert}": self.objective, f"networks.{expert}": self.network}
        chosen |= {key: value for key, value in self.overrides.items() if key not in LOCAL_KEYS}
        overrides = {key: value for key, value in chosen.items() if value is not None}
        if overrides.get("train.precision", self.config.train.precision) == "auto":
            # Resolved here, so that another worker resumes in the same precision on another kind of device.
            overrides["train.precision"] = dtype_name(compute_dtype(device()))
        check_overrides(overrides)
        return overrides

    def _train_expert(self, lease: Lease, expert: int) -> bool:
        """Train one expert and publish it; return whether it is finished."""
        try:
            spec, resumed = self._open_job(lease, expert)
            announced = {"folder": str(self.folder), "expert": expert, "overrides": self.local | lease.record.overrides}
            options: dict[str, Any] = {"every": self.publish_every, "stop": self.stop, "resumed": resumed}
            with CheckpointPublisher(self.remote, lease, spec, **options) as publisher:
                self.processes.on_main(lambda: announced)
                manifest = train_job(spec, publisher)
            self._publish_expert(lease, spec, manifest, previous=publisher.previous)
            self._skipped.add(expert)
            return True
        except Requeue:
            if lease.lost:
                print(f"{lease.job}: the lease was lost; nothing was published", flush=True)
            else:
                self.stop.set()
                self._end_lease(lease, "released")
                print(f"{lease.job}: stopped at {lease.record.images:,} images; any worker can resume it", flush=True)
        except LeaseLost as lost:
            print(f"{lost}; nothing was published", flush=True)
        except (AtollError, RuntimeError, MemoryError) as error:
            self._skipped.add(expert)
            self.failed.append(lease.job)
            print(f"{lease.job} failed: {error}", flush=True)
            self._end_lease(lease, "failed", why=public_reason(error), failures=lease.record.failures + 1)
            if self.processes.size > 1:  # the others may be anywhere in the job
                raise
        return False

    def _end_lease(self, lease: Lease, state: LeaseState, **changes: Any) -> None:
        """End the lease, if this worker still holds it."""
        try:
            lease.end(state, **changes)
        except LeaseLost as lost:
            print(lost, flush=True)

    def _open_job(self, lease: Lease, expert: int) -> tuple[TrainSpec, set[str]]:
        """Download shards and the last published checkpoint; return the job and the keys of that checkpoint."""
        own = layout.shards(expert)
        fetch(self.store, own, self.remote.shards(expert), target=Artifact(self.folder, own))
        pull_start(self.remote, self.folder)
        overrides, pointer = lease.record.overrides, lease.record.checkpoint
        if pointer is not None:
            # Both come from another worker. Settings count only with a checkpoint that was made with them.
            try:
                check_overrides(overrides)
                spec = self._resolve(expert, overrides)
                return spec, self._fetch_checkpoint(pointer, spec)
            except AtollError as error:
                print(f"{lease.job}: the published checkpoint and its settings are ignored: {error}", flush=True)
        choice = self._overrides_for(expert)
        if (overrides, pointer) != (choice, None):
            lease.renew(overrides=choice, checkpoint=None, images=0, published=0)
        spec = self._resolve(expert, choice)
        remove_incompatible(spec)
        return spec, set()

    def _resolve(self, expert: int, overrides: dict[str, str]) -> TrainSpec:
        config = configuration.load(self.folder, {**LOCAL_OVERRIDES, **self.local, **overrides})
        check_choice(config, self.config)
        spec = resolve_job(self.folder, config, "expert", expert=expert)
        check_allowed(self.remote.policy, spec.network, spec.objective, based=isinstance(spec.network, BaseConfig))
        return spec

    def _fetch_checkpoint(self, pointer: str, spec: TrainSpec) -> set[str]:
        """Download the checkpoint of another worker and return its keys; refuse one that fails any check."""
        name, _, digest = pointer.partition("@")
        manifest = read_manifest(self.store, name, digest)
        check_checkpoint(manifest, spec)
        self.remote.read_signature("checkpoint", name, digest)
        remove_incompatible(spec)
        images = CHECKPOINT.parse(manifest, spec.job).images
        target = Artifact(self.folder, layout.checkpoint(spec.job, images))
        fetch(self.store, name, manifest, target=target)
        try:
            check_progress(target, spec)
        except AtollError:
            shutil.rmtree(target.folder)
            raise
        print(f"{spec.job}: resuming from {images:,} images", flush=True)
        return checkpoint_keys(name, manifest)

    def _publish_expert(self, lease: Lease, spec: TrainSpec, manifest: Manifest, *, previous: str | None) -> None:
        """Check the result like any contribution, upload it, and propose it; an admitter adds it to the snapshot."""
        checked = check_network(self.remote, lease.job, manifest, self.folder, measure=True)
        lease.check()
        name, digest, weights = spec.result.name, manifest.digest, checked.weights
        signature = self.remote.write_signature("publish", name, digest, previous=previous, weights=weights)
        upload(self.store, spec.result, manifest, name=name)
        # Checkpoints of all attempts at this job are useless once it is finished. They are listed while the lease is
        # held: checkpoints that appear after it has ended belong to another worker and stay.
        listed = self.store.entries(layout.checkpoints(spec.job))
        old = [entry.key for entry in listed if is_checkpoint_key(entry.key, spec.job)]
        admits = self.remote.trust.current.admits(self.remote.key)
        if admits:
            network = Network(manifest=digest, signature=signature, error=checked.error)
            self.remote.write_snapshot({lease.job: network})
        state: LeaseState = "done" if admits else "proposed"
        lease.end(state, manifest=digest, images=spec.settings.total_images, checkpoint=None, published=0)
        self.store.delete(old)
        print(f"{spec.job}: {'published' if admits else 'waits for admission'}", flush=True)


def follow(processes: DistContext) -> None:
    """Train each job that the main process announces, until it announces the end."""

    def listen() -> dict[str, Any] | None:
        return None

    with _stop_on_signals(threading.Event()):
        while (job := processes.on_main(listen)) is not None:
            if job:
                run = Path(job["folder"])
                config = configuration.load(run, LOCAL_OVERRIDES | job["overrides"])
                spec = resolve_job(run, config, "expert", expert=job["expert"])
                with suppress(Requeue):
                    train_job(spec)


def public_reason(error: BaseException) -> str:
    """Return why a job failed, for the lease, which everybody can read: no paths, and no texts of other libraries."""
    if not isinstance(error, AtollError):
        return f"{type(error).__name__}; the contributor has the details"
    return printable(re.sub(r"(?:[A-Za-z]:)?[~.]{0,2}[/\\\\][^\s;,:'\")]+", "…", first_line(error)), 200)


def check_overrides(overrides: dict[str, str]) -> None:
    """Raise an error unless the overrides set only objectives, networks and harmless keys of `train`."""
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        if section == "networks" and "base" in f"{name}{value}":
            raise AtollError(f"--{key} names a base model, and leases are public; set it in atoll.yaml of your folder")
        allowed = section == "train" and name.split(".")[0] in CONTRIBUTOR_KEYS
        if section not in ("experts", "networks") and not allowed and key not in LOCAL_KEYS:
            raise AtollError(
                f"--{key} cannot be set by contributors; possible: experts, networks, {', '.join(CONTRIBUTOR_KEYS)}"
            )


def check_checkpoint(manifest: Manifest, spec: TrainSpec) -> None:
    """Refuse a checkpoint that was not made by this job: from the same data, network, objective and settings."""
    try:
        images = CHECKPOINT.parse(manifest, spec.job).images
    except AtollError as error:
        raise Refused(f"it is not a checkpoint of this job: {error}") from error
    # A checkpoint of a finished job would be signed and published without a single step of training.
    if images >= spec.settings.total_images:
        raise Refused("it leaves nothing to train: it has seen all images of the job")
    if Manifest("", made_from(spec), {}, {}).to_json() != Manifest("", manifest.made_from, {}, {}).to_json():
        raise Refused("it was made with other settings")
    # In float32: the weights, two moments of AdamW, each EMA, and one more copy as a margin; 16 MB for all other state.
    room = (4 + spec.settings.averages) * 4 * parameter_count(spec.network) + (1 << 24)
    if sum(entry.size for entry in manifest.files.values()) > room:
        raise Refused(f"it is larger than the {room:,} bytes that the training state of this network takes")


def check_progress(checkpoint: Artifact, spec: TrainSpec) -> None:
    """Measure the weights of another worker's checkpoint as admission does, before this worker trains and signs them.

    The weights of its EMAs are measured when the expert is finished: one of them is the result.
    """
    task = build_task(spec)
    assert isinstance(task, ExpertTask)
    try:
        load_weights(checkpoint, task.network)
    except (CheckpointException, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise Refused(f"its weights cannot be read: {first_line(error)}") from error
    task.network.to(device()).eval()
    check_expert(task.expert(), task.shards, finished=False)


def remove_incompatible(spec: TrainSpec) -> None:
    """Delete local checkpoints and results of an earlier attempt with other settings."""
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
def _stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Set `stop` on the first Ctrl-C or SIGTERM; raise KeyboardInterrupt on the second Ctrl-C."""

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()
        print("stopping: saving and publishing a checkpoint first (press Ctrl-C again to skip this)", flush=True)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_worker(url: str, folder: Path | None, access: Access, **options: Any) -> Worker:
    """Open a worker for the run at a URL, with its local copy in `folder`."""
    store = Store.open(url)
    folder = folder or default_folder(url)
    remote = RemoteRun.open(store, folder, access)
    store.probe()
    # `shared_start` refuses a run whose start is not published yet.
    if remote.shared_start() is not None and options.get("network"):
        raise AtollError("--network: the experts of this run begin with its shared start, so they have its network")
    find_base(remote, folder)
    if options.get("network") and remote.config.text.encoder.startswith(BASE):
        raise AtollError("--network: all experts of this run are on its base model")
    worker = Worker(remote, folder, remote.config, **options)
    experts = range(remote.config.clusters.count)
    if not any(worker._may_publish(layout.expert_job(expert)) for expert in experts):
        raise AtollError(
            f"{url}: the root of the run does not list your key ({remote.key or 'none'}); the owner adds it with: "
            f"atoll trust RUN invite NAME {remote.key or 'KEY'}"
        )
    return worker
