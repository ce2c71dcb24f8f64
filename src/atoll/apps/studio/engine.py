"""Continuous batching: the images of all requests share one loop over denoising steps.

One thread owns the networks. Before every step it chooses at most `batch_size` images among all requests, whatever
their prompts, times and guidance scales. Images with the same model, routing and size share one forward pass; each
moves along its own times. A new request joins at the next step, and a finished or cancelled one leaves. An image does
not depend on the other images of its batch, up to float32 rounding.
"""

# One step of the engine (`run_step`):
#   1. drop requests that are to end, start requests that fit (encode conditions, draw noise), report queue positions;
#   2. choose B <= batch_size images over all requests, round robin (`choose_images`);
#   3. group them by batching key, and for each group of b images call the sampler once:
#      x (b, channels, height, width), t and t_next (b,), guidance scales (b,), condition rows (b,);
#   4. decode finished latents and previews, and post the events.
# Nothing of an image's result may depend on which images share its batch. Noise and random numbers of routing are
# therefore functions of (seed, image number, step), never of a shared generator.

import threading
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, zip_longest
from typing import TypeVar
from uuid import uuid4

import torch
from PIL import Image
from torch import Tensor

from atoll.apps.studio.condition_cache import Slot
from atoll.apps.studio.registry import LoadedModel
from atoll.apps.studio.schemas import ApiError, ImageSettings
from atoll.apps.studio.server_metrics import ServerMetrics
from atoll.core.device import dtype_name
from atoll.core.errors import AtollError
from atoll.core.sizes import Size
from atoll.ensemble import RoutingState, SamplerState, SampleSettings, parse
from atoll.ensemble.routing import Decision
from atoll.flow import rng
from atoll.flow.solvers import solver_times

# Weight of the past in the moving average of the rate (images times steps per second). It covers about the last five
# steps: short enough to follow a changed load, long enough to smooth single slow steps.
RATE_MOMENTUM = 0.8
# Retry-After while the server stops: a restart, including loading the models, takes some tens of seconds.
STOPPING_RETRY_SECONDS = 30.0
# Bounds of Retry-After for a full queue, and its value before the first step has been timed. Round numbers: a client
# should neither poll in a loop nor wait for minutes after the queue has emptied.
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS, FIRST_RETRY_SECONDS = 1.0, 60.0, 5.0

# Requests: what was asked for, the progress of each image, and the events for the client


@dataclass(frozen=True)
class GenerationRequest:
    """A checked request: all defaults are filled in and the model supports all values."""

    settings: SampleSettings
    prompt: str | None = None
    label: str | int | None = None
    num_images: int = 1
    cluster: int | None = None
    """Use only the expert of this cluster; the routing is `oracle`."""
    preview_every: int | None = None
    stream: bool = False
    size: Size | None = None
    """Size of the images in pixels; None is the default size of the model."""


@dataclass(frozen=True)
class Queued:
    """The request waits behind this many others; 0 starts with the next step."""

    position: int


@dataclass(frozen=True)
class StepDone:
    """All images of the request completed a step. The weights (images, experts) are those at time t."""

    step: int
    t: float
    weights: list[list[float]]
    previews: list[Image.Image] | None = None


@dataclass(frozen=True)
class ImageDone:
    """An image is finished."""

    index: int
    image: Image.Image
    settings: ImageSettings


@dataclass(frozen=True)
class RequestEnded:
    """The last event of a request. `status` is an HTTP status: 200 done, 499 cancelled, others failed."""

    status: int
    message: str = ""
    seconds: float = 0.0
    retry_after: float | None = None
    """Seconds after which a retry may succeed; None if a retry does not help."""


Event = Queued | StepDone | ImageDone | RequestEnded
# 499 is the status that nginx logs for a client that closed the connection; HTTP itself has none for this case.
DONE, INVALID, QUEUE_FULL, CANCELLED, FAILED, UNAVAILABLE = 200, 422, 429, 499, 500, 503


