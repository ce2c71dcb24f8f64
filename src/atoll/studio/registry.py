"""The models of a run, opened; those that training finishes while the server runs are opened when they are there.

A request keeps the edition of its model that was there when it came, so nothing changes under its hands; the next
request gets the new one.
"""

import json
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from atoll.core import layout
from atoll.core.errors import AtollError
from atoll.core.layout import CONFIG_FILE
from atoll.ensemble import Ensemble, Sampler, load, parse
from atoll.ensemble.sampler import draws_unconditioned
from atoll.studio.condition_cache import Conditions
from atoll.studio.schemas import GUIDANCE, STEPS, RefusalError

LOOK_EVERY = 2.0
"""Seconds between two looks at what training has finished."""
LAST_LOOK = 3.0
"""Seconds that a look may still take when everything ends."""
SLICE = 0.1
NAMES = ("experts", "monolith", "student")
Signature = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Opening:
    """How models are opened."""

    batch_size: int = 32
    max_loaded_experts: int | None = None
    dtype: str = "float32"
    device: str | None = None
    quantize: str | None = None
    routing: str = "top-1"


@dataclass(frozen=True)
class Usual:
    """Settings of requests that say nothing of them."""

    steps: int = 25
    guidance_scale: float = 4.0


@dataclass(frozen=True, eq=False)
class Edition:
    """A model as it was when it was opened."""

    model: str
    sampler: Sampler
    conditions: Conditions
    size: tuple[int, int]
    """Height and width of its pictures, in pixels."""
    routings: tuple[str, ...]
    """Ways of routing that work here, for people to choose from."""
    routing: str | None
    """The one for requests that name none."""

    @property
    def ensemble(self) -> Ensemble:
        """The networks."""
        return self.sampler.ensemble


