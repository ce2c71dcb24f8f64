"""Continuous batching: the pictures of all requests share one loop over denoising steps.

One thread owns the networks. At every step it chooses at most `batch` pictures among all requests, whatever their
prompts, times and guidance, asks each ensemble once for all pictures that are routed alike, and moves each along its
own times. A new request joins at the next step, a finished or cancelled one leaves, and a picture does not depend on
its company.
"""

import threading
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from PIL import Image
from torch import Tensor

from atoll.core.errors import AtollError
from atoll.ensemble import RoutingState, SamplerState, parse
from atoll.ensemble.routing import Decision
from atoll.flow import rng
from atoll.studio.metrics import Metrics
from atoll.studio.registry import Edition
from atoll.studio.schemas import RefusalError
from atoll.studio.work import (
    BROKEN,
    CANCELLED,
    DONE,
    FULL,
    REFUSED,
    UNAVAILABLE,
    Ask,
    Ended,
    Event,
    Painted,
    Picture,
    Queued,
    Ticket,
    choose,
)

MEMORY = 0.8
"""Weight of the past in the estimate of the present rate."""
STOPPING_SECONDS = 30.0
"""After these somebody who is told that the server stops may try again."""
OUTCOMES = {DONE: "done", CANCELLED: "cancelled"}


Part = TypeVar("Part")


@dataclass(eq=False)
class Shot:
    """A latent to be seen: a finished picture, or what one will be."""

    picture: Picture
    latent: Tensor
    finished: bool
    image: Image.Image | None = None

    @property
    def ticket(self) -> Ticket:
        """The request that it is for."""
        return self.picture.ticket