@dataclass(eq=False)
class ImageState:
    """One image between noise and data."""

    request: "RequestState"
    number: int
    x: Tensor
    """Current latent (channels, height, width)."""
    step: int = 0
    """Number of completed steps."""
    weights: list[list[float]] = field(default_factory=list)
    """Routing weights of the completed steps, by step and expert."""
    drawn: Tensor | None = None
    """One-hot vector (experts,) of its expert, for routings that keep one expert along the trajectory."""
    estimate: Tensor | None = None
    """Predicted final latent at the last step that needs a preview."""

    @property
    def finished(self) -> bool:
        """Whether all steps are completed."""
        return self.step == len(self.request.times) - 1

    @property
    def needs_preview(self) -> bool:
        """Whether the next step needs a preview. The last step needs none: the image itself follows."""
        every = self.request.generation.preview_every
        return every is not None and (self.step + 1) % every == 0 and self.step + 2 < len(self.request.times)


@dataclass(eq=False)
class RequestState:
    """One request in the engine. Only the engine's thread changes it, except for `cancel`."""

    generation: GenerationRequest
    model: LoadedModel
    post: Callable[[Event], None]
    id: str = field(default_factory=lambda: uuid4().hex)
    submitted_at: float = field(default_factory=time.monotonic)
    images: list[ImageState] = field(default_factory=list)
    slot: Slot | None = None
    """Cache slot of its condition; None until its first step."""
    position: int = 0
    reported_steps: int = 0
    """Steps whose events have been posted."""
    finished_images: int = 0
    ended: bool = False
    end_requested: RequestEnded | None = None
    """The event with which the engine ends it before the next step; None if it continues."""

    def __post_init__(self) -> None:
        """Compute the times t of the steps, from 1 (noise) to 0 (data): `steps + 1` values."""
        self.times = solver_times(self.generation.settings.steps)

    def cancel(self, end: RequestEnded = RequestEnded(CANCELLED, "cancelled")) -> None:  # noqa: B008 - it is frozen
        """Make the engine drop the request before its next step. Any thread may call this."""
        self.end_requested = self.end_requested or end

    @property
    def guidance_scale(self) -> float:
        """The guidance scale; 1 without a condition, where classifier-free guidance has no effect."""
        conditioned, settings = self.slot is not None and self.slot.key is not None, self.generation.settings
        return settings.guidance_scale if conditioned or settings.guidance == "autoguidance" else 1.0

    def unfinished(self) -> list[ImageState]:
        """Return its unfinished images, those with the fewest completed steps first."""
        return sorted((image for image in self.images if not image.finished), key=lambda image: image.step)

    @property
    def completed_steps(self) -> int:
        """Number of steps that all its images have completed."""
        return min((image.step for image in self.images), default=0)

    @property
    def preview_due(self) -> bool:
        """Whether the newest step that all images have completed needs a preview."""
        every, done = self.generation.preview_every, self.completed_steps
        return every is not None and self.reported_steps < done < self.generation.settings.steps and done % every == 0


def choose_images(requests: Sequence[RequestState], batch_size: int) -> list[ImageState]:
    """Return the images of the next step: the first of every request, then the second of every request, and so on.

    This round robin keeps a request for many images from delaying the others: a new request replaces the last image of
    an older one in the batch. An image that is left out keeps its state and only loses time.
    """
    rounds = zip_longest(*(request.unfinished() for request in requests))
    return list(islice((image for round_ in rounds for image in round_ if image is not None), batch_size))


@dataclass(eq=False)
class DecodeJob:
    """A latent to decode: a finished image, or a preview of one."""

    state: ImageState
    latent: Tensor
    finished: bool
    image: Image.Image | None = None

    @property
    def request(self) -> RequestState:
        """The request of the image."""
        return self.state.request


Part = TypeVar("Part", RequestState, ImageState, DecodeJob)


