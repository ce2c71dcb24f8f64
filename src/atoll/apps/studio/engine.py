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
from dataclasses import dataclass
from typing import TypeVar

import torch
from PIL import Image
from torch import Tensor

from atoll.apps.studio.metrics import Metrics
from atoll.apps.studio.registry import LoadedModel
from atoll.apps.studio.request_state import (
    CANCELLED,
    DONE,
    FAILED,
    INVALID,
    QUEUE_FULL,
    UNAVAILABLE,
    Event,
    GenerationRequest,
    ImageDone,
    ImageState,
    Queued,
    RequestEnded,
    RequestState,
    choose_images,
)
from atoll.apps.studio.schemas import ApiError
from atoll.core.errors import AtollError
from atoll.ensemble import RoutingState, SamplerState, parse
from atoll.ensemble.routing import Decision
from atoll.flow import rng

# Weight of the past in the moving average of the rate (images times steps per second). It covers about the last five
# steps: short enough to follow a changed load, long enough to smooth single slow steps.
RATE_MOMENTUM = 0.8
# Retry-After while the server stops: a restart, including loading the models, takes some tens of seconds.
STOPPING_RETRY_SECONDS = 30.0
# Bounds of Retry-After for a full queue, and its value before the first step has been timed. Round numbers: a client
# should neither poll in a loop nor wait for minutes after the queue has emptied.
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS, FIRST_RETRY_SECONDS = 1.0, 60.0, 5.0
OUTCOMES = {DONE: "done", CANCELLED: "cancelled"}


Part = TypeVar("Part")


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


