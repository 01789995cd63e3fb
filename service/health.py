"""Is the process alive, can it do its work, what does it count."""

from __future__ import annotations

import logging
import time
from typing import Any

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse, Response

from packer.store import Store
from service.metrics import CONTENT_TYPE
from service.schemas import Readiness
from service.state import Service, service_of

log = logging.getLogger("padfree.service")

router = APIRouter(tags=["operation"])

_LEAST_FREE_BYTES = 64 << 20
_COUNT_EVERY_S = 5.0  # datasets by state


@router.get("/healthz", response_class=JSONResponse)
async def healthz() -> dict[str, str]:
    """The process is alive and its event loop turns."""
    return {"status": "ok"}


@router.get("/readyz", response_model=Readiness, responses={503: {"model": Readiness}})
async def readyz(service: Service = Depends(service_of)) -> Response:  # noqa: B008
    """Whether this replica can serve what is packed: 200 or 503. And whether it can pack, and what lacks.

    A replica that cannot pack now (Ray is away, the store is full) serves on and takes specs, which wait.
    """
    checks = {"store": await service.in_thread(check_reading, service.store)}
    if service.stopping.is_set():
        checks["service"] = "stopping"
    ready = all(state == "ok" for state in checks.values())
    found: dict[str, Any] = {"ready": ready, "packing": False, "checks": checks}
    if service.scheduler is not None:
        checks["writing"] = await service.in_thread(check_writing, service.store)
        checks["runner"] = service.scheduler.runner_state
        found["packing"] = all(state == "ok" for state in checks.values())
        found["workers"] = service.scheduler.num_workers
    return JSONResponse(found, status_code=200 if ready else 503)


def check_reading(store: Store) -> str:
    """ "ok", or why the store cannot be read."""
    try:
        return "ok" if store.is_there() else f"there is no folder or bucket for the store {store.url}"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def check_writing(store: Store) -> str:
    """ "ok", or why the store cannot be written."""
    try:
        store.probe()
        space = store.space()
    except OSError as error:
        return f"cannot be written: {error.strerror or error}"
    if space is not None and space[0] < _LEAST_FREE_BYTES:
        return f"only {space[0]} bytes are free, make room"
    return "ok"


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(service: Service = Depends(service_of)) -> Response:  # noqa: B008
    """Prometheus text."""
    if time.monotonic() >= service.count_again_s:  # it reads the store
        service.count_again_s = time.monotonic() + _COUNT_EVERY_S
        try:
            await service.in_thread(_measure_store, service)
            service.metrics.count_datasets(await service.feeds.states())
        except OSError as error:  # the other metrics are all the more of interest
            log.warning("the store cannot be read now: %s", error)
    service.metrics.show_lags(one.lag for one in service.streams)
    return Response(service.metrics.text(), media_type=CONTENT_TYPE)


def _measure_store(service: Service) -> None:
    if (space := service.store.space()) is not None:
        service.metrics.store_free_bytes.set(space[0])
        service.metrics.store_size_bytes.set(space[1])
