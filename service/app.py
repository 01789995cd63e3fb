"""The application: routes, error answers and what they share, wired together."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

from packer.runners import Runner
from service import datasets, events, health, previews, problems, reports, shards, steps, stream, uploads
from service.auth import BearerTokens
from service.names import DatasetNames
from service.plan import filler_message
from service.requests import RequestContext
from service.scheduler import Scheduler
from service.settings import Settings
from service.state import Service

_WEB = Path(__file__).parent / "web"
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'self'", "Cache-Control": "no-cache"}


def create_app(settings: Settings, runner: Runner | Callable[[], Runner] | None) -> FastAPI:
    """The service on a store.

    `runner` packs; where it is a function that makes one, that is called in the background. None: this
    replica only serves what is in the store.
    """
    service = Service(settings)
    if runner is not None:
        service.scheduler = Scheduler(
            service.store,
            runner,
            max_jobs=settings.max_jobs,
            metrics=service.metrics,
            on_commit=service.committed,
        )

    app = FastAPI(
        title="padfree",
        description="Tokenizes and packs datasets for LLM training, and streams packed batches to trainers.",
        version=_version(),
        docs_url=None,  # its page loads scripts from elsewhere; ours does not
        redoc_url=None,
        lifespan=_lifespan,
    )
    app.state.padfree = service
    parts = (uploads, previews, datasets, events, shards, stream, reports, steps, health)
    for part in parts:
        app.include_router(part.router)
    _add_pages(app)
    problems.install(app)
    # The one added last is outermost: a refused request has an id and a log line too.
    app.add_middleware(
        DatasetNames,
        find=service.find_dataset,
        routes=[route for part in parts for route in part.router.routes],
    )
    app.add_middleware(BearerTokens, tokens=settings.tokens)
    app.add_middleware(RequestContext, metrics=service.metrics, stopping=service.stopping)
    return app


def warm_up(app: FastAPI) -> None:
    """Do now what is left to first requests otherwise: a first stream was up to 60 ms late by it.

    FastAPI reads the parameters of an included router when a request first reaches it.
    """
    filler_message()
    nowhere = {"type": "http", "method": "GET", "path": "/nowhere", "root_path": "", "headers": []}
    for route in app.router.routes:
        route.matches(dict(nowhere))


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.padfree
    with contextlib.suppress(OSError):  # told by /readyz
        await service.in_thread(service.store.probe)  # makes the folder of a new store
        await service.in_thread(uploads.sweep, service.store)
    await service.start()
    try:
        yield
    finally:
        await service.stop()


def _add_pages(app: FastAPI) -> None:
    async def page(name: str) -> Response:
        return FileResponse(_WEB / name, headers=_PAGE_HEADERS)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return await page("index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return await page("docs.html")

    app.mount("/web", StaticFiles(directory=_WEB), name="web")


def _version() -> str:
    try:
        return importlib.metadata.version("padfree")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "0"
