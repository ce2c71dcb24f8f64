"""State of requests in the engine: the checked request, the progress of each image, and the events for the client."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, zip_longest
from typing import TYPE_CHECKING
from uuid import uuid4

from PIL import Image
from torch import Tensor

from atoll.apps.studio.condition_cache import Slot
from atoll.apps.studio.schemas import ImageSettings
from atoll.core.device import dtype_name
from atoll.core.sizes import Size
from atoll.ensemble import Settings
from atoll.flow.solvers import solver_times

if TYPE_CHECKING:
    from atoll.apps.studio.registry import LoadedModel


@dataclass(frozen=True)
class GenerationRequest:
    """A checked request: all defaults are filled in and the model supports all values."""

    settings: Settings
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
    """One-hot vector (experts,) of the drawn expert, for routings that keep one expert along the trajectory."""
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
    model: "LoadedModel"
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
        """The guidance scale; 1 without a condition, where guidance has no effect."""
        conditioned = self.slot is not None and self.slot.conditioned
        return self.generation.settings.guidance_scale if conditioned else 1.0

    @property
    def steps_left(self) -> int:
        """Remaining steps, summed over its images."""
        total = len(self.times) - 1
        return self.generation.num_images * total - sum(image.step for image in self.images)

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

    def take_unreported_steps(self) -> range:
        """Return the steps without an event and mark them as reported; requests without a stream get no step events."""
        first, self.reported_steps = self.reported_steps, self.completed_steps
        return range(first, self.reported_steps) if self.generation.stream else range(0)

    def step_event(self, step: int, previews: list[Image.Image] | None) -> StepDone:
        """Return the event of a step, counted from 0."""
        return StepDone(step + 1, self.times[step], [image.weights[step] for image in self.images], previews)

    def release_latents(self) -> None:
        """Free the latents now: requests and images refer to each other, so only a later garbage collection would."""
        for image in self.images:
            image.x, image.estimate = image.x.new_empty(0), None

    def image_settings(self, number: int) -> ImageSettings:
        """Return the settings that reproduce one of its images."""
        generation, size = self.generation, self.generation.size or self.model.sizes[0]
        return ImageSettings(
            prompt=generation.prompt, label=generation.label, number=number, model=self.model.name,
            width=size.width, height=size.height,
            cluster=generation.cluster, dtype=dtype_name(self.model.sampler.dtype), **asdict(generation.settings),
        )  # fmt: skip


def choose_images(requests: Sequence[RequestState], batch_size: int) -> list[ImageState]:
    """Return the images of the next step: the first of every request, then the second of every request, and so on.

    This round robin keeps a request for many images from delaying the others: a new request replaces the last image of
    an older one in the batch. An image that is left out keeps its state and only loses time.
    """
    rounds = zip_longest(*(request.unfinished() for request in requests))
    return list(islice((image for round_ in rounds for image in round_ if image is not None), batch_size))
