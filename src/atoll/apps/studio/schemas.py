"""Request and response schemas of the HTTP API."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from atoll.core.names import GuidanceName, GuidanceWeights

# Limits of one request bound what a single client can cost the others. They are round numbers well above common
# settings (25 to 50 steps, guidance scales of 1 to 8); 16 images fill half of the default batch.
MAX_IMAGES = 16
MAX_STEPS = 250
MAX_GUIDANCE_SCALE = 30.0
# JavaScript numbers are exact up to this integer. A larger seed would change on its way through the web page.
MAX_SEED = 2**53 - 1
# Text encoders cut prompts at some tens or hundreds of tokens, so longer prompts would not change the images.
MAX_PROMPT_CHARACTERS = 2000
MAX_LABEL_CHARACTERS = 200
MAX_ROUTING_CHARACTERS = 100
# A prompt of 2000 characters fits, even if every character is escaped as a JSON surrogate pair (12 bytes).
MAX_BODY_BYTES = 64 * 1024


def _integral_float_to_int(value: object) -> object:
    """Convert 3.0 to 3: JSON does not distinguish integers from floats, but strict pydantic does."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


JsonInt = Annotated[int, BeforeValidator(_integral_float_to_int)]
Side = Annotated[JsonInt, Field(ge=1, le=65536)]
ModelKind = Literal["experts", "students", "monolith", "student", "merged"]


class ApiError(Exception):
    """An error response: HTTP status, message, the invalid field, and the seconds after which to retry."""

    def __init__(
        self, status: int, message: str, field: str | None = None, *, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.retry_after = status, message, field, retry_after


class ImagesRequest(BaseModel):
    """Request for images of a prompt, of a class, of both, or unconditional images."""

    # The docstrings of fields become their descriptions in /openapi.json and in the HTTP reference.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    prompt: str | None = Field(None, max_length=MAX_PROMPT_CHARACTERS)
    """text prompt; blank or null is unconditional"""
    label: Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)] | JsonInt | None = None
    """class, by name or number"""
    num_images: JsonInt = Field(1, ge=1, le=MAX_IMAGES)
    """number of images"""
    width: Side | None = None
    """width in pixels, together with `height`: one of the sizes in /v1/run; null is the default"""
    height: Side | None = None
    """height in pixels, together with `width`"""
    steps: JsonInt | None = Field(None, ge=1, le=MAX_STEPS)
    """number of solver steps; null is the default in /v1/run"""
    guidance_scale: float | None = Field(None, ge=0, le=MAX_GUIDANCE_SCALE)
    """guidance scale; 1 disables guidance, null is the default in /v1/run"""
    guidance: GuidanceName = "classifier-free"
    """what guidance moves away from: the velocity without the prompt, or that of the weak network of training"""
    routing: str | None = Field(None, max_length=MAX_ROUTING_CHARACTERS)
    """as in `atoll sample`; null is the default in /v1/run"""
    seed: JsonInt = Field(0, ge=0, le=MAX_SEED)
    """random seed; the same seed gives the same images"""
    model: ModelKind = "experts"
    """the routed experts, or a dense network"""
    expert: JsonInt | None = Field(None, ge=0, le=99999)
    """use only this expert, by the number of its cluster"""
    preview_every: JsonInt | None = Field(None, ge=1, le=MAX_STEPS)
    """in streams: send the predicted final images every so many steps"""
    stream: bool = False
    """send server-sent events instead of one response"""

    @field_validator("prompt")
    @classmethod
    def _blank_is_none(cls, prompt: str | None) -> str | None:
        return prompt if prompt and prompt.strip() else None


class ResponseSchema(BaseModel):
    """Base class of all responses and events."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class ErrorDetail(ResponseSchema):
    """What is wrong, and in which field of the request, in the form of OpenAI's API."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    """Invalid field of the request; null if the error is not about one field."""
    code: str | None
    """`invalid_api_key`, `model_not_found`, `rate_limit_exceeded` or null."""


class ErrorResponse(ResponseSchema):
    """Body of every error response, except those of /health."""

    error: ErrorDetail


class Health(ResponseSchema):
    """State of the server."""

    status: Literal["ok", "stopping", "failed"]
    version: str
    models_ready: bool
    """Whether at least one model is loaded."""
    reason: str | None = None
    """Why the server failed, or why a model could not be loaded."""


class ExpertSummary(ResponseSchema):
    """An expert. Experts are listed in the order of the routing weights."""

    number: int
    """Number of its cluster."""
    name: str
    """Name of its training job."""
    color: str
    """Color of the expert on the web page."""


class AcceptedConditions(ResponseSchema):
    """The conditions that the model accepts."""

    text: bool
    """Whether it accepts prompts."""
    labels: list[str]
    """Names of the classes; empty if it accepts no labels."""


class Defaults(ResponseSchema):
    """Values of request fields that are omitted or null."""

    routing: str | None
    steps: int
    guidance_scale: float
    num_images: int


class RequestLimits(ResponseSchema):
    """Maximum values of a request, and the maximum number of waiting requests."""

    num_images: int
    steps: int
    guidance_scale: float
    prompt_characters: int
    queue: int
    """Requests that may wait while the batch is full."""


class LoadingInfo(ResponseSchema):
    """The model that is being loaded."""

    model: str
    networks: int
    """Number of its networks: experts and router; 0 if it is not known."""
    position: int
    """Its position among the models to load now, from 1."""
    total: int
    """Number of models to load now."""


