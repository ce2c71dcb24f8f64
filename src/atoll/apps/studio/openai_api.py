"""OpenAI's images API over the same engine: `POST /v1/images/generations` and `GET /v1/models`.

A body of OpenAI's API becomes an `ImagesRequest`, so both APIs return the same files for the same seed.
"""

import base64
import secrets
import threading
import time
from collections import OrderedDict
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from atoll.apps.studio.registry import ModelRegistry
from atoll.apps.studio.requests import expert_numbers
from atoll.apps.studio.schemas import (
    MAX_GUIDANCE_SCALE,
    MAX_IMAGES,
    MAX_LABEL_CHARACTERS,
    MAX_PROMPT_CHARACTERS,
    MAX_ROUTING_CHARACTERS,
    MAX_SEED,
    MAX_STEPS,
    ApiError,
    ImagesRequest,
    ImagesResponse,
    JsonInt,
    ResponseSchema,
)

MODELS_PATH, GENERATIONS_PATH, FILES_PATH = "/v1/models", "/v1/images/generations", "/v1/files/"
FIELDS = {"num_images": "n", "steps": "num_inference_steps", "width": "size", "height": "size", "expert": "model"}
"""Fields of `ImagesRequest` by other names, for error messages."""
# Images behind addresses stay in memory up to this size, the oldest leave first: about 100 images of 1024 pixels.
MAX_STORED_BYTES = 256 * 1024 * 1024
# Bytes of the random name of a stored image. It is the only protection of the address, as a token is.
NAME_BYTES = 24


class GenerationsRequest(BaseModel):
    """Request of OpenAI's images API, with the usual further fields of diffusion servers (`extra_body` in clients)."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    prompt: str = Field(max_length=MAX_PROMPT_CHARACTERS)
    """text prompt; blank is unconditional"""
    model: Annotated[str, Field(max_length=100)] | None = None
    """id of one of /v1/models; null is the routed experts"""
    n: JsonInt | None = Field(None, ge=1, le=MAX_IMAGES)
    """number of images; null is 1"""
    size: str | None = Field(None, pattern=r"^([1-9][0-9]{0,4}x[1-9][0-9]{0,4}|auto)$")
    """WIDTHxHEIGHT in pixels: one of the sizes in /v1/run; null and `auto` are the default"""
    response_format: Literal["b64_json", "url"] | None = None
    """`b64_json` (null) returns PNG files in base64, `url` addresses of this server that need no token"""
    output_format: Literal["png"] | None = None
    """always PNG"""
    seed: JsonInt | None = Field(None, ge=0, le=MAX_SEED)
    """random seed; null draws one, so that every request gives other images"""
    num_inference_steps: JsonInt | None = Field(None, ge=1, le=MAX_STEPS)
    """number of solver steps; null is the default in /v1/run"""
    guidance_scale: float | None = Field(None, ge=0, le=MAX_GUIDANCE_SCALE)
    """scale of classifier-free guidance; null is the default in /v1/run"""
    routing: str | None = Field(None, max_length=MAX_ROUTING_CHARACTERS)
    """as in `atoll sample`; null is the default in /v1/run"""
    label: Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)] | JsonInt | None = None
    """class, by name or number"""
    user: str | None = None
    """ignored"""

    def to_native(self, models: ModelRegistry) -> ImagesRequest:
        """Return the same request in the studio's own API."""
        width, height = (None, None) if self.size in (None, "auto") else map(int, str(self.size).split("x"))
        model, _, expert = (self.model or "experts").partition(":")
        # Until the models are loaded, the engine's own check asks the client to retry.
        if self.model is not None and models.first_scan_done.is_set() and self.model not in model_ids(models):
            known = ", ".join(model_ids(models)) or "none yet"
            raise ApiError(404, f"there is no model {self.model!r}; available models: {known}", "model")
        return ImagesRequest.model_validate(
            {
                "prompt": self.prompt, "label": self.label, "num_images": self.n or 1, "width": width, "height": height,
                "steps": self.num_inference_steps, "guidance_scale": self.guidance_scale, "routing": self.routing,
                "seed": secrets.randbelow(MAX_SEED + 1) if self.seed is None else self.seed,
                "model": "experts" if model == "expert" else model, "expert": int(expert) if expert else None,
            }
        )  # fmt: skip


class GenerationsImage(ResponseSchema):
    """One image, as a file or as an address."""

    b64_json: str | None = None
    """PNG file in base64."""
    url: str | None = None
    """Address of the PNG file."""


class GenerationsResponse(ResponseSchema):
    """Generated images in the form of OpenAI's API."""

    created: int
    """Unix time."""
    data: list[GenerationsImage]
    output_format: Literal["png"] = "png"
    size: str
    """WIDTHxHEIGHT in pixels."""


class ModelInfo(ResponseSchema):
    """A model that requests can name."""

    id: str
    """`experts` (all experts with routing), `expert:K`, `monolith`, `student` or `merged`."""
    object: Literal["model"] = "model"
    created: int
    """Unix time at which it was loaded."""
    owned_by: str
    """Name of the run."""


class ModelsResponse(ResponseSchema):
    """All models."""

    object: Literal["list"] = "list"
    data: list[ModelInfo]


class ImageStore:
    """PNG files behind random names, for responses with addresses; the oldest make room for new ones."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._size = 0

    def put(self, file: bytes) -> str:
        """Keep a file and return its name."""
        name = f"{secrets.token_urlsafe(NAME_BYTES)}.png"
        with self._lock:
            self._files[name] = file
            self._size += len(file)
            while self._size > MAX_STORED_BYTES and len(self._files) > 1:
                self._size -= len(self._files.popitem(last=False)[1])
        return name

    def get(self, name: str) -> bytes:
        """Return a file; raise ApiError if it is not kept."""
        file = self._files.get(name)
        if file is None:
            raise ApiError(404, "there is no such image, or newer ones have replaced it")
        return file


def model_ids(models: ModelRegistry) -> dict[str, float]:
    """Return the ids of all loaded models, each with the Unix time at which it was loaded."""
    ids: dict[str, float] = {}
    for name, model in models.loaded().items():
        ids[name] = model.loaded_at
        if name == "experts":
            ids |= {f"expert:{number}": model.loaded_at for number in expert_numbers(model.ensemble)}
    return ids


def describe_models(models: ModelRegistry) -> ModelsResponse:
    """Return all models that requests can name."""
    infos = [ModelInfo(id=id, created=int(at), owned_by=models.name) for id, at in model_ids(models).items()]
    return ModelsResponse(data=infos)


def describe_model(models: ModelRegistry, id: str) -> ModelInfo:
    """Return one model; raise ApiError if it is not loaded."""
    for info in describe_models(models).data:
        if info.id == id:
            return info
    raise ApiError(404, f"there is no model {id!r}; available models: {', '.join(model_ids(models))}", "model")


def to_generations(response: ImagesResponse, store: ImageStore | None, base_url: str) -> GenerationsResponse:
    """Return a response in the form of OpenAI's API; with a store, images become addresses."""
    data = []
    for image in response.images:
        if store is None:
            data.append(GenerationsImage(b64_json=image.png))
        else:
            name = store.put(base64.b64decode(image.png))
            data.append(GenerationsImage(url=f"{base_url}{FILES_PATH.lstrip('/')}{name}"))
    settings = response.images[0].settings
    return GenerationsResponse(created=int(time.time()), data=data, size=f"{settings.width}x{settings.height}")
