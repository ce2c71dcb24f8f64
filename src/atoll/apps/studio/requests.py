"""Check requests, and turn the engine's events into responses and event streams."""

import asyncio
import base64
import json
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from PIL import Image
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from atoll.apps.studio.registry import LoadedModel, ModelRegistry, check_routing
from atoll.apps.studio.request_state import (
    CANCELLED,
    DONE,
    Event,
    GenerationRequest,
    ImageDone,
    Queued,
    RequestEnded,
    RequestState,
    StepDone,
)
from atoll.apps.studio.schemas import (
    ApiError,
    DoneEvent,
    FailedEvent,
    GeneratedImage,
    ImageEvent,
    ImageSettings,
    ImagesRequest,
    ImagesResponse,
    QueuedEvent,
    StepEvent,
    StreamEvent,
)
from atoll.core.errors import AtollError
from atoll.core.sizes import Size
from atoll.ensemble import Ensemble, Settings
from atoll.ensemble.images import to_png

# Seconds without an event after which a stream sends a comment. Many proxies close idle connections after 60 s.
HEARTBEAT_SECONDS = 10.0
# Seconds that a write to a stream may block because its client does not read. Then the request is cancelled.
SEND_TIMEOUT_SECONDS = 60.0
# Seconds between two checks whether the client of a plain request is still connected. An abandoned request costs the
# others about this much computation.
DISCONNECT_CHECK_SECONDS = 0.5
# PNG compression runs outside the event loop. Two long-lived threads suffice and keep the memory constant: the
# allocator keeps an arena per thread, so a pool that grows with the load would hold on to memory.
ENCODERS = ThreadPoolExecutor(2, thread_name_prefix="atoll-png")
# Digits of routing weights in JSON. Batches of different sizes agree to about three digits, so more are noise.
WEIGHT_DIGITS = 5


def check_request(request: ImagesRequest, models: ModelRegistry) -> tuple[GenerationRequest, LoadedModel]:
    """Return the request with defaults filled in, and its model; raise ApiError if the model does not support it."""
    model = models.get(request.model)
    conditioning = model.ensemble.conditioning
    size = _size(request, model)
    if request.prompt is not None and not conditioning & {"text", "pooled"}:
        raise ApiError(422, "this model was trained without text and takes no prompts", "prompt")
    if request.label is not None:
        if "label" not in conditioning:
            raise ApiError(422, "this model was trained without classes and takes no labels", "label")
        with _errors_of_field("label"):
            model.sampler.class_number(request.label)
    defaults = models.defaults
    steps = defaults.steps if request.steps is None else request.steps
    guidance_scale = defaults.guidance_scale if request.guidance_scale is None else request.guidance_scale
    settings = Settings(steps, guidance_scale, seed=request.seed, routing=_routing(request, model))
    generation = GenerationRequest(
        settings, request.prompt, request.label, request.num_images, request.expert, size=size
    )
    if request.stream:
        generation = replace(generation, preview_every=request.preview_every, stream=True)
    return generation, model


def _size(request: ImagesRequest, model: LoadedModel) -> Size:
    """Return the size of the images: one of the sizes of the training images. Any other could be very large."""
    if request.width is None and request.height is None:
        return model.sizes[0]
    if request.width is None or request.height is None:
        missing = "width" if request.width is None else "height"
        raise ApiError(422, "give both width and height, or neither", missing)
    if (size := Size(request.height, request.width)) not in model.sizes:
        known = ", ".join(map(str, model.sizes))
        raise ApiError(422, f"this model generates images of {known} pixels (width x height)", "width")
    return size


def _routing(request: ImagesRequest, model: LoadedModel) -> str:
    """Return the routing of a request; a single expert is routing by oracle."""
    if request.expert is not None:
        known = expert_numbers(model.ensemble)
        if request.model != "experts" or request.expert not in known:
            available = ", ".join(map(str, known)) if request.model == "experts" else f"none in the {request.model}"
            raise ApiError(422, f"there is no expert {request.expert}; available experts: {available}", "expert")
        return "oracle"
    routing = request.routing or model.default_routing
    if routing is None:
        raise ApiError(409, "there are several experts and no router yet; choose one expert with `expert`")
    with _errors_of_field("routing"):
        check_routing(model.ensemble, routing)
    return routing


def expert_numbers(ensemble: Ensemble) -> list[int]:
    """Return the numbers of the experts, which are those of their clusters, in the order of the routing weights."""
    return [expert.clusters[0] for expert in ensemble.experts]


@contextmanager
def _errors_of_field(field: str) -> Iterator[None]:
    """Turn errors of the library into error responses that name a field."""
    try:
        yield
    except AtollError as error:
        raise ApiError(422, str(error), field) from error