class Engine:
    """Accept requests from any thread and process them in one thread."""

    def __init__(self, batch_size: int, queue: int) -> None:
        self.batch_size, self.queue, self.metrics = batch_size, queue, ServerMetrics()
        self.failure: str | None = None
        self.closing = False
        """Whether it rejects new requests."""
        self._changed = threading.Condition()
        self._open: list[RequestState] = []
        self._rate = 0.0
        self._thread = threading.Thread(target=self._run, name="atoll-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended."""
        self._thread.join(seconds)

    @property
    def idle(self) -> bool:
        """Whether it has no requests."""
        return not self._open

    def submit(self, generation: GenerationRequest, model: LoadedModel, post: Callable[[Event], None]) -> RequestState:
        """Queue a request; the engine's thread calls `post` with each of its events."""
        request = RequestState(generation, model, post)
        with self._changed:
            if self.failure is not None:
                raise ApiError(UNAVAILABLE, self.failure)
            if self.closing:
                raise ApiError(UNAVAILABLE, "the server is stopping", retry_after=STOPPING_RETRY_SECONDS)
            if len(self._open) >= self.batch_size + self.queue:
                self.metrics.requests.labels("rejected").inc()
                # Estimate the seconds until one request finishes: remaining steps over the rate, divided by requests.
                seconds = FIRST_RETRY_SECONDS
                if self._rate:
                    left = sum(
                        open_.generation.num_images * (len(open_.times) - 1) - sum(image.step for image in open_.images)
                        for open_ in self._open
                    )
                    seconds = min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, left / self._rate / len(self._open)))
                message = f"the queue is full: {len(self._open)} requests are running or waiting; retry later"
                raise ApiError(QUEUE_FULL, message, retry_after=seconds)
            self._open.append(request)
            self.metrics.in_progress.set(len(self._open))
            request.position = max(0, len(self._open) - self.batch_size)
            post(Queued(request.position))
            self._changed.notify()
        return request

    def cancel(self, id: str) -> bool:
        """Drop a request at the next step; return whether it exists."""
        with self._changed:
            found = [request for request in self._open if request.id == id]
        for request in found:
            request.cancel()
        return bool(found)

    def close(self) -> None:
        """Reject new requests; the running and waiting ones are finished."""
        with self._changed:
            self.closing = True
            self._changed.notify()

    def cancel_all(self) -> None:
        """Close, and end all requests at the next step with the status 503."""
        with self._changed:
            for request in self._open:
                request.cancel(RequestEnded(UNAVAILABLE, "the server is stopping", retry_after=STOPPING_RETRY_SECONDS))
        self.close()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while self.run_step():
                    pass
        except BaseException as error:  # otherwise clients would wait for ever for a thread that has ended
            traceback.print_exc()
            with self._changed:
                self.failure = f"the engine failed: {type(error).__name__}: {error}"
                for request in self._open:
                    request.post(RequestEnded(UNAVAILABLE, self.failure))
                self._open.clear()

    def run_step(self) -> bool:
        """Run one step of the chosen images; return False when the engine is closed and has no requests."""
        with self._changed:
            self._changed.wait_for(lambda: self._open or self.closing)
            requests = list(self._open)

        # Drop requests that are to end.
        for request in requests:
            if request.end_requested is not None:
                self._end(request, request.end_requested)
        requests = [request for request in requests if not request.ended]

        # Start the requests that fit into the batch, and post new queue positions to the others.
        start = time.perf_counter()
        new = [request for request in requests[: self.batch_size] if request.slot is None]
        self._together(_begin, new, lambda request: (request.model, request.generation.size))
        for position, request in enumerate(requests[self.batch_size :], 1):
            if request.position != position:
                request.position = position
                request.post(Queued(position))
        self.metrics.queued.set(max(0, len(requests) - self.batch_size))

        # Advance the chosen images, and post what came of it.
        running = [request for request in requests[: self.batch_size] if not request.ended]
        chosen = choose_images(running, self.batch_size)
        self._together(_advance, chosen, _batching_key)
        self._report([image for image in chosen if not image.request.ended])

        # Record the size and duration of the step.
        seconds = time.perf_counter() - start
        self.metrics.batch_size.set(len(chosen))
        if chosen:
            self.metrics.steps.inc(len(chosen))
            self.metrics.step_seconds.observe(seconds)
            rate = len(chosen) / max(seconds, 1e-9)
            self._rate = RATE_MOMENTUM * self._rate + (1 - RATE_MOMENTUM) * rate if self._rate else rate
        with self._changed:
            return bool(self._open) or not self.closing

    def _report(self, images: Sequence[ImageState]) -> None:
        """Decode finished images and due previews, and post the events of the step."""
        requests = list(dict.fromkeys(image.request for image in images))
        jobs = [DecodeJob(image, image.x, True) for image in images if image.finished]
        jobs += [
            DecodeJob(image, image.estimate, False)
            for request in requests
            if request.preview_due
            for image in request.images
            if image.estimate is not None
        ]
        self._together(_decode, jobs, lambda job: (job.request.model, job.latent.shape))
        for request in requests:
            if not request.ended:
                self._post_events(request, [job for job in jobs if job.request is request])

    def _post_events(self, request: RequestState, jobs: Sequence[DecodeJob]) -> None:
        """Post the events of one request after a step; requests without a stream get no step events."""
        generation, model = request.generation, request.model
        previews = [job.image for job in jobs if not job.finished and job.image is not None]
        first, request.reported_steps = request.reported_steps, request.completed_steps
        for step in range(first, request.reported_steps) if generation.stream else ():
            weights = [image.weights[step] for image in request.images]
            request.post(StepDone(step + 1, request.times[step], weights, previews or None))
        for job in jobs:
            if not job.finished or job.image is None:
                continue
            request.finished_images += 1
            size = generation.size or model.sizes[0]
            settings = ImageSettings(
                prompt=generation.prompt, label=generation.label, number=job.state.number, model=model.name,
                width=size.width, height=size.height, cluster=generation.cluster,
                dtype=dtype_name(model.sampler.dtype), **asdict(generation.settings),
            )  # fmt: skip
            request.post(ImageDone(job.state.number, job.image, settings))
            # Attribute the image to the experts by their mean routing weight.
            self.metrics.images.labels(model.name).inc()
            for expert, shares in zip(model.ensemble.declarations, zip(*job.state.weights, strict=True), strict=True):
                self.metrics.expert_images.labels(expert.name).inc(sum(shares) / len(shares))
        if request.finished_images == generation.num_images:
            self._end(request, RequestEnded(DONE, "", time.monotonic() - request.submitted_at))

    def _together(
        self, work: Callable[[Sequence[Part]], None], parts: Sequence[Part], key: Callable[[Part], Hashable]
    ) -> None:
        """Run `work` for parts with equal keys together, in the order of each group's first part."""
        groups: dict[Hashable, list[Part]] = {}
        for part in parts:
            groups.setdefault(key(part), []).append(part)
        for group in groups.values():
            self._isolated(work, group)

    def _isolated(self, work: Callable[[Sequence[Part]], None], parts: Sequence[Part]) -> None:
        """Run `work` for several requests together; if it fails, run it for each alone and end only those that fail."""
        try:
            work(parts)
        except Exception as error:  # any error of one request must not reach the others
            requests = list(dict.fromkeys(_request_of(part) for part in parts))
            if len(requests) > 1:
                for request in requests:
                    self._isolated(work, [part for part in parts if _request_of(part) is request])
            elif isinstance(error, AtollError):
                self._end(requests[0], RequestEnded(INVALID, str(error)))
            else:
                traceback.print_exc()
                self._end(requests[0], RequestEnded(FAILED, f"the request failed: {type(error).__name__}: {error}"))

    def _end(self, request: RequestState, end: RequestEnded) -> None:
        request.ended = True
        with self._changed:
            self._open.remove(request)
            self.metrics.in_progress.set(len(self._open))
        if request.slot is not None:
            request.slot.release()
        # Free the latents now: requests and images refer to each other, so only a later garbage collection would.
        for image in request.images:
            image.x, image.estimate = image.x.new_empty(0), None
        self.metrics.requests.labels({DONE: "done", CANCELLED: "cancelled"}.get(end.status, "failed")).inc()
        if end.status == DONE:
            self.metrics.request_seconds.observe(end.seconds)
        request.post(end)