class Engine:
    """Takes requests from any thread and works on them in one of its own."""

    def __init__(self, batch: int, queue: int) -> None:
        self.batch, self.queue, self.metrics = batch, queue, Metrics()
        self.failure: str | None = None
        self._changed = threading.Condition()
        self._open: list[Ticket] = []
        self._closing = False
        self._rate = 0.0
        self._thread = threading.Thread(target=self._run, name="atoll-engine", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, ask: Ask, edition: Edition, post: Callable[[Event], None]) -> Ticket:
        """Take a request; `post` is called with each of its events, from the engine's thread."""
        ticket = Ticket(ask, edition, post)
        with self._changed:
            if self.failure is not None:
                raise RefusalError(UNAVAILABLE, self.failure)
            if self._closing:
                raise RefusalError(UNAVAILABLE, "the server is stopping", retry_after=STOPPING_SECONDS)
            if len(self._open) >= self.batch + self.queue:
                self.metrics.requests.labels("refused").inc()
                reason = f"{len(self._open)} requests are being worked on or wait, which is all that is allowed"
                raise RefusalError(FULL, reason, retry_after=self._wait())
            self._open.append(ticket)
            self.metrics.open.set(len(self._open))
            ticket.position = max(0, len(self._open) - self.batch)
            post(Queued(ticket.position))
            self._changed.notify()
        return ticket

    def cancel(self, id: str) -> bool:
        """Let a request go at the next step; whether it was there."""
        with self._changed:
            found = [ticket for ticket in self._open if ticket.id == id]
        for ticket in found:
            ticket.cancel()
        return bool(found)

    def close(self) -> None:
        """Take no more requests; those that are there are finished."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def abandon(self) -> None:
        """Let all requests go: there is no time to finish them."""
        with self._changed:
            for ticket in self._open:
                ticket.cancel(Ended(UNAVAILABLE, "the server is stopping", retry_after=STOPPING_SECONDS))
        self.close()

    @property
    def closing(self) -> bool:
        """Whether it takes no more requests."""
        return self._closing

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._open

    def join(self, seconds: float | None = None) -> None:
        """Wait until it has closed."""
        self._thread.join(seconds)

    def _wait(self) -> float:
        """Seconds until a request will have left, by the present rate."""
        left = sum(ticket.left for ticket in self._open)
        return min(60.0, max(1.0, left / self._rate / len(self._open))) if self._rate else 5.0

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while self.turn():
                    pass
        except BaseException as error:  # nobody may wait for an engine that is gone
            traceback.print_exc()
            with self._changed:
                self.failure = f"the engine failed: {type(error).__name__}: {error}"
                for ticket in self._open:
                    ticket.post(Ended(UNAVAILABLE, self.failure))
                self._open.clear()

    def turn(self) -> bool:
        """One step of all that is chosen; False at the end of all work."""
        with self._changed:
            self._changed.wait_for(lambda: self._open or self._closing)
            tickets = list(self._open)
        for ticket in tickets:
            if ticket.cancelled is not None:
                self._end(ticket, ticket.cancelled)
        tickets = [ticket for ticket in tickets if not ticket.over]
        start = time.perf_counter()
        self._seat(tickets)
        chosen = choose([ticket for ticket in tickets[: self.batch] if not ticket.over], self.batch)
        for group in _grouped(chosen, _routed_alike):
            self._isolated(self._advance, group, _owner)
        self._show([picture for picture in chosen if not picture.ticket.over])
        self._measure(chosen, time.perf_counter() - start)
        with self._changed:
            return bool(self._open) or not self._closing

    def _seat(self, tickets: Sequence[Ticket]) -> None:
        """Begin the requests that the batch has room for, and tell the others how many are before them."""
        new = [ticket for ticket in tickets[: self.batch] if ticket.seat is None]
        for group in _grouped(new, lambda ticket: ticket.edition):
            self._isolated(self._begin, group, lambda ticket: ticket)
        for position, ticket in enumerate(tickets[self.batch :], 1):
            if ticket.position != position:
                ticket.position = position
                ticket.post(Queued(position))
        self.metrics.waiting.set(max(0, len(tickets) - self.batch))

    def _begin(self, tickets: Sequence[Ticket]) -> None:
        """Give requests for one model their conditions, encoded together, and their noise."""
        edition = tickets[0].edition
        noises = [_noise(ticket) for ticket in tickets]
        seats = edition.conditions.seats([(ticket.ask.prompt, ticket.ask.label) for ticket in tickets])
        for ticket, seat, noise in zip(tickets, seats, noises, strict=True):
            ticket.seat = seat
            ticket.pictures = [Picture(ticket, number, x) for number, x in enumerate(noise)]

    def _advance(self, pictures: Sequence[Picture]) -> None:
        """One step of pictures that are routed alike; nothing is changed before all is computed."""
        first, tickets = pictures[0].ticket, [picture.ticket for picture in pictures]
        decisions: list[Decision] = []
        state = SamplerState(
            torch.stack([picture.x for picture in pictures]),
            first.edition.conditions.told([ticket.seat for ticket in tickets if ticket.seat is not None]),
            RoutingState(trace=decisions, drawn=_drawn(pictures)),
            _clusters(tickets),
            _draws(pictures),
        )
        t = [picture.ticket.times[picture.step] for picture in pictures]
        t_next = [picture.ticket.times[picture.step + 1] for picture in pictures]
        scales = torch.tensor([ticket.guidance_scale for ticket in tickets])
        guidance = scales if bool((scales != 1).any()) else 1.0
        made = first.edition.sampler.step(state, t, to=t_next, settings=first.ask.settings, guidance_scale=guidance)
        drawn, weights = state.routing.drawn, decisions[0].weights.tolist()
        for number, picture in enumerate(pictures):
            if picture.wants_preview:
                picture.estimate = state.x[number] - t[number] * made.velocity[number]
            picture.x = made.x[number]
            picture.drawn = None if drawn is None else drawn[number]
            picture.weights.append(weights[number])
            picture.step += 1

    def _show(self, pictures: Sequence[Picture]) -> None:
        """Tell of the steps that were made; decode what is finished and what is to be seen on the way."""
        tickets = list(dict.fromkeys(picture.ticket for picture in pictures))
        shots = [Shot(picture, picture.x, True) for picture in pictures if picture.finished]
        shots += [
            Shot(picture, picture.estimate, False)
            for ticket in tickets
            if ticket.preview_due
            for picture in ticket.pictures
            if picture.estimate is not None
        ]
        for group in _grouped(shots, lambda shot: shot.ticket.edition):
            self._isolated(_decode, group, _owner)
        for ticket in tickets:
            if not ticket.over:
                self._tell(ticket, [shot for shot in shots if shot.ticket is ticket])

    def _tell(self, ticket: Ticket, shots: Sequence[Shot]) -> None:
        """The events of one request after a step."""
        previews = [shot.image for shot in shots if not shot.finished and shot.image is not None]
        for step in ticket.new_steps():
            ticket.post(ticket.stepped(step, previews or None))
        for shot in shots:
            if shot.finished and shot.image is not None:
                ticket.painted += 1
                ticket.post(Painted(shot.picture.number, shot.image, ticket.described(shot.picture.number)))
                self._count(shot.picture)
        if ticket.painted == ticket.ask.n:
            self._end(ticket, Ended(DONE, "", time.monotonic() - ticket.begun))

    def _isolated(
        self, work: Callable[[Sequence[Part]], None], parts: Sequence[Part], owner: Callable[[Part], Ticket]
    ) -> None:
        """Do work for several requests at once; if it fails, for each by itself, and the one that fails ends alone."""
        try:
            work(parts)
        except Exception as error:  # whatever it is, it must not reach the requests of others
            tickets = list(dict.fromkeys(owner(part) for part in parts))
            if len(tickets) > 1:
                for ticket in tickets:
                    self._isolated(work, [part for part in parts if owner(part) is ticket], owner)
            elif isinstance(error, AtollError):
                self._end(tickets[0], Ended(REFUSED, str(error)))
            else:
                traceback.print_exc()
                self._end(tickets[0], Ended(BROKEN, f"this request failed: {type(error).__name__}: {error}"))

    def _end(self, ticket: Ticket, end: Ended) -> None:
        ticket.over = True
        with self._changed:
            self._open.remove(ticket)
            self.metrics.open.set(len(self._open))
        if ticket.seat is not None:
            ticket.seat.leave()
        ticket.forget()
        self.metrics.requests.labels(OUTCOMES.get(end.status, "failed")).inc()
        if end.status == DONE:
            self.metrics.seconds.observe(end.seconds)
        ticket.post(end)

    def _count(self, picture: Picture) -> None:
        """Note who painted a picture."""
        edition = picture.ticket.edition
        self.metrics.images.labels(edition.model).inc()
        for expert, weights in zip(edition.ensemble.experts, zip(*picture.weights, strict=True), strict=True):
            self.metrics.experts.labels(expert.name).inc(sum(weights) / len(weights))

    def _measure(self, chosen: Sequence[Picture], seconds: float) -> None:
        """Note the pace of this step."""
        self.metrics.batch.set(len(chosen))
        if chosen:
            self.metrics.steps.inc(len(chosen))
            self.metrics.step_seconds.observe(seconds)
            rate = len(chosen) / max(seconds, 1e-9)
            self._rate = MEMORY * self._rate + (1 - MEMORY) * rate if self._rate else rate


def _decode(shots: Sequence[Shot]) -> None:
    """See latents of one model as pictures."""
    latents = torch.stack([shot.latent for shot in shots])
    if not bool(latents.isfinite().all()):
        raise AtollError("the networks gave numbers that are not finite; try less guidance, or another precision")
    for shot, image in zip(shots, shots[0].ticket.edition.sampler.decode(latents), strict=True):
        shot.image = image


def _owner(part: "Picture | Shot") -> Ticket:
    return part.ticket


def _routed_alike(picture: Picture) -> Hashable:
    """Pictures of which this is the same can be asked for in one call."""
    ticket = picture.ticket
    assert ticket.seat is not None
    return ticket.edition, ticket.seat.shelf, ticket.ask.settings.routing


def _grouped(parts: Sequence[Part], key: Callable[[Part], Hashable]) -> list[list[Part]]:
    """Parts with equal keys, in the order of their first."""
    groups: dict[Hashable, list[Part]] = {}
    for part in parts:
        groups.setdefault(key(part), []).append(part)
    return list(groups.values())


def _noise(ticket: Ticket) -> Tensor:
    """Where the pictures of a request begin: a function of seed and number, as in `generate`."""
    return ticket.edition.sampler.noise(ticket.ask.n, ticket.ask.settings.seed)


def _clusters(tickets: Sequence[Ticket]) -> Tensor | None:
    """The clusters whose experts alone paint, where the oracle routes."""
    given = [ticket.ask.cluster for ticket in tickets if ticket.ask.cluster is not None]
    return torch.tensor(given) if len(given) == len(tickets) else None


def _draws(pictures: Sequence[Picture]) -> Tensor | None:
    """Return what drawn and sample-1 draw by: a function of seed, image and step, as in `RoutingState.draw`."""
    routing = parse(pictures[0].ticket.ask.settings.routing)
    if not routing.draws:
        return None
    draws = [
        rng.uniform(1, seed=each.ticket.ask.settings.seed, stream=routing.stream(each.step), first=each.number)
        for each in pictures
    ]
    return torch.cat(draws)


def _drawn(pictures: Sequence[Picture]) -> Tensor | None:
    """The experts that pictures have drawn in earlier steps, as `RoutingState.drawn`."""
    known = next((picture.drawn for picture in pictures if picture.drawn is not None), None)
    if known is None:
        return None
    return torch.stack([torch.zeros_like(known) if each.drawn is None else each.drawn for each in pictures])
