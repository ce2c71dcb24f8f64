"""Registry of loaded models. Models whose training finishes while the server runs are loaded without a restart.

A request keeps the `LoadedModel` that was current when it arrived, so an update never changes the networks of a running
request. The next request gets the new ones.
"""

import json
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from atoll.apps.studio.condition_cache import ConditionCache
from atoll.apps.studio.schemas import MAX_GUIDANCE_SCALE, MAX_STEPS, ApiError, LoadingInfo
from atoll.core import layout
from atoll.core.errors import AtollError
from atoll.core.layout import CONFIG_FILE
from atoll.core.options import QuantizedLoadOptions
from atoll.core.sizes import Size
from atoll.ensemble import Ensemble, Sampler, load, parse
from atoll.ensemble.memory_plan import plan_memory
from atoll.ensemble.sampler import draws_unconditioned
from atoll.nets.conditioning import OF_PROMPTS

# Seconds between two scans for trained networks. A scan without news reads only the modification times of a few files.
SCAN_SECONDS = 2.0
# Seconds that shutdown waits for a running scan. A download of weights may take much longer; its thread is a daemon,
# so the process can end without it.
STOP_SECONDS = 3.0
# Seconds between two checks for a stop signal while the server waits for the first scan: no noticeable delay.
POLL_SECONDS = 0.1
NAMES = ("experts", layout.STUDENTS, *layout.DENSE)
FileTimes = tuple[tuple[str, int], ...]
"""Paths and modification times of the files that make up a model."""


@dataclass(frozen=True)
class DefaultSettings:
    """Settings of requests that omit them, for runs without an evaluation."""

    # The guidance scale of `atoll sample` and half its steps, because people wait for these images.
    steps: int = 25
    guidance_scale: float = 4.0


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model with the networks that were current when it was loaded."""

    name: str
    sampler: Sampler
    condition_cache: ConditionCache
    sizes: tuple[Size, ...]
    """Sizes of its images in pixels, the default first."""
    routings: tuple[str, ...]
    """Routings that it supports, as choices for the web page."""
    default_routing: str | None
    """Routing of requests that set none; None if it has several experts and no way to route."""
    loaded_at: float = field(default_factory=time.time)

    @property
    def ensemble(self) -> Ensemble:
        return self.sampler.ensemble


class ModelRegistry:
    """The loaded models of a run or of an exported folder."""

    def __init__(
        self, source: str, options: QuantizedLoadOptions, *, batch_size: int = 32, routing: str = "top-1"
    ) -> None:
        self.source, self.options, self.batch_size, self.routing = source, options, batch_size, routing
        self.run = Path(source) if (Path(source) / CONFIG_FILE).is_file() else None
        """Folder of the run; None for an export."""
        self.first_scan_done = threading.Event()
        self.loading: LoadingInfo | None = None
        """The model that is being loaded now, if any."""
        self.load_errors: dict[str, str] = {}
        """Why a trained model could not be loaded, by model."""
        self.defaults = DefaultSettings()
        self._loaded: dict[str, LoadedModel] = {}
        self._signatures: dict[str, FileTimes] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="atoll-models", daemon=True)

    @property
    def name(self) -> str:
        """Name of the run: the last part of its path, or the name of an export on the hub."""
        return Path(self.source).resolve().name if Path(self.source).exists() else self.source

    def start(self) -> None:
        """Start the thread that loads models and scans for new ones."""
        self._thread.start()

    def wait_for_first_scan(self, seconds: float) -> None:
        """Wait until the first scan has loaded all trained models, a timeout, or a stop request."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._stop.is_set() and not self.first_scan_done.wait(POLL_SECONDS):
            pass

    def request_stop(self) -> None:
        """Stop scanning; return at once."""
        self._stop.set()

    def stop(self) -> None:
        """Stop scanning, and wait a few seconds for a running scan."""
        self.request_stop()
        self._thread.join(STOP_SECONDS)

    def loaded(self) -> Mapping[str, LoadedModel]:
        """Return the loaded models by name."""
        return {name: self._loaded[name] for name in NAMES if name in self._loaded}

    def get(self, name: str) -> LoadedModel:
        """Return a loaded model; raise ApiError if it is not loaded."""
        if name in self._loaded:
            return self._loaded[name]
        if not self.first_scan_done.is_set():
            raise ApiError(503, "the models are being loaded; retry later", retry_after=SCAN_SECONDS)
        if name in self.load_errors:
            raise ApiError(409, f"cannot load the model {name}: {self.load_errors[name]}", "model")
        available = ", ".join(self._loaded) or "none yet"
        raise ApiError(409, f"the model {name} is not trained; available models: {available}", "model")

    def scan(self) -> None:
        """Load every model that is new or has changed."""
        # First, because the page fills its form while models are being loaded.
        if self.run is not None:
            self.defaults = evaluated_settings(self.run)
        changed: dict[str, FileTimes] = {}
        for name in NAMES:
            with suppress(FileNotFoundError):  # a file was replaced at this moment; the next scan finds it
                signature = self._signature(name)
                if signature and self._signatures.get(name) != signature:
                    changed[name] = signature
        for position, (name, signature) in enumerate(changed.items(), 1):
            # The signature of a run has a file for each network, that of an export does not.
            networks = 0 if self.run is None else len(signature)
            self.loading = LoadingInfo(model=name, networks=networks, position=position, total=len(changed))
            try:
                self._loaded[name] = model = self._load(name)
                self._signatures[name] = signature
                self.load_errors.pop(name, None)
                self._announce(model)
            except Exception as error:  # a damaged model must not keep the others from being served
                message = str(error) if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
                # The error may be temporary (a signature that is still being written, a lack of memory), so every scan
                # tries again. It is printed once.
                if self.load_errors.get(name) != message:
                    print(f"atoll: cannot load the model {name}: {error}", file=sys.stderr, flush=True)
                self.load_errors[name] = message
        self.loading = None
        self.first_scan_done.set()

    def _announce(self, model: LoadedModel) -> None:
        sampler, count = model.sampler, len(model.ensemble.references)
        networks = f"{count} network{'s' if count > 1 else ''}"
        missing = f"; not trained yet: {', '.join(sampler.missing)}" if sampler.missing else ""
        memory = f"about {plan_memory(sampler, self.batch_size).total / 1e6:,.0f} MB at batch size {self.batch_size}"
        print(f"{model.name}: loaded {networks}, {memory}{missing}", file=sys.stderr, flush=True)

    def _watch(self) -> None:
        self.scan()
        while not self._stop.wait(SCAN_SECONDS):
            self.scan()

    def _signature(self, model: str) -> FileTimes:
        """Return the files of a model with their modification times; empty if it is not trained."""
        if self.run is None:
            return (("folder", 0),) if model == "experts" else ()
        jobs = [model]
        if model in ("experts", layout.STUDENTS):
            jobs = [job for job in layout.jobs(self.run) if layout.is_expert(job)]
            jobs = jobs if model == "experts" else layout.student_jobs(self.run)
            jobs += [layout.ROUTER] if trained(self.run, jobs) else []
        files = sorted(trained(self.run, jobs))
        return tuple((file.relative_to(self.run).as_posix(), file.stat().st_mtime_ns) for file in files)

    @torch.no_grad()
    def _load(self, name: str) -> LoadedModel:
        sampler = load(self.source, name, **vars(self.options))
        # Models with the same latents and text share one autoencoder and one text encoder, which saves their memory.
        for other in self._loaded.values():
            known, own = other.ensemble.declarations[0], sampler.ensemble.declarations[0]
            if (known.latents, known.text) == (own.latents, own.text):
                sampler.encoders = other.sampler.encoders
        ensemble = sampler.ensemble
        # Decoding and encoding once loads the autoencoder and the text encoder now, not in the first request.
        sampler.decode(torch.zeros(1, *ensemble.shape))
        if ensemble.conditioning & OF_PROMPTS:
            sampler.encode([""])
        routings = supported_routings(ensemble)
        default = routings[0] if routings else None
        with suppress(AtollError):
            check_routing(ensemble, self.routing)
            default = self.routing
        cache = ConditionCache(sampler, self.batch_size)
        return LoadedModel(name, sampler, cache, sampler.sizes, routings, default)