class RunResponse(ResponseSchema):
    """Description of the served run."""

    name: str
    size: list[int] | None
    """Height and width of the images in pixels by default; null until a model is loaded."""
    sizes: list[list[int]]
    """Height and width of all sizes of the training images, the default first."""
    models: list[str]
    """Loaded models."""
    conditioning: AcceptedConditions
    experts: list[ExpertSummary]
    missing: list[str]
    """Experts that are not trained yet."""
    loading: LoadingInfo | None
    """The model that is being loaded now; null if none is."""
    load_errors: dict[str, str]
    """Why trained models could not be loaded, by model."""
    router: bool
    """Whether a router for all experts is trained."""
    nearest: bool
    """Whether the routing `nearest` is possible."""
    routings: list[str]
    """Routings that the web page offers; requests may use others."""
    defaults: Defaults
    limits: RequestLimits
    examples: list[str]
    """Captions of the training data, as prompts to try."""
    token_required: bool


class ExpertInfo(ExpertSummary):
    """An expert with the values of its manifest."""

    cluster: int
    objective: str | None
    """Prediction target of training, for instance velocity or epsilon."""
    schedule: str | None
    """Noise schedule of training."""
    network: str
    """Class and size of the network."""
    parameters: int
    images_seen: int | None
    """Images that training has processed, with repetitions."""
    seconds: float | None
    """Training time."""
    flops: float | None
    """Estimated floating-point operations of training."""
    images: int | None
    """Training images in its cluster."""
    share: float | None
    """Fraction of all training images that are in its cluster."""


class ExpertsResponse(ResponseSchema):
    """The trained experts."""

    experts: list[ExpertInfo]


class LabelShare(ResponseSchema):
    """Fraction of a cluster's images that have a label."""

    name: str
    share: float


class ClusterInfo(ResponseSchema):
    """Training data of one expert."""

    number: int
    images: int
    """Number of training images."""
    share: float
    """Fraction of all training images."""
    captions: list[str]
    """Examples of captions."""
    labels: list[LabelShare]
    """Most frequent labels."""
    contact_sheet: str | None
    """Path of an image with examples."""


class ClustersResponse(ResponseSchema):
    """All clusters, or the reason why they are not available."""

    clusters: list[ClusterInfo]
    reason: str | None = None


class JobInfo(ResponseSchema):
    """State of one training job."""

    job: str
    state: str
    """done, running, stale, failed, proposed, free or missing, as in `atoll status`."""
    where: str
    """Worker that trains or trained it."""
    images: int
    """Images that training has processed."""
    total_images: int
    images_per_second: float
    seconds_left: float | None
    last_seen_seconds_ago: float | None
    """Age of the last heartbeat or metrics."""
    reason: str
    """Why the job failed; empty otherwise."""
    grid: str | None
    """Path of the newest grid of images that it has sampled in training."""
    loss: list[tuple[int, float]]
    """Pairs of images seen and training loss."""


class IslandsResponse(ResponseSchema):
    """All training jobs, or the reason why there are none."""

    jobs: list[JobInfo]
    reason: str | None = None


class ImageSettings(ResponseSchema):
    """All settings that reproduce an image. They are also stored in the PNG file."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    prompt: str | None
    label: str | int | None
    number: int
    """Number of the image in its request."""
    width: int
    height: int
    model: str
    cluster: int | None
    """Cluster of the expert, if only one was used."""
    routing: str
    steps: int
    guidance_scale: float
    guidance: GuidanceName
    guidance_interval: tuple[float, float]
    guidance_weights: GuidanceWeights
    rescale: float
    solver: str
    shift: float
    scheduler_times: bool
    seed: int
    dtype: str
    """Precision of the networks."""


class GeneratedImage(ResponseSchema):
    """A PNG file in base64, and its settings."""

    png: str
    settings: ImageSettings


class ImagesResponse(ResponseSchema):
    """Generated images with their routing weights."""

    id: str
    images: list[GeneratedImage]
    experts: list[int]
    """Numbers of the experts, in the order of the weights."""
    weights: list[list[list[float]]]
    """Routing weights by image, step and expert."""
    times: list[float]
    """Flow time t of every step, from 1 (noise) towards 0 (data)."""


class StreamEvent(ResponseSchema):
    """Data of a server-sent event. The event `cancelled` has no further fields."""

    id: str
    """Id of the request."""


class QueuedEvent(StreamEvent):
    """`queued`: the request waits behind this many others; 0 starts with the next step."""

    position: int
    experts: list[int]
    """Numbers of the experts, in the order of the weights."""


class StepEvent(StreamEvent):
    """`step`: all images of the request completed a step."""

    step: int
    steps: int
    t: float
    """Flow time of the step, from 1 (noise) towards 0 (data)."""
    weights: list[list[float]]
    """Routing weights by image and expert."""
    previews: list[str] | None = None
    """Predicted final images as PNG files in base64."""


class ImageEvent(StreamEvent):
    """`image`: one image is finished."""

    index: int
    """Number of the image in its request."""
    png: str
    """PNG file in base64."""
    settings: ImageSettings


class DoneEvent(StreamEvent):
    """`done`: all images are finished."""

    seconds: float
    """Time since the request arrived."""


class FailedEvent(StreamEvent):
    """`failed`: the request ended early."""

    message: str
