"""The HTTP API and the page, over one engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Request
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from atoll.core import layout
from atoll.core.errors import AtollError
from atoll.core.version import __version__
from atoll.studio import run_info, schemas
from atoll.studio.engine import Engine
from atoll.studio.middleware import Guard, field_of, problem
from atoll.studio.registry import Models
from atoll.studio.requests import EventStream, Mailbox, checked, collected
from atoll.studio.schemas import RefusalError

OPENING_SECONDS = 20.0
"""Time to open models before the first request is answered; those that take longer are opened meanwhile."""
PAGE = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
_PNG: dict[str, object] = {"content": {"image/png": {}}}
_FAULTS = {
    400: "what is not JSON", 401: "a wrong token", 403: "other hosts and sites", 404: "what is not there",
    409: "what is not possible now", 413: "too much", 422: "wrong values", 429: "too many requests",
    503: "starting, stopping or broken",
}  # fmt: skip


def _may(*statuses: int) -> dict[int | str, dict[str, object]]:
    """The refusals that a route can answer with, for the description."""
    return {
        status: {"model": schemas.Problem, "description": _FAULTS[status]}
        for status in (400, 401, 403, 413, 422, *statuses)
    }


@dataclass(frozen=True)
class Studio:
    """Everything that the routes need."""

    models: Models
    engine: Engine
    token: str | None = None

    def health(self) -> schemas.Health:
        """Whether it works."""
        state = "failed" if self.engine.failure else "stopping" if self.engine.closing else "ok"
        why = self.engine.failure or "; ".join(self.models.trouble.values()) or None
        ready = self.models.looked.is_set() and bool(self.models.editions())
        return schemas.Health(status=state, version=__version__, models_ready=ready, why=why)


def create_app(studio: Studio) -> FastAPI:
    """The application; its engine works as long as it runs."""

    @asynccontextmanager
    async def running(_app: FastAPI) -> AsyncIterator[None]:
        studio.models.start()
        studio.engine.start()
        await run_in_threadpool(studio.models.await_first, OPENING_SECONDS)
        yield
        studio.engine.abandon()
        studio.engine.join()
        studio.models.stop()

    # FastAPI's own pages about the API load scripts from another host, which the content security policy forbids;
    # /openapi.json describes the API.
    app = FastAPI(
        title="Atoll studio", version=__version__, lifespan=running, docs_url=None, redoc_url=None,
        redirect_slashes=False,
        description="Pictures from many experts as one model.",
    )  # fmt: skip
    app.add_middleware(Guard, token=studio.token)
    _add_faults(app)
    _add_images(app, studio)
    _add_facts(app, studio)
    _add_pages(app, studio)
    return app


def _add_faults(app: FastAPI) -> None:
    """Every refusal has one form."""

    @app.exception_handler(RefusalError)
    async def refused(_request: Request, error: RefusalError) -> Response:
        return problem(error)

    @app.exception_handler(AtollError)
    async def wrong(_request: Request, error: AtollError) -> Response:
        return problem(RefusalError(409, str(error)))

    @app.exception_handler(Exception)
    async def broken(_request: Request, error: Exception) -> Response:
        return problem(RefusalError(500, f"the server failed: {type(error).__name__}"))

    @app.exception_handler(HTTPException)
    async def http(_request: Request, error: HTTPException) -> Response:
        answer = problem(RefusalError(error.status_code, str(error.detail)))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        if error.errors()[0]["type"] == "json_invalid":
            return problem(RefusalError(400, f"the body is not JSON: {error.errors()[0]['ctx']['error']}"))
        faults = [(field_of(each["loc"]), str(each["msg"])) for each in error.errors()]
        field = faults[0][0]
        # A field that may be one thing or another has a fault for each.
        why = " or: ".join(dict.fromkeys(message for place, message in faults if place == field))
        return problem(RefusalError(422, f"{field}: {why}" if field else why, field))


def _add_images(app: FastAPI, studio: Studio) -> None:
    @app.post(
        "/v1/images",
        response_model=schemas.ImagesAnswer,
        responses={200: {"content": {"text/event-stream": {}}}, **_may(409, 429, 503)},
    )
    async def make_images(wanted: schemas.ImagesRequest, request: Request) -> schemas.ImagesAnswer | Response:
        """Make pictures: one answer, or with `stream` the events queued, step, image, done, cancelled and failed."""
        ask, edition = checked(wanted, studio.models)
        mailbox = Mailbox()
        ticket = studio.engine.submit(ask, edition, mailbox.post)
        if wanted.stream:
            return EventStream(ticket, mailbox)
        return await collected(ticket, mailbox, request)

    @app.delete("/v1/images/{id}", status_code=204, response_class=Response, responses=_may(404))
    async def cancel_images(id: Annotated[str, InPath(max_length=64)]) -> None:
        """Cancel a request; its pictures leave at the next step."""
        if not studio.engine.cancel(id):
            raise RefusalError(404, "there is no such request; it may have ended")


def _add_facts(app: FastAPI, studio: Studio) -> None:
    @app.get("/v1/run", responses=_may())
    def run() -> schemas.RunAnswer:
        """What is served: models, experts, what can be asked for."""
        return run_info.describe_run(studio.models, studio.engine.queue, studio.token is not None)

    @app.get("/v1/experts", responses=_may())
    def experts() -> schemas.ExpertsAnswer:
        """The experts that are finished."""
        return run_info.describe_experts(studio.models)

    @app.get("/v1/clusters", responses=_may())
    def clusters() -> schemas.ClustersAnswer:
        """What each expert was trained on."""
        return run_info.describe_clusters(studio.models)

    @app.get("/v1/clusters/{number}/sheet.png", response_class=FileResponse, responses={200: _PNG, **_may(404)})
    def sheet(number: Annotated[int, InPath(ge=0, le=99999)]) -> FileResponse:
        """Pictures of a cluster."""
        return _file(run_info.sheet_of(studio.models, number), f"there is no picture of a cluster {number}")

    @app.get("/v1/islands", responses=_may(409))
    def islands() -> schemas.IslandsAnswer:
        """The jobs of the run, live."""
        return run_info.describe_islands(studio.models)

    @app.get("/v1/islands/{job:path}/grid.png", response_class=FileResponse, responses={200: _PNG, **_may(404)})
    def grid(job: Annotated[str, InPath(pattern=layout.JOB_PATTERN)]) -> FileResponse:
        """The newest grid of samples of a job."""
        run = studio.models.run
        return _file(None if run is None else run_info.newest_grid(run, job), "this job has drawn no pictures")


def _add_pages(app: FastAPI, studio: Studio) -> None:
    @app.get("/health", responses={503: {"model": schemas.Health, "description": "stopping or broken"}})
    def health(response: Response) -> schemas.Health:
        """Whether the server works."""
        answer = studio.health()
        response.status_code = 200 if answer.status == "ok" else 503
        return answer

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}, **_may()})
    def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(studio.engine.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    def index() -> FileResponse:
        return page("index.html")

    @app.get("/page/{name:path}", include_in_schema=False)
    def page(name: str) -> FileResponse:
        known = {file.relative_to(PAGE).as_posix(): file for file in PAGE.rglob("*") if file.suffix in _TYPES}
        return _file(known.get(name), f"the page has no file {name[:100]!r}")


def _file(file: Path | None, otherwise: str) -> FileResponse:
    if file is None or not file.is_file():
        raise RefusalError(404, otherwise)
    return FileResponse(file, media_type=_TYPES[file.suffix])
