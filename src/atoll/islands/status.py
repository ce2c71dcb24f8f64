"""`atoll status`: every job of a run, in a store or in a folder: done, running, stale, failed, waiting, free."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import yaml
from rich.markup import escape
from rich.table import Table

from atoll.core import config as configuration
from atoll.core import layout
from atoll.core.errors import AtollError
from atoll.core.layout import CONFIG_FILE, MANIFEST_FILE
from atoll.core.metrics_file import TAIL_BYTES, parse_lines
from atoll.core.untrusted import Refused
from atoll.islands.leases import MAX_FAILURES, READERS, Seen, survey
from atoll.islands.store import Store

ACTIVE_SECONDS = 120.0
"""A job in a folder without leases counts as running if its journal was written within this time."""
"""Bytes at the end of a journal that are read: some hundred lines, of which the last whole one is wanted."""
STYLES = {"done": "green", "running": "cyan", "proposed": "cyan", "stale": "yellow", "failed": "red"}


@dataclass(frozen=True)
class JobStatus:
    """How far one job is."""

    job: str
    state: str
    """done, running, stale (its holder is silent), failed, proposed (waits for admission), free, or missing."""
    where: str = ""
    images: int = 0
    total: int = 0
    rate: float = 0.0
    seconds_left: float | None = None
    seen_seconds_ago: float | None = None
    why: str = ""


def status(store: Store) -> list[JobStatus]:
    """Every job of the run."""
    settings = store.read(CONFIG_FILE)
    if settings is None:
        raise AtollError(f"{store.url} holds no run: there is no {CONFIG_FILE}")
    config = configuration.resolve(yaml.safe_load(settings) or {}, source=f"{store.url}/{CONFIG_FILE}")
    leases = survey(store)
    jobs = [layout.expert_job(expert) for expert in range(config.clusters.count)]
    with ThreadPoolExecutor(READERS) as pool:
        lines = pool.map(lambda job: _line(store, job, leases.get(job), config=config), (*jobs, *layout.OTHERS))
        return [line for line in lines if line is not None]


def _line(store: Store, job: str, seen: Seen | None, *, config: configuration.Config) -> JobStatus | None:
    try:
        return _line_of(store, job, seen, config=config)
    except Refused as reason:  # what stands in this job's place must not hide the others
        return JobStatus(job, "failed", why=str(reason))


def _line_of(store: Store, job: str, seen: Seen | None, *, config: configuration.Config) -> JobStatus | None:
    if store.entry(f"{layout.final(job)}/{MANIFEST_FILE}"):
        return JobStatus(job, "done", where=seen.record.holder if seen else "")
    if seen is not None:
        return _leased(job, seen)
    if store.path is not None and (line := _journal(store, job, config.train.total_images)):
        return line
    if job in layout.DENSE:
        return None  # nobody asked for it
    return JobStatus(job, "free" if layout.is_expert(job) else "missing")


def _leased(job: str, seen: Seen) -> JobStatus:
    record = seen.record
    state = {"held": "running", "released": "free", "refused": "free"}.get(record.state, record.state)
    if seen.expired:
        state = "stale"
    left = (record.total - record.images) / record.rate if state == "running" and record.rate > 0 else None
    why = record.why
    if state == "failed" and record.failures >= MAX_FAILURES:
        why = f"given up after {record.failures} failures: {why}"
    return JobStatus(job, state, record.holder, record.images, record.total, record.rate, left, seen.age, why)


def _journal(store: Store, job: str, total: int) -> JobStatus | None:
    """A job that trains in a folder without a lease, by its journal."""
    entry = store.entry(layout.metrics(job))
    if entry is None:
        return None
    lines = parse_lines(b"".join(store.stream(entry.key, max(0, entry.size - TAIL_BYTES), entry.size)))
    if not lines:
        return None
    last, age = lines[-1], max(0.0, time.time() - entry.modified)
    state = "running" if age < ACTIVE_SECONDS else "stale"
    rate, total = last.images_per_second, last.total or total
    left = max(0.0, (total - last.images) / rate) if state == "running" and rate > 0 else None
    return JobStatus(job, state, "this folder", last.images, total, rate, left, age)


def as_table(lines: list[JobStatus], title: str) -> Table:
    """For people: the columns in which anything is said."""
    columns = {
        "job": [line.job for line in lines],
        "state": [f"[{STYLES.get(line.state, 'default')}]{line.state}[/]" for line in lines],
        "where": [escape(line.where) for line in lines],
        "images": [f"{line.images:,} of {line.total:,}" if line.total else "" for line in lines],
        "a second": [f"{line.rate:.1f}" if line.rate else "" for line in lines],
        "left": [_span(line.seconds_left) for line in lines],
        "seen ago": [_span(line.seen_seconds_ago) for line in lines],
        "why": [escape(line.why[:200]) for line in lines],
    }
    said = {heading: cells for heading, cells in columns.items() if any(cells)}
    table = Table(title=title)
    for heading in said:
        table.add_column(heading, no_wrap=heading != "why")
    for row in zip(*said.values(), strict=True):
        table.add_row(*row)
    return table


def as_json(lines: list[JobStatus]) -> str:
    """For programs."""
    return json.dumps([asdict(line) for line in lines])


def watch(store: Store, seconds: float) -> Iterator[list[JobStatus]]:
    """The status again and again."""
    while True:
        yield status(store)
        time.sleep(seconds)


def _span(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