class Engine:
    """Accept requests from any thread and process them in one thread."""

    def __init__(self, batch_size: int, queue: int) -> None:
        self.batch_size, self.queue, self.metrics = batch_size, queue, Metrics()
        self.failure: str | None = None
        self._changed = threading.Condition()
        self._open: list[RequestState] = []
        self._closing = False
        self._rate = 0.0
        self._thread = threading.Thread(target=self._run, name="atoll-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, generation: GenerationRequest, model: LoadedModel, post: Callable[[Event], None]) -> RequestState:
        """Queue a request; the engine's thread calls `post` with each of its events."""
        request = RequestState(generation, model, post)
        with self._changed:
            if self.failure is not None:
                raise ApiError(UNAVAILABLE, self.failure)
            if self._closing:
                raise ApiError(UNAVAILABLE, "the server is stopping", retry_after=STOPPING_RETRY_SECONDS)
            if len(self._open) >= self.batch_size + self.queue:
                self.metrics.requests.labels("rejected").inc()
                message = f"the queue is full: {len(self._open)} requests are running or waiting; retry later"
                raise ApiError(QUEUE_FULL, message, retry_after=self._retry_after())
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
            self._closing = True
            self._changed.notify()

    def cancel_all(self) -> None:
        """Close, and end all requests at the next step with the status 503."""
        with self._changed:
            for request in self._open:
                request.cancel(RequestEnded(UNAVAILABLE, "the server is stopping", retry_after=STOPPING_RETRY_SECONDS))
        self.close()

    @property
    def closing(self) -> bool:
        """Whether it rejects new requests."""
        return self._closing

    @property
    def idle(self) -> bool:
        """Whether it has no requests."""
        return not self._open

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended."""
        self._thread.join(seconds)

    def _retry_after(self) -> float:
        """Estimate the seconds until one request finishes: remaining steps over the rate, divided by the requests."""
        if not self._rate:
            return FIRST_RETRY_SECONDS
        left = sum(request.steps_left for request in self._open)
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, left / self._rate / len(self._open)))

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
            self._changed.wait_for(lambda: self._open or self._closing)
            requests = list(self._open)
        for request in requests:
            if request.end_requested is not None:
                self._end(request, request.end_requested)
        requests = [request for request in requests if not request.ended]
        start = time.perf_counter()
        self._start_requests(requests)
        running = [request for request in requests[: self.batch_size] if not request.ended]
        chosen = choose_images(running, self.batch_size)
        for group in _grouped(chosen, _batching_key):
            self._isolated(self._advance, group, _request_of)
        self._report([image for image in chosen if not image.request.ended])
        self._record_step(chosen, time.perf_counter() - start)
        with self._changed:
            return bool(self._open) or not self._closing

    def _start_requests(self, requests: Sequence[RequestState]) -> None:
        """Start the requests that fit into the batch, and post new queue positions to the others."""
        new = [request for request in requests[: self.batch_size] if request.slot is None]
        for group in _grouped(new, lambda request: request.model):
            self._isolated(self._begin, group, lambda request: request)
        for position, request in enumerate(requests[self.batch_size :], 1):
            if request.position != position:
                request.position = position
                request.post(Queued(position))
        self.metrics.queued.set(max(0, len(requests) - self.batch_size))

    def _begin(self, requests: Sequence[RequestState]) -> None:
        """Assign noise and condition slots to requests for one model; their prompts are encoded together."""
        # The noise is that of `Sampler.generate`: a function of the seed and the image's number.
        noises = [_noise(request) for request in requests]
        keys = [(request.generation.prompt, request.generation.label) for request in requests]
        slots = requests[0].model.condition_cache.acquire(keys)
        for request, slot, noise in zip(requests, slots, noises, strict=True):
            request.slot = slot
            request.images = [ImageState(request, number, x) for number, x in enumerate(noise)]

    def _advance(self, images: Sequence[ImageState]) -> None:
        """Run one step of images with equal batching keys."""
        # No state changes before everything is computed: `_isolated` runs this again for single requests if it fails.
        first, requests = images[0].request, [image.request for image in images]
        decisions: list[Decision] = []
        state = SamplerState(
            torch.stack([image.x for image in images]),
            first.model.condition_cache.batch([request.slot for request in requests if request.slot is not None]),
            RoutingState(trace=decisions, drawn=_drawn_experts(images)),
            _oracle_clusters(requests),
            _uniform_numbers(images),
        )
        t = [image.request.times[image.step] for image in images]
        t_next = [image.request.times[image.step + 1] for image in images]
        # A scalar 1 skips the unconditional half of guidance for the whole batch. With a tensor, only the images whose
        # scale differs from 1 run it.
        scales = torch.tensor([request.guidance_scale for request in requests])
        guidance_scale = scales if bool((scales != 1).any()) else 1.0
        settings = first.generation.settings
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
        for group in _grouped(jobs, lambda job: (job.request.model, job.latent.shape)):
            self._isolated(_decode, group, _request_of)
        for request in requests:
            if not request.ended:
                self._post_events(request, [job for job in jobs if job.request is request])

    def _post_events(self, request: RequestState, jobs: Sequence[DecodeJob]) -> None:
        """Post the events of one request after a step."""
        previews = [job.image for job in jobs if not job.finished and job.image is not None]
        for step in request.take_unreported_steps():
            request.post(request.step_event(step, previews or None))
        for job in jobs:
            if job.finished and job.image is not None:
                request.finished_images += 1
                number = job.state.number
                request.post(ImageDone(number, job.image, request.image_settings(number)))
                self._count_image(job.state)
        if request.finished_images == request.generation.num_images:
            self._end(request, RequestEnded(DONE, "", time.monotonic() - request.submitted_at))

    def _isolated(
        self,
        work: Callable[[Sequence[Part]], None],
        parts: Sequence[Part],
        request_of: Callable[[Part], RequestState],
    ) -> None:
        """Run `work` for several requests together; if it fails, run it for each alone and end only those that fail."""
        try:
            work(parts)
        except Exception as error:  # any error of one request must not reach the others
            requests = list(dict.fromkeys(request_of(part) for part in parts))
            if len(requests) > 1:
                for request in requests:
                    self._isolated(work, [part for part in parts if request_of(part) is request], request_of)
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
        request.release_latents()
        self.metrics.requests.labels(OUTCOMES.get(end.status, "failed")).inc()
        if end.status == DONE:
            self.metrics.request_seconds.observe(end.seconds)
        request.post(end)

    def _count_image(self, image: ImageState) -> None:
        """Count a finished image, and attribute it to the experts by their mean routing weight."""
        model = image.request.model
        self.metrics.images.labels(model.name).inc()
        for expert, weights in zip(model.ensemble.experts, zip(*image.weights, strict=True), strict=True):
            self.metrics.expert_images.labels(expert.name).inc(sum(weights) / len(weights))

    def _record_step(self, chosen: Sequence[ImageState], seconds: float) -> None:
        """Record the size and duration of a step."""
        self.metrics.batch_size.set(len(chosen))
        if chosen:
            self.metrics.steps.inc(len(chosen))
            self.metrics.step_seconds.observe(seconds)
            rate = len(chosen) / max(seconds, 1e-9)
            self._rate = RATE_MOMENTUM * self._rate + (1 - RATE_MOMENTUM) * rate if self._rate else rate


def _decode(jobs: Sequence[DecodeJob]) -> None:
    """Decode latents of one model and size."""
    latents = torch.stack([job.latent for job in jobs])
    for job, image in zip(jobs, jobs[0].request.model.sampler.decode(latents), strict=True):
        job.image = image


def _noise(request: RequestState) -> Tensor:
    generation, sampler = request.generation, request.model.sampler
    size = sampler.latent_size(generation.size)
    return sampler.noise(generation.num_images, generation.settings.seed, size=size)


def _request_of(part: "ImageState | DecodeJob") -> RequestState:
    return part.request


def _batching_key(image: ImageState) -> Hashable:
    """Return the batching key: images with equal keys share one forward pass."""
    request = image.request
    assert request.slot is not None
    return request.model, request.slot.pool, request.generation.settings.routing, image.x.shape


def _grouped(parts: Sequence[Part], key: Callable[[Part], Hashable]) -> list[list[Part]]:
    """Group parts by key, in the order of each group's first part."""
    groups: dict[Hashable, list[Part]] = {}
    for part in parts:
        groups.setdefault(key(part), []).append(part)
    return list(groups.values())


def _oracle_clusters(requests: Sequence[RequestState]) -> Tensor | None:
    """Return the cluster of each image (images,) for routing by oracle; None for other routings."""
    clusters = [request.generation.cluster for request in requests if request.generation.cluster is not None]
    return torch.tensor(clusters) if len(clusters) == len(requests) else None


def _uniform_numbers(images: Sequence[ImageState]) -> Tensor | None:
    """Return the uniform numbers (images,) of routings that draw experts; None for other routings."""
    routing = parse(images[0].request.generation.settings.routing)
    if not routing.draws:
        return None
    # As in `RoutingState.draw`: a function of seed, image number and step, so that the batch does not matter.
    numbers = [
        rng.uniform(
            1,
            seed=image.request.generation.settings.seed,
            stream=routing.stream(image.step),
            first=image.number,
        )
        for image in images
    ]
    return torch.cat(numbers)


def _drawn_experts(images: Sequence[ImageState]) -> Tensor | None:
    """Return the experts (images, experts) that earlier steps drew, as in `RoutingState.drawn`; None if none did."""
    known = next((image.drawn for image in images if image.drawn is not None), None)
    if known is None:
        return None
    # A zero row means that the image has not drawn an expert yet.
    return torch.stack([torch.zeros_like(known) if image.drawn is None else image.drawn for image in images])
