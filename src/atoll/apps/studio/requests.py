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

from atoll.apps.studio import schemas
from atoll.apps.studio.engine import (
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
from atoll.apps.studio.registry import LoadedModel, ModelRegistry, check_routing
from atoll.apps.studio.schemas import ApiError, ImageSettings, ImagesRequest, ImagesResponse, StreamEvent
from atoll.core.errors import AtollError
from atoll.core.sizes import Size
from atoll.ensemble import Ensemble, SampleSettings
from atoll.ensemble.saving import to_png
from atoll.nets.conditioning import OF_PROMPTS

# Seconds without an event after which a stream sends a comment. Many proxies close idle connections after 60 s.
HEARTBEAT_SECONDS = 10.0
# Seconds that a write to a stream may block because its client does not read. Then the request is cancelled.
SEND_TIMEOUT_SECONDS = 60.0
# PNG compression runs outside the event loop. Two long-lived threads suffice and keep the memory constant: the
# allocator keeps an arena per thread, so a pool that grows with the load would hold on to memory.
ENCODERS = ThreadPoolExecutor(2, thread_name_prefix="atoll-png")
# Digits of routing weights in JSON. Batches of different sizes agree to about three digits, so more are noise.
WEIGHT_DIGITS = 5


def check_request(request: ImagesRequest, models: ModelRegistry) -> tuple[GenerationRequest, LoadedModel]:
    """Return the request with defaults filled in, and its model; raise ApiError if the model does not support it."""
    model = models.get(request.model)

    # Size: one of the sizes of the training images. Any other could be very large.
    size = model.sizes[0]
    if (request.width is None) != (request.height is None):
        missing = "width" if request.width is None else "height"
        raise ApiError(422, "give both width and height, or neither", missing)
    if request.width is not None and request.height is not None:
        size = Size(request.height, request.width)
        if size not in model.sizes:
            known = ", ".join(map(str, model.sizes))
            raise ApiError(422, f"this model generates images of {known} pixels (width x height)", "width")

    # Condition
    conditioning = model.ensemble.conditioning
    if request.prompt is not None and not conditioning & OF_PROMPTS:
        raise ApiError(422, "this model was trained without text and takes no prompts", "prompt")
    if request.label is not None:
        if "label" not in conditioning:
            raise ApiError(422, "this model was trained without classes and takes no labels", "label")
        with _errors_of_field("label"):
            model.sampler.class_number(request.label)

    # Routing. A request for one expert uses `oracle` routing.
    routing = request.routing or model.default_routing
    if request.expert is not None:
        numbers = expert_numbers(model.ensemble)
        if request.model != "experts" or request.expert not in numbers:
            available = ", ".join(map(str, numbers)) if request.model == "experts" else f"none in the {request.model}"
            raise ApiError(422, f"there is no expert {request.expert}; available experts: {available}", "expert")
        routing = "oracle"
    elif routing is None:
        raise ApiError(409, "there are several experts and no router yet; choose one expert with `expert`")
    else:
        with _errors_of_field("routing"):
            check_routing(model.ensemble, routing)

    if request.guidance == "autoguidance":
        with _errors_of_field("guidance"):
            model.ensemble.check_weak()

    defaults = models.defaults
    steps = defaults.steps if request.steps is None else request.steps
    guidance_scale = defaults.guidance_scale if request.guidance_scale is None else request.guidance_scale
    generation = GenerationRequest(
        SampleSettings(
            steps=steps, guidance_scale=guidance_scale, guidance=request.guidance, seed=request.seed, routing=routing
        ).for_steps(model.ensemble.steps),
        request.prompt,
        request.label,
        request.num_images,
        request.expert,
        preview_every=request.preview_every if request.stream else None,
        stream=request.stream,
        size=size,
    )
    return generation, model


def expert_numbers(ensemble: Ensemble) -> list[int]:
    """Return the numbers of the experts, which are those of their clusters, in the order of the routing weights."""
    return [expert.clusters[0] for expert in ensemble.declarations]


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

    async def get(self, timeout_seconds: float | None = None) -> Event | None:
        """Return the next event; None after a timeout, if there is one."""
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
    id = request.id
    data: StreamEvent
    if isinstance(event, Queued):
        name, experts = "queued", expert_numbers(request.model.ensemble)
        data = schemas.QueuedEvent(id=id, position=event.position, experts=experts)
    elif isinstance(event, StepDone):
        name, steps = "step", request.generation.settings.steps
        previews = {"previews": [_base64_png(image) for image in event.previews]} if event.previews else {}
        data = schemas.StepEvent(
            id=id, step=event.step, steps=steps, t=event.t, weights=_rounded(event.weights), **previews
        )
    elif isinstance(event, ImageDone):
        name, png = "image", _base64_png(event.image, event.settings)
        data = schemas.ImageEvent(id=id, index=event.index, png=png, settings=event.settings)
    elif event.status == DONE:
        name, data = "done", schemas.DoneEvent(id=id, seconds=round(event.seconds, 3))
    elif event.status == CANCELLED:
        name, data = "cancelled", StreamEvent(id=id)
    else:
        name, data = "failed", schemas.FailedEvent(id=id, message=event.message)
    return f"event: {name}\ndata: {json.dumps(data.model_dump(exclude_unset=True))}\n\n".encode()


async def collect_images(request: RequestState, events: EventQueue, http_request: Request) -> ImagesResponse:
    """Wait for all images of a request; cancel it if its client disconnects."""

    # The body has been read, so the next message says that the client is gone. Waiting for it costs nothing, while
    # asking again and again (`is_disconnected`) takes time from the engine's thread.
    async def cancel_when_gone() -> None:
        while (await http_request.receive())["type"] != "http.disconnect":
            pass
        request.cancel()

    images: list[ImageDone] = []
    gone = asyncio.create_task(cancel_when_gone())
    try:
        while not isinstance(event := await events.get(), RequestEnded):
            if isinstance(event, ImageDone):
                images.append(event)
    finally:
        gone.cancel()
        request.cancel()
    if event.status == CANCELLED:
        raise ApiError(409, "the request was cancelled")
    if event.status != DONE:
        raise ApiError(event.status, event.message, retry_after=event.retry_after)
    # Images may finish in different steps: a full batch can leave some of them behind.
    images.sort(key=lambda image: image.index)

    def response() -> ImagesResponse:
        return ImagesResponse(
            id=request.id,
            images=[
                schemas.GeneratedImage(png=_base64_png(one.image, one.settings), settings=one.settings)
                for one in images
            ],
            experts=expert_numbers(request.model.ensemble),
            weights=[_rounded(image.weights) for image in request.images],
            times=request.times[:-1],
        )

    return await asyncio.get_running_loop().run_in_executor(ENCODERS, response)


def _base64_png(image: Image.Image, settings: ImageSettings | None = None) -> str:
    return base64.b64encode(to_png(image, None if settings is None else settings.model_dump())).decode("ascii")


def _rounded(weights: list[list[float]]) -> list[list[float]]:
    return [[round(weight, WEIGHT_DIGITS) for weight in row] for row in weights]