def _request_of(part: RequestState | ImageState | DecodeJob) -> RequestState:
    return part if isinstance(part, RequestState) else part.request


def _begin(requests: Sequence[RequestState]) -> None:
    """Assign noise and condition slots to requests for one model and size; their prompts are encoded together."""
    sampler, noises, size = requests[0].model.sampler, [], requests[0].generation.size
    for request in requests:
        # The noise is that of `Sampler.generate`: a function of the seed and the image's number.
        generation = request.generation
        latents = sampler.latent_size(size)
        noises.append(sampler.noise(generation.num_images, generation.settings.seed, size=latents))
    keys = [(request.generation.prompt, request.generation.label) for request in requests]
    slots = requests[0].model.condition_cache.acquire(keys, size)
    for request, slot, noise in zip(requests, slots, noises, strict=True):
        request.slot = slot
        request.images = [ImageState(request, number, x) for number, x in enumerate(noise)]


def _batching_key(image: ImageState) -> Hashable:
    """Return the batching key: images with equal keys share one forward pass."""
    request = image.request
    assert request.slot is not None
    settings = request.generation.settings
    return request.model, request.slot.pool, settings.routing, settings.guidance, image.x.shape


def _advance(images: Sequence[ImageState]) -> None:
    """Run one step of images with equal batching keys."""
    # No state changes before everything is computed: `_isolated` runs this again for single requests if it fails.
    first, requests = images[0].request, [image.request for image in images]
    settings, decisions = first.generation.settings, list[Decision]()

    # Clusters of routing by oracle (images,), uniform numbers of routings that draw experts (images,), and the experts
    # that images keep from earlier steps (images, experts); a zero row means that the image has none yet.
    clusters = [request.generation.cluster for request in requests if request.generation.cluster is not None]
    routing, numbers = parse(settings.routing), []
    for image in images if routing.draws else ():
        # As in `RoutingState.draw`: a function of seed, image number and step, so that the batch does not matter.
        seed, stream = image.request.generation.settings.seed, routing.stream(image.step)
        numbers.append(rng.uniform(1, seed=seed, stream=stream, first=image.number))
    known = next((image.drawn for image in images if image.drawn is not None), None)
    drawn = None
    if known is not None:
        drawn = torch.stack([torch.zeros_like(known) if image.drawn is None else image.drawn for image in images])

    state = SamplerState(
        torch.stack([image.x for image in images]),
        first.model.condition_cache.batch([request.slot for request in requests if request.slot is not None]),
        RoutingState(trace=decisions, drawn=drawn),
        torch.tensor(clusters) if len(clusters) == len(requests) else None,
        torch.cat(numbers) if numbers else None,
    )
    t = [image.request.times[image.step] for image in images]
    t_next = [image.request.times[image.step + 1] for image in images]
    # A scalar 1 skips the unconditional half of guidance for the whole batch. With a tensor, only the images whose
    # scale differs from 1 run it.
    scales = torch.tensor([request.guidance_scale for request in requests])
    guidance_scale = scales if bool((scales != 1).any()) else 1.0
    result = first.model.sampler.step(state, t, to=t_next, settings=settings, guidance_scale=guidance_scale)

    drawn, weights = state.routing.drawn, decisions[0].weights.tolist()
    for number, image in enumerate(images):
        if image.needs_preview:
            # With x_t = (1 - t) x_0 + t noise and v = noise - x_0, the predicted final latent is x_0 = x_t - t v.
            image.estimate = state.x[number] - t[number] * result.velocity[number]
        image.x = result.x[number]
        image.drawn = None if drawn is None else drawn[number]
        image.weights.append(weights[number])
        image.step += 1


def _decode(jobs: Sequence[DecodeJob]) -> None:
    """Decode latents of one model and size."""
    latents = torch.stack([job.latent for job in jobs])
    for job, image in zip(jobs, jobs[0].request.model.sampler.decode(latents), strict=True):
        job.image = image