class EventQueue:
    """Events of one request, put by the engine's thread and read by the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._not_empty = asyncio.Event()

    def put(self, event: Event) -> None:
        """Append an event, from any thread."""
        self._loop.call_soon_threadsafe(self._append, event)

    async def get(self, timeout_seconds: float) -> Event | None:
        """Return the next event; None after a timeout."""
        if not self._events:
            try:
                await asyncio.wait_for(self._not_empty.wait(), timeout_seconds)
            except TimeoutError:
                return None
        event = self._events.popleft()
        if not self._events:
            self._not_empty.clear()
        return event

    def _append(self, event: Event) -> None:
        if isinstance(event, StepDone) and event.previews:
            # A slow reader gets every step but only the newest preview. Otherwise up to 250 steps of 16 images each
            # would pile up in memory.
            for number, earlier in enumerate(self._events):
                if isinstance(earlier, StepDone) and earlier.previews:
                    self._events[number] = replace(earlier, previews=None)
        self._events.append(event)
        self._not_empty.set()


class EventStream(StreamingResponse):
    """A response of server-sent events. The request is cancelled when the stream ends for any reason."""

    def __init__(self, request: RequestState, events: EventQueue) -> None:
        super().__init__(_encoded_events(request, events), media_type="text/event-stream")
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the last one, or until the client disconnects or stops reading."""

        async def send_with_timeout(message: Message) -> None:
            await asyncio.wait_for(send(message), SEND_TIMEOUT_SECONDS)

        try:
            await super().__call__(scope, receive, send_with_timeout)
        except TimeoutError:
            pass  # the client no longer reads; the server closes the connection
        finally:
            self._request.cancel()


async def _encoded_events(request: RequestState, events: EventQueue) -> AsyncIterator[bytes]:
    event: Event | None = None
    while not isinstance(event, RequestEnded):
        event = await events.get(HEARTBEAT_SECONDS)
        if event is None:
            yield b": keep-alive\n\n"
        elif isinstance(event, ImageDone) or (isinstance(event, StepDone) and event.previews):
            yield await asyncio.get_running_loop().run_in_executor(ENCODERS, _encode_event, request, event)
        else:
            yield _encode_event(request, event)


def _encode_event(request: RequestState, event: Event) -> bytes:
    """Return the lines of an event in the stream."""
    name, data = _stream_event(request, event)
    return f"event: {name}\ndata: {json.dumps(data.model_dump(exclude_unset=True))}\n\n".encode()


def _stream_event(request: RequestState, event: Event) -> tuple[str, StreamEvent]:
    """Return the name and the data of an event."""
    id = request.id
    if isinstance(event, Queued):
        return "queued", QueuedEvent(id=id, position=event.position, experts=expert_numbers(request.model.ensemble))
    if isinstance(event, StepDone):
        previews = {"previews": [_base64_png(image) for image in event.previews]} if event.previews else {}
        weights, steps = _rounded(event.weights), request.generation.settings.steps
        return "step", StepEvent(id=id, step=event.step, steps=steps, t=event.t, weights=weights, **previews)
    if isinstance(event, ImageDone):
        png = _base64_png(event.image, event.settings)
        return "image", ImageEvent(id=id, index=event.index, png=png, settings=event.settings)
    if event.status == DONE:
        return "done", DoneEvent(id=id, seconds=round(event.seconds, 3))
    if event.status == CANCELLED:
        return "cancelled", StreamEvent(id=id)
    return "failed", FailedEvent(id=id, message=event.message)


async def collect_images(request: RequestState, events: EventQueue, http_request: Request) -> ImagesResponse:
    """Wait for all images of a request; cancel it if its client disconnects."""
    images: list[ImageDone] = []
    try:
        while not isinstance(event := await events.get(DISCONNECT_CHECK_SECONDS), RequestEnded):
            if isinstance(event, ImageDone):
                images.append(event)
            elif event is None and await http_request.is_disconnected():
                break
    finally:
        request.cancel()
    if not isinstance(event, RequestEnded) or event.status == CANCELLED:
        raise ApiError(409, "the request was cancelled")
    if event.status != DONE:
        raise ApiError(event.status, event.message, retry_after=event.retry_after)
    # Images may finish in different steps: a full batch can leave some of them behind.
    images.sort(key=lambda image: image.index)
    return await asyncio.get_running_loop().run_in_executor(ENCODERS, _response, request, images)


def _response(request: RequestState, images: list[ImageDone]) -> ImagesResponse:
    generated = [
        GeneratedImage(png=_base64_png(image.image, image.settings), settings=image.settings) for image in images
    ]
    weights = [_rounded(image.weights) for image in request.images]
    experts = expert_numbers(request.model.ensemble)
    return ImagesResponse(id=request.id, images=generated, experts=experts, weights=weights, times=request.times[:-1])


def _base64_png(image: Image.Image, settings: ImageSettings | None = None) -> str:
    return base64.b64encode(to_png(image, None if settings is None else settings.model_dump())).decode("ascii")


def _rounded(weights: list[list[float]]) -> list[list[float]]:
    return [[round(weight, WEIGHT_DIGITS) for weight in row] for row in weights]
