"""Routes of the HTTP API and of the web page."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Request
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from atoll.apps.studio import openai_api, run_info, schemas
from atoll.apps.studio.engine import Engine
from atoll.apps.studio.middleware import SecurityMiddleware, error_response, field_of
from atoll.apps.studio.registry import ModelRegistry
from atoll.apps.studio.requests import EventQueue, EventStream, check_request, collect_images
from atoll.apps.studio.schemas import ApiError
from atoll.core import layout
from atoll.core.errors import AtollError
from atoll.core.version import __version__

# Seconds that startup waits for the models. Most models load in less, so that the first request succeeds; larger ones
# continue to load while the page already shows the run.
STARTUP_SECONDS = 20.0
PAGE = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
_PNG: dict[str, object] = {"content": {"image/png": {}}}
_ERRORS = {
    400: "the body is not JSON", 401: "wrong or missing token", 403: "request for another host or from another site",
    404: "not found", 409: "not possible in the current state of the run", 413: "body too large", 422: "invalid value",
    429: "queue full", 503: "the server is starting, stopping or failed",
}  # fmt: skip


def _errors(*statuses: int) -> dict[int | str, dict[str, object]]:
    """Return the error responses of a route for the OpenAPI description."""
    return {
        status: {"model": schemas.ErrorResponse, "description": _ERRORS[status]}
        for status in (400, 401, 403, 413, 422, *statuses)
    }


@dataclass(frozen=True)
class Studio:
    """The objects that the routes use."""

    models: ModelRegistry
    engine: Engine
    token: str | None = None
    images: openai_api.ImageStore | None = field(default_factory=openai_api.ImageStore)
    """Images behind addresses; None if other servers may receive the requests for them."""

    def health(self, *, details: bool) -> schemas.Health:
        """Return the state of the server; `details` includes error messages, which may contain paths."""
        status = "failed" if self.engine.failure else "stopping" if self.engine.closing else "ok"
        reason = (self.engine.failure or "; ".join(self.models.load_errors.values()) or None) if details else None
        ready = self.models.first_scan_done.is_set() and bool(self.models.loaded())
        return schemas.Health(status=status, version=__version__, models_ready=ready, reason=reason)


def create_app(studio: Studio) -> FastAPI:
    """Return the application; starting it starts the engine, and stopping it stops the engine."""

    @asynccontextmanager
    async def running(_app: FastAPI) -> AsyncIterator[None]:
        studio.models.start()
        studio.engine.start()
        await run_in_threadpool(studio.models.wait_for_first_scan, STARTUP_SECONDS)
        yield
        studio.engine.cancel_all()
        studio.engine.join()
        studio.models.stop()

    # FastAPI's documentation pages load scripts from another host, which the content security policy forbids, so they
    # are off. /openapi.json describes the API.
    app = FastAPI(
        title="Atoll studio", version=__version__, lifespan=running, docs_url=None, redoc_url=None,
        redirect_slashes=False,
        description="Generate images with an ensemble of experts, and describe its run.",
    )  # fmt: skip
    app.add_middleware(SecurityMiddleware, token=studio.token)
    # All errors, including those of FastAPI, have the form of `ErrorResponse`.
    for kind in (ApiError, AtollError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _respond_to_error)

    # Images

    @app.post(
        "/v1/images",
        response_model=schemas.ImagesResponse,
        responses={200: {"content": {"text/event-stream": {}}}, **_errors(409, 429, 503)},
    )
    async def generate_images(body: schemas.ImagesRequest, request: Request) -> schemas.ImagesResponse | Response:
        """Generate images: one response or, with `stream`, events queued, step, image, done, cancelled and failed."""
        generation, model = check_request(body, studio.models)
        events = EventQueue()
        state = studio.engine.submit(generation, model, events.put)
        if body.stream:
            return EventStream(state, events)
        return await collect_images(state, events, request)

    @app.post(
        openai_api.GENERATIONS_PATH,
        response_model=openai_api.GenerationsResponse,
        response_model_exclude_none=True,
        responses=_errors(404, 409, 429, 503),
    )
    async def generations(body: openai_api.GenerationsRequest, request: Request) -> openai_api.GenerationsResponse:
        """Generate images by OpenAI's images API; invalid values get the status 400, as there."""
        by_address = body.response_format == "url"
        if by_address and studio.images is None:
            raise ApiError(400, "several servers share the requests; use response_format b64_json", "response_format")
        made = await generate_images(body.to_native(studio.models), request)
        assert isinstance(made, schemas.ImagesResponse)
        return openai_api.to_generations(made, studio.images if by_address else None, str(request.base_url))

    @app.get(f"{openai_api.FILES_PATH}{{name}}", response_class=Response, responses={200: _PNG, **_errors(404)})
    def image_file(name: Annotated[str, InPath(max_length=64)]) -> Response:
        """Return an image of a response with addresses."""
        if studio.images is None:
            raise ApiError(404, "this server keeps no images")
        return Response(studio.images.get(name), media_type="image/png")

    @app.get(openai_api.MODELS_PATH, responses=_errors())
    def models() -> openai_api.ModelsResponse:
        """Return the models in the form of OpenAI's API: all experts together, each expert, and the dense networks."""
        return openai_api.describe_models(studio.models)

    @app.get(f"{openai_api.MODELS_PATH}/{{id}}", responses=_errors(404))
    def model(id: Annotated[str, InPath(max_length=100)]) -> openai_api.ModelInfo:
        """Return one model."""
        return openai_api.describe_model(studio.models, id)

    @app.delete("/v1/images/{id}", status_code=204, response_class=Response, responses=_errors(404))
    async def cancel_images(id: Annotated[str, InPath(max_length=64)]) -> None:
        """Cancel a request before its next step."""
        if not studio.engine.cancel(id):
            raise ApiError(404, "there is no request with this id; it may have ended")

    # Descriptions of the run

    @app.get("/v1/run", responses=_errors())
    def run() -> schemas.RunResponse:
        """Return models, experts, defaults and limits of the served run."""
        return run_info.describe_run(studio.models, studio.engine.queue, studio.token is not None)

    @app.get("/v1/experts", responses=_errors())
    def experts() -> schemas.ExpertsResponse:
        """Return the trained experts."""
        return run_info.describe_experts(studio.models)

    @app.get("/v1/clusters", responses=_errors())
    def clusters() -> schemas.ClustersResponse:
        """Return the clusters of the training data."""
        return run_info.describe_clusters(studio.models)

    @app.get(
        "/v1/clusters/{number}/contact_sheet.png", response_class=FileResponse, responses={200: _PNG, **_errors(404)}
    )
    def contact_sheet(number: Annotated[int, InPath(ge=0, le=99999)]) -> FileResponse:
        """Return a contact sheet of a cluster's images."""
        return _file(run_info.contact_sheet(studio.models, number), f"there is no contact sheet of cluster {number}")

    @app.get("/v1/islands", responses=_errors(409))
    def islands() -> schemas.IslandsResponse:
        """Return the current state of all training jobs."""
        return run_info.describe_islands(studio.models)

    @app.get("/v1/islands/{job:path}/grid.png", response_class=FileResponse, responses={200: _PNG, **_errors(404)})
    def grid(job: Annotated[str, InPath(pattern=layout.JOB_PATTERN)]) -> FileResponse:
        """Return the newest grid of images that a job has sampled in training."""
        run = studio.models.run
        return _file(None if run is None else layout.newest_preview(run / job), "this job has sampled no images yet")

    # The server and its page

    @app.get("/health", responses={503: {"model": schemas.Health, "description": "stopping or failed"}})
    def health(request: Request, response: Response) -> schemas.Health:
        """Return the state of the server; the reason only with the token."""
        state = studio.health(details=request.state.authorized)
        response.status_code = 200 if state.status == "ok" else 503
        return state

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}, **_errors()})
    def metrics() -> Response:
        """Return the metrics in the text format of Prometheus."""
        return Response(studio.engine.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    def index() -> FileResponse:
        return page("index.html")

    @app.get("/page/{name:path}", include_in_schema=False)
    def page(name: str) -> FileResponse:
        # A look-up in the list of files, not a path built from the name, so no name can leave the folder.
        known = {file.relative_to(PAGE).as_posix(): file for file in PAGE.rglob("*") if file.suffix in _TYPES}
        return _file(known.get(name), f"the page has no file {name[:100]!r}")

    return app


async def _respond_to_error(request: Request, error: Exception) -> Response:
    # Only the type of an unexpected error: its message may contain paths or data that clients should not see.
    found = ApiError(500, f"the server failed: {type(error).__name__}")
    if isinstance(error, ApiError):
        found = error
    elif isinstance(error, AtollError):
        found = ApiError(409, str(error))
    elif isinstance(error, HTTPException):
        found = ApiError(error.status_code, str(error.detail))
    elif isinstance(error, RequestValidationError):
        errors = [(field_of(each["loc"]), str(each["msg"])) for each in error.errors()]
        field = errors[0][0]
        # A field with a union type has one error for each alternative. Only the first invalid field is reported.
        message = " or: ".join(dict.fromkeys(message for other, message in errors if other == field))
        found = ApiError(422, f"{field}: {message}" if field else message, field)
        if error.errors()[0]["type"] == "json_invalid":
            found = ApiError(400, f"the body is not JSON: {error.errors()[0]['ctx']['error']}")
    if request.url.path == openai_api.GENERATIONS_PATH and found.status == 422:
        # OpenAI's clients expect the status 400 for invalid values, and the names of OpenAI's fields.
        found = ApiError(400, found.message, openai_api.FIELDS.get(found.field or "", found.field))
    response = error_response(found)
    response.headers.update((error.headers or {}) if isinstance(error, HTTPException) else {})
    return response


def _file(file: Path | None, message: str) -> FileResponse:
    if file is None or not file.is_file():
        raise ApiError(404, message)
    return FileResponse(file, media_type=_TYPES[file.suffix])
