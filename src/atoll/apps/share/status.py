"""`atoll status`: the state of every job of a run, in a store or in a local folder."""

import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import cast

import yaml
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from atoll.apps.share.admit import waits_for_review
from atoll.apps.share.lease_records import MAX_FAILURES, PARALLEL_READS, LeaseStatus, list_leases
from atoll.apps.share.remote_run import RemoteRun
from atoll.apps.share.store import Store
from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.layout import CONFIG_FILE, MANIFEST_FILE
from atoll.core.manifests import EXPERT, ROUTER
from atoll.core.metrics_file import TAIL_BYTES, MetricsLine, parse_lines
from atoll.core.progress import duration
from atoll.verify.trust import Network
from atoll.verify.untrusted import Refused

# The duration of a lease, so that a job without one is called stale after the same time as a job with one.
ACTIVE_SECONDS = 120.0
"""A job without a lease is running if its metrics.jsonl was written within this many seconds, else stale."""
STYLES = {"done": "green", "running": "cyan", "proposed": "cyan", "stale": "yellow", "failed": "red"}


@dataclass(frozen=True)
class JobStatus:
    """State and progress of one job."""

    job: str
    state: str
    """done, running, stale (no recent activity), failed, proposed (waits for admission), free, or missing."""
    where: str = ""
    images: int = 0
    total: int = 0
    rate: float = 0.0
    seconds_left: float | None = None
    seen_seconds_ago: float | None = None
    why: str = ""
    loss: float | None = None
    lr: float | None = None


def status(store: Store, remote: RemoteRun | None = None) -> list[JobStatus]:
    """Return the status of every job of a shared run, or of a local run if `remote` is None. It only reads."""
    finished = remote.networks() if remote else None
    config = remote.config if remote else _local_config(store)
    # By the clock of this machine: measuring that of the store needs the right to write.
    found = list_leases(store, authority=remote, now=time.time())
    numbers = range(config.clusters.count)
    jobs = [layout.expert_job(number) for number in numbers]
    # Few-step students of single experts are not shared.
    students = [] if remote else [layout.student_job(number) for number in numbers]

    def line(job: str) -> JobStatus | None:
        lease_status, ignored = found.leases.get(job), found.ignored.get(job)
        try:
            kind = cast(layout.JobKind, "expert" if layout.is_expert(job) else "student" if job in students else job)
            made = _line(store, job, lease_status, finished=finished, total=config.total_images(kind))
        except Refused as reason:  # hostile objects of one job must not hide the status of the others
            made = JobStatus(job, "failed", why=str(reason))
        # The folder of a local run has newer numbers than the lease, which is renewed every 20 s.
        if finished is None and made.state in ("running", "done") and (current := _progress(store, job)):
            made = replace(made, loss=current.loss, lr=None if made.state == "done" else current.lr)
            if made.state == "running":
                rate, left = current.images_per_second, current.seconds_left
                made = replace(made, images=current.images, rate=rate, seconds_left=left)
        if made is not None and ignored:
            made = replace(made, why=f"{made.why} (ignored a record: {ignored})".strip())
        optional = job in (*layout.DENSE, *students) or (job == layout.START and not config.shared_start.flops_share)
        # A row of an optional job only if it was started.
        return None if optional and made and made.state == "missing" else made

    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        return [made for made in pool.map(line, (*jobs, *students, *layout.OTHERS)) if made is not None]


def _local_config(store: Store) -> configuration.Config:
    settings = store.read(CONFIG_FILE)
    if settings is None:
        raise AtollError(f"{store.url} holds no run: there is no {CONFIG_FILE}")
    return configuration.resolve(yaml.safe_load(settings) or {}, source=f"{store.url}/{CONFIG_FILE}")


def _line(
    store: Store, job: str, lease_status: LeaseStatus | None, *, finished: Mapping[str, Network] | None, total: int
) -> JobStatus:
    # In a shared run the snapshot decides what is finished; in a local run the manifest in the job's folder.
    done = job in finished if finished is not None else store.entry(f"{layout.final(job)}/{MANIFEST_FILE}")
    if done and finished is None and store.path is not None:
        try:
            Artifact(store.path, layout.final(job)).open(ROUTER if job == layout.ROUTER else EXPERT)
        except AtollError as reason:  # its manifest lists a file that is missing
            return JobStatus(job, "failed", why=str(reason))
    if done:
        return JobStatus(job, "done", where=lease_status.record.holder if lease_status else "")
    # In a local run, a lease that ended as done does not replace the result: its folder may have been deleted since.
    if lease_status is not None and (finished is not None or lease_status.record.state != "done"):
        return _leased_status(job, lease_status, shared=finished is not None)
    if finished is None and (line := _unleased_status(store, job, total)):
        return line
    return JobStatus(job, "free" if layout.is_expert(job) else "missing")


