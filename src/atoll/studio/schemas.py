"""What goes over the wire: the request for pictures with its limits, and every answer."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

PICTURES, STEPS, GUIDANCE, LARGEST_SEED = 16, 250, 30.0, 2**53 - 1
PROMPT, LABEL, ROUTING = 2000, 200, 100
"""Limits of a request. Seeds end where the numbers of JavaScript stop being exact."""
BODY = 64 * 1024
"""Bytes that the body of a request may have: a prompt of the largest length fits, however it is escaped."""


def _whole(value: object) -> object:
    """In JSON 3.0 is an integer too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Side = Annotated[Whole, Field(ge=1, le=65536)]
ModelName = Literal["experts", "monolith", "student"]


class RefusalError(Exception):
    """A request that is not served: the status of HTTP, why, the field that is wrong, and when to try again."""

    def __init__(
        self, status: int, message: str, field: str | None = None, *, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.retry_after = status, message, field, retry_after


class ImagesRequest(BaseModel):
    """Pictures of a prompt, of a class, of both, or of nothing in particular."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    prompt: str | None = Field(None, max_length=PROMPT, description="what the pictures shall show; blank is none")
    label: Annotated[str, Field(max_length=LABEL)] | Whole | None = Field(
        None, description="a class, by name or number"
    )
    n: Whole = Field(1, ge=1, le=PICTURES, description="number of pictures")
    size: Side | Annotated[list[Side], Field(min_length=2, max_length=2)] | None = Field(
        None, description="side, or height and width, in pixels: only those of the run are possible"
    )
    steps: Whole | None = Field(None, ge=1, le=STEPS, description="steps of the solver; null is as in /v1/run")
    guidance_scale: float | None = Field(
        None, ge=0, le=GUIDANCE, description="classifier-free guidance; 1 is none, null is as in /v1/run"
    )
    routing: str | None = Field(None, max_length=ROUTING, description="as in `atoll sample`; null is the server's own")
    seed: Whole = Field(0, ge=0, le=LARGEST_SEED, description="the same seed gives the same pictures")
    model: ModelName = Field("experts", description="all experts as one, the monolith, or the student")
    expert: Whole | None = Field(None, ge=0, le=99999, description="this expert alone paints, by its number")
    preview_every: Whole | None = Field(
        None, ge=1, le=STEPS, description="streams: send what the picture will be, as far as is known, at these steps"
    )
    stream: bool = Field(False, description="server-sent events instead of one answer")

    @field_validator("prompt")
    @classmethod
    def _blank_is_none(cls, prompt: str | None) -> str | None:
        return prompt if prompt and prompt.strip() else None


class Fault(BaseModel):
    """What was wrong."""

    message: str
    field: str | None = None


class Problem(BaseModel):
    """Every answer that is not a success."""

    error: Fault


class Health(BaseModel):
    """Whether the server works."""

    status: Literal["ok", "stopping", "failed"]
    version: str
    models_ready: bool
    why: str | None = None


class ExpertName(BaseModel):
    """An expert, in the order of weights. Its number is that of its cluster."""

    number: int
    name: str
    colour: str


class Conditions(BaseModel):
    """What the model can be told."""

    text: bool
    labels: list[str]


class Defaults(BaseModel):
    """What a request has that does not say otherwise."""

    routing: str | None
    steps: int
    guidance_scale: float
    n: int


class Limits(BaseModel):
    """The largest values of a request, and the number of requests that may wait."""

    n: int
    steps: int
    guidance_scale: float
    prompt: int
    queue: int


class RunAnswer(BaseModel):
    """What is served."""

    name: str
    size: list[int] | None
    models: list[str]
    conditions: Conditions
    experts: list[ExpertName]
    missing: list[str]
    router: bool
    nearest: bool
    routings: list[str]
    defaults: Defaults
    limits: Limits
    examples: list[str]
    token_required: bool


class ExpertFacts(ExpertName):
    """An expert with what it declares."""

    cluster: int
    objective: str | None
    schedule: str | None
    network: str
    parameters: int
    samples_trained: int | None
    seconds: float | None
    flops: float | None
    pictures: int | None
    share: float | None


class ExpertsAnswer(BaseModel):
    """The experts that are finished."""

    experts: list[ExpertFacts]


class LabelShare(BaseModel):
    """How much of a cluster is of a class."""

    name: str
    share: float


class Cluster(BaseModel):
    """What an expert was trained on."""

    number: int
    pictures: int
    share: float
    captions: list[str]
    labels: list[LabelShare]
    sheet: str | None


class ClustersAnswer(BaseModel):
    """All clusters, or why they cannot be shown."""

    clusters: list[Cluster]
    why: str | None = None


class Island(BaseModel):
    """One job of the run."""

    job: str
    state: str
    where: str
    samples: int
    total: int
    rate: float
    seconds_left: float | None
    seen_seconds_ago: float | None
    why: str
    grid: str | None
    loss: list[tuple[int, float]]


class IslandsAnswer(BaseModel):
    """All jobs, or why there is nothing to tell."""

    jobs: list[Island]
    why: str | None = None


class ImageSettings(BaseModel):
    """Everything needed to make an image again. The PNG carries it too."""

    model_config = ConfigDict(frozen=True)

    prompt: str | None
    label: str | int | None
    number: int
    model: str
    cluster: int | None
    routing: str
    steps: int
    guidance_scale: float
    guidance_interval: tuple[float, float]
    rescale: float
    solver: str
    shift: float
    scheduler_times: bool
    seed: int


class Picture(BaseModel):
    """A PNG in base64, and how it was made."""

    png: str
    settings: ImageSettings


class ImagesAnswer(BaseModel):
    """Pictures, and the weight of every expert: by picture, step and expert."""

    id: str
    images: list[Picture]
    experts: list[int]
    """Their numbers, in the order of the weights."""
    weights: list[list[list[float]]]
    times: list[float]


class StreamEvent(BaseModel):
    """The data of a server-sent event. This one is `cancelled`."""

    id: str
    """Of the request."""


class QueuedEvent(StreamEvent):
    """`queued`: the request waits behind so many others."""

    position: int
    experts: list[int]
    """Their numbers, in the order of the weights."""


class StepEvent(StreamEvent):
    """`step`: all images of the request have made a step."""

    step: int
    steps: int
    t: float
    weights: list[list[float]]
    """By image and expert."""
    previews: list[str] | None = None


class ImageEvent(StreamEvent):
    """`image`: one is finished."""

    index: int
    png: str
    settings: ImageSettings


class DoneEvent(StreamEvent):
    """`done`: all are finished."""

    seconds: float


class FailedEvent(StreamEvent):
    """`failed`: the request ended early."""

    message: str