class Models:
    """What a run, or an exported folder, has to offer."""

    def __init__(self, source: str, opening: Opening) -> None:
        self.source, self.opening = source, opening
        self.run = Path(source) if (Path(source) / CONFIG_FILE).is_file() else None
        self.looked = threading.Event()
        """Set after the first look."""
        self.trouble: dict[str, str] = {}
        """Why a model that is there could not be opened."""
        self.usual = Usual()
        self._editions: dict[str, Edition] = {}
        self._seen: dict[str, Signature] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="atoll-models", daemon=True)

    @property
    def name(self) -> str:
        """The last part of where it is."""
        return Path(self.source).resolve().name if Path(self.source).exists() else self.source

    def start(self) -> None:
        """Open what is there, and look again every few seconds."""
        self._thread.start()

    def await_first(self, seconds: float) -> None:
        """Wait until all that is there has been opened, but no longer than this, nor when it is to end."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._stop.is_set() and not self.looked.wait(SLICE):
            pass

    def cease(self) -> None:
        """Look no more."""
        self._stop.set()

    def stop(self) -> None:
        """Look no more, and let a look that is going on end if it soon does: a download may take long."""
        self.cease()
        self._thread.join(LAST_LOOK)

    def editions(self) -> Mapping[str, Edition]:
        """The newest edition of every model that is there."""
        return {name: self._editions[name] for name in NAMES if name in self._editions}

    def edition(self, model: str) -> Edition:
        """The newest edition of a model."""
        if model in self._editions:
            return self._editions[model]
        if not self.looked.is_set():
            raise RefusalError(503, "the models are just being opened", retry_after=LOOK_EVERY)
        if model in self.trouble:
            raise RefusalError(409, f"the model {model} cannot be opened: {self.trouble[model]}", "model")
        there = ", ".join(self._editions) or "none yet"
        raise RefusalError(409, f"the model {model} is not finished; models that are there: {there}", "model")

    def look(self) -> None:
        """Open every model that is new or has changed."""
        for model in NAMES:
            try:
                signature = self._signature(model)
                if signature and self._seen.get(model) != signature:
                    self._editions[model] = edition = self._open(model)
                    self._seen[model] = signature
                    self.trouble.pop(model, None)
                    print(f"{model}: {_summary(edition, self.opening.batch_size)}", file=sys.stderr, flush=True)
            except Exception as error:  # whatever is wrong with files of a run, its other models can be served
                trouble = str(error) if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
                if self.trouble.get(model) != trouble:  # it may pass, so it is tried again; it is told once
                    print(f"atoll: the model {model} cannot be opened: {error}", file=sys.stderr, flush=True)
                self.trouble[model] = trouble
        if self.run is not None:
            self.usual = usual_settings(self.run)
        self.looked.set()

    def _watch(self) -> None:
        self.look()
        while not self._stop.wait(LOOK_EVERY):
            self.look()

    def _signature(self, model: str) -> Signature:
        """Which files make up a model, and when they were written; empty if it is not there."""
        if self.run is None:
            return (("folder", 0),) if model == "experts" else ()
        jobs = [job for job in layout.jobs(self.run) if layout.is_expert(job)] if model == "experts" else [model]
        jobs = [job for job in jobs if self._manifest(job).is_file()]
        if model == "experts" and jobs and self._manifest(layout.ROUTER).is_file():
            jobs.append(layout.ROUTER)
        files = sorted(self._manifest(job) for job in jobs)
        return tuple((file.relative_to(self.run).as_posix(), file.stat().st_mtime_ns) for file in files)

    def _manifest(self, job: str) -> Path:
        assert self.run is not None
        return self.run / layout.final(job) / layout.MANIFEST_FILE

    @torch.no_grad()
    def _open(self, model: str) -> Edition:
        how = self.opening
        sampler = load(
            self.source,
            model,
            max_loaded_experts=how.max_loaded_experts,
            dtype=how.dtype,
            device=how.device,
            quantize=how.quantize,
        )
        for other in self._editions.values():  # one text encoder and one autoencoder for all that have the same
            known, own = other.ensemble.experts[0], sampler.ensemble.experts[0]
            if (known.latents, known.text) == (own.latents, own.text):
                sampler.encoders = other.sampler.encoders
        ensemble = sampler.ensemble
        image = sampler.decode(torch.zeros(1, *ensemble.shape))[0]
        if ensemble.conditioning & {"text", "pooled"}:
            sampler.encode([""])
        routings = routings_of(ensemble)
        wanted = how.routing if _works(ensemble, how.routing) else None
        first = routings[0] if routings else None
        conditions = Conditions(sampler, how.batch_size)
        return Edition(model, sampler, conditions, (image.height, image.width), routings, wanted or first)


def _summary(edition: Edition, batch: int) -> str:
    """What was opened, in a line."""
    sampler, count = edition.sampler, len(edition.ensemble.members)
    networks = f"{count} network{'s' if count > 1 else ''}"
    missing = f"; not there yet: {', '.join(sampler.missing)}" if sampler.missing else ""
    memory = sampler.plan(batch).total / 1e6
    return f"{networks}, about {memory:,.0f} MB for {batch} pictures at once{missing}"


def usual_settings(run: Path) -> Usual:
    """Those of the last evaluation, whose figures are known, if there was one and they are possible here."""
    file = run / layout.LATEST_EVALUATION
    found = json.loads(file.read_text(encoding="utf-8"))["models"] if file.is_file() else []
    protocols = [figures["protocol"] for model in found for figures in model.get("metrics", {}).values()]
    for told in protocols:
        if told["steps"] <= STEPS and 0 <= told["guidance_scale"] <= GUIDANCE:
            return Usual(told["steps"], told["guidance_scale"])
    return Usual()


def has_router(ensemble: Ensemble) -> bool:
    """Whether there is a router that knows all experts."""
    if ensemble.router is None:
        return False
    known = set(ensemble.router.declaration.clusters)
    return all(expert.clusters[0] in known for expert in ensemble.experts)


def has_nearest(ensemble: Ensemble) -> bool:
    """Whether every expert tells how its cluster is distributed."""
    return all(member.density is not None for member in ensemble.members)


def routings_of(ensemble: Ensemble) -> tuple[str, ...]:
    """Ways of routing to choose from."""
    if len(ensemble.members) == 1:
        return ("top-1",)
    found: tuple[str, ...] = ()
    if has_router(ensemble):
        found = ("top-1", "top-2", "full", "threshold-0.2", "nucleus-0.9", "sample-1")
        found += () if draws_unconditioned(ensemble, "drawn") and ensemble.conditioning else ("drawn",)
    if has_nearest(ensemble):
        found += ("nearest",) if found else ("nearest", "nearest:top-2", "nearest:full")
    return found


def check_routing(ensemble: Ensemble, routing: str) -> None:
    """Refuse a routing that this ensemble cannot do."""
    sources = {rule.source for rule in parse(routing).rules}
    if len(ensemble.members) == 1:
        return
    if "given" in sources:
        raise AtollError("routing by oracle needs a cluster: say which expert shall paint with `expert`")
    if "router" in sources and not has_router(ensemble):
        raise AtollError(f"routing {routing!r} needs a router that knows all experts, and there is none; try 'nearest'")
    if "nearest" in sources and not has_nearest(ensemble):
        raise AtollError(f"routing {routing!r} needs experts that tell how their clusters are distributed")


def _works(ensemble: Ensemble, routing: str) -> bool:
    try:
        check_routing(ensemble, routing)
    except AtollError:
        return False
    return True