def _leased_status(job: str, lease_status: LeaseStatus, *, shared: bool) -> JobStatus:
    record = lease_status.record
    if shared and waits_for_review(lease_status):
        return JobStatus(job, "proposed", record.holder, record.images, record.total, loss=record.loss)
    state = {"held": "running", "released": "free", "refused": "free"}.get(record.state, record.state)
    if lease_status.expired:
        state = "stale"
    left = (record.total - record.images) / record.rate if state == "running" and record.rate > 0 else None
    why = record.why
    if state == "failed" and record.failures >= MAX_FAILURES:
        why = f"given up after {record.failures} failures: {why}"
    lr = record.lr if state == "running" else None
    return JobStatus(
        *(job, state, record.holder, record.images, record.total, record.rate, left, lease_status.age, why),
        loss=record.loss,
        lr=lr,
    )


def _progress(store: Store, job: str) -> MetricsLine | None:
    """Return the current state of a job of a local run; None if it has not begun."""
    lines = parse_lines(store.read(f"{job}/{layout.PROGRESS_FILE}") or b"")
    if not lines and (entry := store.entry(layout.metrics(job))) is not None:
        lines = parse_lines(b"".join(store.stream(entry.key, max(0, entry.size - TAIL_BYTES), entry.size)))
    return lines[-1] if lines else None


def _unleased_status(store: Store, job: str, total: int) -> JobStatus | None:
    """Return the status of a job without a lease from its metrics.jsonl, or None if it never started."""
    entry = store.entry(f"{job}/{layout.PROGRESS_FILE}") or store.entry(layout.metrics(job))
    if entry is None or (last := _progress(store, job)) is None:
        return None
    age = max(0.0, time.time() - entry.modified)
    state = "running" if age < ACTIVE_SECONDS else "stale"
    rate, total = last.images_per_second, last.total or total
    left = max(0.0, (total - last.images) / rate) if state == "running" and rate > 0 else None
    return JobStatus(job, state, "this folder", last.images, total, rate, left, age)


def as_table(lines: list[JobStatus], title: str) -> Table:
    """Return a table for a terminal of 80 columns, without empty columns."""
    # A job that nobody trains now is stopped, or not started.
    idle = {
        line.job: "stopped" if line.images else "not started" for line in lines if line.state in ("free", "missing")
    }
    hosts = [line.where.partition(" ")[0].rpartition(":")[0] or line.where for line in lines]
    elsewhere = any(host not in ("", "this folder", socket.gethostname()) for host in hosts)
    columns = {
        "job": [line.job for line in lines],
        "state": [f"[{STYLES.get(line.state, 'default')}]{idle.get(line.job, line.state)}[/]" for line in lines],
        "images": [f"{line.images / line.total:.0%} of {line.total:,}" if line.total else "" for line in lines],
        "images/s": [f"{line.rate:.1f}" if line.rate and line.state == "running" else "" for line in lines],
        "left": ["" if line.seconds_left is None else duration(line.seconds_left) for line in lines],
        "loss": ["" if line.loss is None else f"{line.loss:.4g}" for line in lines],
        "lr": ["" if line.lr is None else f"{line.lr:.1e}" for line in lines],
        "seen ago": [
            duration(line.seen_seconds_ago) if line.state == "stale" and line.seen_seconds_ago is not None else ""
            for line in lines
        ],
        "host": hosts if elsewhere else [],
        "why": [line.why[:200] for line in lines],
    }
    filled = {heading: cells for heading, cells in columns.items() if any(cells)}
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in filled:
        # The last columns get what the others leave.
        table.add_column(heading, no_wrap=heading not in ("host", "why"), overflow="fold")
    for row in zip(*filled.values(), strict=True):
        table.add_row(row[0], row[1], *map(escape, row[2:]))
    return table


def watch(store: Store, remote: RemoteRun | None, seconds: float) -> Iterator[list[JobStatus]]:
    """Yield the status repeatedly, every `seconds`."""
    while True:
        yield status(store, remote)
        time.sleep(seconds)
