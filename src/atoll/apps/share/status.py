"""`atoll status`: the state of every job of a run, in a store or in a local folder."""

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from atoll.apps.share.lease_records import MAX_FAILURES, LeaseStatus, list_leases
from atoll.apps.share.remote_run import RemoteRun
from atoll.apps.share.store import Store
from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.artifacts import Artifact
from atoll.core.errors import AtollError
from atoll.core.manifests import EXPERT, ROUTER
from atoll.core.metrics_file import progress_of
from atoll.core.progress import duration

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
    run = store.path or Path(store.url)
    config, finished = (remote.config, remote.networks()) if remote else (configuration.load(run), {})
    # By the clock of this machine: measuring that of the store needs the right to write.
    found, lines = list_leases(store, authority=remote, now=time.time()), []
    numbers = range(config.clusters.count)
    # Few-step students of single experts are not shared.
    students = () if remote else tuple(map(layout.student_job, numbers))
    for job in (*map(layout.expert_job, numbers), *students, *layout.OTHERS):
        lease, ignored = found.leases.get(job), found.ignored.get(job)
        if remote:
            line = _shared_job(job, lease, done=job in finished)
        else:
            kind = cast(layout.JobKind, "expert" if layout.is_expert(job) else "student" if job in students else job)
            line = _local_job(run, job, lease, total=config.total_images(kind))
        if ignored:
            line = replace(line, why=f"{line.why} (ignored a record: {ignored})".strip())
        # A row of an optional job only if it was started.
        optional = job in (*layout.DENSE, *students) or (job == layout.START and not config.shared_start.flops_share)
        if not (optional and line.state == "missing"):
            lines.append(line)
    return lines


def _shared_job(job: str, lease: LeaseStatus | None, *, done: bool) -> JobStatus:
    """Return the status of a job of a shared run. The snapshot decides what is done."""
    if done:
        return JobStatus(job, "done", where=lease.record.holder if lease else "")
    return _leased(job, lease, waiting=lease.waiting) if lease else _not_begun(job)


def _local_job(run: Path, job: str, lease: LeaseStatus | None, *, total: int) -> JobStatus:
    """Return the status of a job of a local run. The manifest in its folder decides whether it is done."""
    result, current = Artifact(run, layout.final(job)), progress_of(run / job)
    try:
        if result.manifest() is not None:
            result.open(ROUTER if job == layout.ROUTER else EXPERT)
            holder, loss = lease.record.holder if lease else "", current.loss if current else None
            return JobStatus(job, "done", where=holder, loss=loss)
    except AtollError as reason:  # its manifest lists a file that is missing
        return JobStatus(job, "failed", why=str(reason))
    # A lease that ended as done does not replace the result: its folder may have been deleted since.
    if lease is not None and lease.record.state != "done":
        line = _leased(job, lease)
    elif current is None:
        return _not_begun(job)
    else:
        files = (run / job / name for name in (layout.PROGRESS_FILE, layout.METRICS_FILE))
        age = time.time() - max(file.stat().st_mtime for file in files if file.is_file())
        state, total = "running" if age < ACTIVE_SECONDS else "stale", current.total or total
        line = JobStatus(*(job, state, "this folder", current.images, total, current.images_per_second, None, age))
    if line.state != "running" or current is None:
        return line
    # The folder has newer numbers than the lease, which is renewed every 20 s.
    line = replace(line, images=current.images, rate=current.images_per_second, seconds_left=current.seconds_left)
    return replace(line, loss=current.loss, lr=current.lr)


def _not_begun(job: str) -> JobStatus:
    return JobStatus(job, "free" if layout.is_expert(job) else "missing")


def _leased(job: str, lease: LeaseStatus, *, waiting: bool = False) -> JobStatus:
    record, why = lease.record, lease.record.why
    if waiting:
        return JobStatus(job, "proposed", record.holder, record.images, record.total, loss=record.loss)
    state = {"held": "running", "released": "free", "refused": "free"}.get(record.state, record.state)
    state = "stale" if lease.expired else state
    if state == "failed" and record.failures >= MAX_FAILURES:
        why = f"given up after {record.failures} failures: {why}"
    running = state == "running"
    left = (record.total - record.images) / record.rate if running and record.rate > 0 else None
    given = (job, state, record.holder, record.images, record.total, record.rate, left, lease.age, why, record.loss)
    return JobStatus(*given, lr=record.lr if running else None)


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