def trained(run: Path, jobs: Iterable[str]) -> list[Path]:
    """Return the manifests of those jobs of a run that have a finished network."""
    files = [run / layout.final(job) / layout.MANIFEST_FILE for job in jobs]
    return [file for file in files if file.is_file()]


def evaluated_settings(run: Path) -> DefaultSettings:
    """Return the settings of the last evaluation, whose metrics are known, if requests may use them."""
    file = run / layout.LATEST_EVALUATION
    models = json.loads(file.read_text(encoding="utf-8"))["models"] if file.is_file() else []
    protocols = [metrics["protocol"] for model in models for metrics in model.get("metrics", {}).values()]
    for protocol in protocols:
        if protocol["steps"] <= MAX_STEPS and 0 <= protocol["guidance_scale"] <= MAX_GUIDANCE_SCALE:
            return DefaultSettings(protocol["steps"], protocol["guidance_scale"])
    return DefaultSettings()


def has_router(ensemble: Ensemble) -> bool:
    """Return whether there is a router whose clusters include those of all experts."""
    if ensemble.router is None:
        return False
    known = set(ensemble.router.declaration.clusters)
    return all(expert.clusters[0] in known for expert in ensemble.declarations)


def has_nearest(ensemble: Ensemble) -> bool:
    """Return whether every expert has the density of its cluster, which routing `nearest` needs."""
    return all(reference.density is not None for reference in ensemble.references)


def supported_routings(ensemble: Ensemble) -> tuple[str, ...]:
    """Return routings that this ensemble supports, as choices for the web page."""
    if len(ensemble.references) == 1:
        return ("top-1",)
    # One or two examples of every strategy: the thresholds are typical values, and links may name any other.
    found: tuple[str, ...] = ()
    if has_router(ensemble):
        found = ("top-1", "top-2", "full", "threshold-0.2", "nucleus-0.9", "sample-1")
        # A router that ignores the prompt would draw an expert that may not fit the prompt, and never reconsider.
        found += () if draws_unconditioned(ensemble, "drawn") and ensemble.conditioning else ("drawn",)
    if has_nearest(ensemble):
        found += ("nearest",) if found else ("nearest", "nearest:top-2", "nearest:full")
    return found


def check_routing(ensemble: Ensemble, routing: str) -> None:
    """Raise AtollError if this ensemble does not support a routing."""
    sources = {rule.source for rule in parse(routing).rules}
    if len(ensemble.references) == 1:
        return
    if "given" in sources:
        raise AtollError("routing 'oracle' needs a cluster; choose an expert with `expert` instead")
    if "router" in sources and not has_router(ensemble):
        raise AtollError(f"routing {routing!r} needs a router trained for all experts; train one, or use 'nearest'")
    if "nearest" in sources and not has_nearest(ensemble):
        raise AtollError(f"routing {routing!r} needs the cluster densities of all experts; choose another routing")
