"""From a request over the wire to work for the engine, and from its events back to answers."""

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

from atoll.core.errors import AtollError
from atoll.ensemble import Ensemble, Settings
from atoll.ensemble.images import to_png
from atoll.studio.registry import Edition, Models, check_routing
from atoll.studio.schemas import (
    DoneEvent,
    FailedEvent,
    ImageEvent,
    ImagesAnswer,
    ImageSettings,
    ImagesRequest,
    Picture,
    QueuedEvent,
    RefusalError,
    StepEvent,
    StreamEvent,
)
from atoll.studio.work import CANCELLED, DONE, Ask, Ended, Event, Painted, Queued, Stepped, Ticket

HEARTBEAT = 10.0
"""Seconds of silence after which a stream says that it is still there."""
PATIENCE = 60.0
"""Seconds that a stream may be left unread."""
LOOK_EVERY = 0.5
"""Seconds between two looks whether whoever waits for an answer is still there."""
ENCODERS = ThreadPoolExecutor(2, thread_name_prefix="atoll-png")
"""Compress pictures: few threads that stay, for each has memory of its own that it does not give back."""
DIGITS = 5
"""Of weights."""


def checked(request: ImagesRequest, models: Models) -> tuple[Ask, Edition]:
    """What a request wants, and of which model; what that model cannot do is refused."""
    edition = models.edition(request.model)
    ensemble = edition.ensemble
    _check_size(request, edition)
    if request.prompt is not None and not ensemble.conditioning & {"text", "pooled"}:
        raise RefusalError(422, "this model was trained without text: it takes no prompts", "prompt")
    if request.label is not None:
        if "label" not in ensemble.conditioning:
            raise RefusalError(422, "this model was trained without classes: it takes no labels", "label")
        with _blaming("label"):
            edition.sampler.class_number(request.label)
    steps = models.usual.steps if request.steps is None else request.steps
    guidance = models.usual.guidance_scale if request.guidance_scale is None else request.guidance_scale
    settings = Settings(_routing(request, edition), steps, guidance, seed=request.seed)
    ask = Ask(settings, request.prompt, request.label, request.n, request.expert)
    return (replace(ask, preview_every=request.preview_every, stream=True) if request.stream else ask), edition


def _check_size(request: ImagesRequest, edition: Edition) -> None:
    if request.size is not None:
        given = (request.size, request.size) if isinstance(request.size, int) else tuple(request.size)
        if given != edition.size:
            height, width = edition.size
            raise RefusalError(422, f"this model paints pictures of {height} by {width} pixels alone", "size")


def _routing(request: ImagesRequest, edition: Edition) -> str:
    """The routing of a request; an expert that paints alone is one by oracle."""
    if request.expert is not None:
        known = expert_numbers(edition.ensemble)
        if request.model != "experts" or request.expert not in known:
            there = ", ".join(map(str, known)) if request.model == "experts" else f"none in the {request.model}"
            raise RefusalError(422, f"there is no expert {request.expert}; there are: {there}", "expert")
        return "oracle"
    routing = request.routing or edition.routing
    if routing is None:
        raise RefusalError(409, "there are several experts and no router yet: ask for one of them by `expert`")
    with _blaming("routing"):
        check_routing(edition.ensemble, routing)
    return routing


def expert_numbers(ensemble: Ensemble) -> list[int]:
    """The numbers of the experts, in the order of weights: those of their clusters."""
    return [expert.clusters[0] for expert in ensemble.experts]


@contextmanager
def _blaming(field: str) -> Iterator[None]:
    """Refuse what is wrong with a field."""
    try:
        yield
    except AtollError as error:
        raise RefusalError(422, str(error), field) from error


