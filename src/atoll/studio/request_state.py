"""Work in progress: what is asked for, how far each picture is, and what is told of it on the way."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, zip_longest
from typing import TYPE_CHECKING
from uuid import uuid4

from PIL import Image
from torch import Tensor

from atoll.ensemble import Settings
from atoll.flow.solvers import solver_times
from atoll.studio.condition_cache import Seat
from atoll.studio.schemas import ImageSettings

if TYPE_CHECKING:
    from atoll.studio.registry import Edition


@dataclass(frozen=True)
class Ask:
    """What one request wants, checked."""

    settings: Settings
    prompt: str | None = None
    label: str | int | None = None
    n: int = 1
    cluster: int | None = None
    """The expert of this cluster alone paints."""
    preview_every: int | None = None
    stream: bool = False


@dataclass(frozen=True)
class Queued:
    """It waits behind so many others; 0 begins with the next step."""

    position: int


@dataclass(frozen=True)
class Stepped:
    """All its pictures have made a step: weights (pictures, experts) that were decided at time t."""

    step: int
    t: float
    weights: list[list[float]]
    previews: list[Image.Image] | None = None


@dataclass(frozen=True)
class Painted:
    """A picture is finished."""

    index: int
    image: Image.Image
    settings: ImageSettings


@dataclass(frozen=True)
class Ended:
    """Nothing follows. `status` is that of HTTP: 200 done, 499 cancelled, others failed."""

    status: int
    message: str = ""
    seconds: float = 0.0
    retry_after: float | None = None
    """Seconds after which to ask again, if that helps."""


Event = Queued | Stepped | Painted | Ended
DONE, REFUSED, FULL, CANCELLED, BROKEN, UNAVAILABLE = 200, 422, 429, 499, 500, 503


@dataclass(eq=False)
class Picture:
    """One picture on its way from noise to data."""

    ticket: "Ticket"
    number: int
    x: Tensor
    step: int = 0
    weights: list[list[float]] = field(default_factory=list)
    drawn: Tensor | None = None
    """The expert that it has drawn, where routing draws one for good."""
    estimate: Tensor | None = None
    """What it will be, as far as is known, at the last step that wanted a preview."""

    @property
    def finished(self) -> bool:
        """Whether it has made all its steps."""
        return self.step == len(self.ticket.times) - 1

    @property
    def wants_preview(self) -> bool:
        """Whether the step that it makes next is to be shown."""
        every = self.ticket.ask.preview_every
        return every is not None and (self.step + 1) % every == 0 and self.step + 2 < len(self.ticket.times)


@dataclass(eq=False)
class Ticket:
    """One request on its way through the engine."""

    ask: Ask
    edition: "Edition"
    post: Callable[[Event], None]
    id: str = field(default_factory=lambda: uuid4().hex)
    begun: float = field(default_factory=time.monotonic)
    pictures: list[Picture] = field(default_factory=list)
    seat: Seat | None = None
    """Where its condition is; None until its first step."""
    position: int = 0
    told_steps: int = 0
    painted: int = 0
    over: bool = False
    cancelled: Ended | None = None
    """How it is to end at the next step, if it is."""

    def __post_init__(self) -> None:
        """The times of its steps."""
        self.times = solver_times(self.ask.settings.steps)

    def cancel(self, end: Ended = Ended(CANCELLED, "cancelled")) -> None:  # noqa: B008 - it is frozen
        """Leave at the next step."""
        self.cancelled = self.cancelled or end

    @property
    def guidance_scale(self) -> float:
        """Without a condition there is nothing to be guided by."""
        return self.ask.settings.guidance_scale if self.seat is not None and self.seat.something else 1.0

    @property
    def left(self) -> int:
        """Steps of all its pictures that are still to be made."""
        total = len(self.times) - 1
        return self.ask.n * total - sum(picture.step for picture in self.pictures)

    def unfinished(self) -> list[Picture]:
        """Its pictures in the order of their needs: those that are behind come first."""
        return sorted((picture for picture in self.pictures if not picture.finished), key=lambda each: each.step)

    @property
    def made_steps(self) -> int:
        """Steps that all its pictures have made."""
        return min((picture.step for picture in self.pictures), default=0)

    @property
    def preview_due(self) -> bool:
        """Whether the newest step that all have made is to be shown; the last is not, for the pictures follow."""
        every, made = self.ask.preview_every, self.made_steps
        return every is not None and self.told_steps < made < self.ask.settings.steps and made % every == 0

    def new_steps(self) -> range:
        """The steps that were not told of yet; nothing for requests that do not listen."""
        first, self.told_steps = self.told_steps, self.made_steps
        return range(first, self.told_steps) if self.ask.stream else range(0)

    def stepped(self, step: int, previews: list[Image.Image] | None) -> Stepped:
        """The event of a step."""
        return Stepped(step + 1, self.times[step], [each.weights[step] for each in self.pictures], previews)

    def forget(self) -> None:
        """Let go of latents at once, not when the interpreter gets round to it."""
        for picture in self.pictures:
            picture.x, picture.estimate = picture.x.new_empty(0), None

    def described(self, number: int) -> ImageSettings:
        """Everything needed to make one of its pictures again."""
        ask = self.ask
        return ImageSettings(
            prompt=ask.prompt, label=ask.label, number=number, model=self.edition.model, cluster=ask.cluster,
            **asdict(ask.settings),
        )  # fmt: skip


def choose(tickets: Sequence[Ticket], places: int) -> list[Picture]:
    """The pictures of the next step: the first of every request, then the second of every request, and so on.

    A picture that is left out loses nothing but time, so a request of many cannot hold back others: the next one to
    arrive takes the place of some request's last picture.
    """
    rounds = zip_longest(*(ticket.unfinished() for ticket in tickets))
    return list(islice((picture for turn in rounds for picture in turn if picture is not None), places))