class Mailbox:
    """Events of one request on their way from the engine's thread to its answer."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._some = asyncio.Event()

    def post(self, event: Event) -> None:
        """Put an event in, from any thread."""
        self._loop.call_soon_threadsafe(self._put, event)

    async def take(self, seconds: float) -> Event | None:
        """The next event; None if there is none for so long."""
        if not self._events:
            try:
                await asyncio.wait_for(self._some.wait(), seconds)
            except TimeoutError:
                return None
        event = self._events.popleft()
        if not self._events:
            self._some.clear()
        return event

    def _put(self, event: Event) -> None:
        if isinstance(event, Stepped) and event.previews:
            # Whoever reads slowly sees the newest preview only: what waits stays small.
            for number, earlier in enumerate(self._events):
                if isinstance(earlier, Stepped) and earlier.previews:
                    self._events[number] = replace(earlier, previews=None)
        self._events.append(event)
        self._some.set()


class EventStream(StreamingResponse):
    """A request as server-sent events; when it ends, however it ends, so does the request."""

    def __init__(self, ticket: Ticket, mailbox: Mailbox) -> None:
        super().__init__(_sent(ticket, mailbox), media_type="text/event-stream")
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until nobody listens."""

        async def patient(message: Message) -> None:
            await asyncio.wait_for(send(message), PATIENCE)

        try:
            await super().__call__(scope, receive, patient)
        except TimeoutError:
            pass  # it is not read any more, and the server closes it
        finally:
            self._ticket.cancel()


async def _sent(ticket: Ticket, mailbox: Mailbox) -> AsyncIterator[bytes]:
    event: Event | None = None
    while not isinstance(event, Ended):
        event = await mailbox.take(HEARTBEAT)
        if event is None:
            yield b": still here\n\n"
        elif isinstance(event, Painted) or (isinstance(event, Stepped) and event.previews):
            yield await asyncio.get_running_loop().run_in_executor(ENCODERS, _block, ticket, event)
        else:
            yield _block(ticket, event)


def _block(ticket: Ticket, event: Event) -> bytes:
    """An event as its lines in the stream."""
    name, values = _named(ticket, event)
    return f"event: {name}\ndata: {json.dumps(values.model_dump(exclude_unset=True))}\n\n".encode()


def _named(ticket: Ticket, event: Event) -> tuple[str, StreamEvent]:
    id = ticket.id
    if isinstance(event, Queued):
        return "queued", QueuedEvent(id=id, position=event.position, experts=expert_numbers(ticket.edition.ensemble))
    if isinstance(event, Stepped):
        previews = {"previews": [_base64(image) for image in event.previews]} if event.previews else {}
        steps, weights = ticket.ask.settings.steps, _rounded(event.weights)
        return "step", StepEvent(id=id, step=event.step, steps=steps, t=event.t, weights=weights, **previews)
    if isinstance(event, Painted):
        picture = _base64(event.image, event.settings)
        return "image", ImageEvent(id=id, index=event.index, png=picture, settings=event.settings)
    if event.status == DONE:
        return "done", DoneEvent(id=id, seconds=round(event.seconds, 3))
    if event.status == CANCELLED:
        return "cancelled", StreamEvent(id=id)
    return "failed", FailedEvent(id=id, message=event.message)


async def collected(ticket: Ticket, mailbox: Mailbox, request: Request) -> ImagesAnswer:
    """A request as one answer; if nobody waits for it any more, it is cancelled."""
    painted: list[Painted] = []
    try:
        while not isinstance(event := await mailbox.take(LOOK_EVERY), Ended):
            if isinstance(event, Painted):
                painted.append(event)
            elif event is None and await request.is_disconnected():
                break
    finally:
        ticket.cancel()
    if not isinstance(event, Ended) or event.status == CANCELLED:
        raise RefusalError(409, "the request was cancelled")
    if event.status != DONE:
        raise RefusalError(event.status, event.message, retry_after=event.retry_after)
    painted.sort(key=lambda each: each.index)
    return await asyncio.get_running_loop().run_in_executor(ENCODERS, _answer, ticket, painted)


def _answer(ticket: Ticket, painted: list[Painted]) -> ImagesAnswer:
    pictures = [Picture(png=_base64(each.image, each.settings), settings=each.settings) for each in painted]
    weights = [_rounded(picture.weights) for picture in ticket.pictures]
    experts = expert_numbers(ticket.edition.ensemble)
    return ImagesAnswer(id=ticket.id, images=pictures, experts=experts, weights=weights, times=ticket.times[:-1])


def _base64(image: Image.Image, settings: ImageSettings | None = None) -> str:
    return base64.b64encode(to_png(image, None if settings is None else settings.model_dump())).decode("ascii")


def _rounded(weights: list[list[float]]) -> list[list[float]]:
    return [[round(weight, DIGITS) for weight in row] for row in weights]
