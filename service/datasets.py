"""POST, list, view and delete datasets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from packer import logs
from packer.manifest import cancelled_key, dataset_key, lock_key, remove_dataset, write_origin
from packer.names import kept_name
from packer.spec import Job, canonical_json, job_to_document
from packer.store import NoSpaceLeft, Store, StoreError
from packer.view import damaged_view
from service import problems, specs
from service.auth import known_parameters_only
from service.requests import read_body
from service.schemas import DatasetList, DatasetView, SpecModel
from service.state import Service, service_of

log = logging.getLogger("padfree.service")

_CANCEL_WAIT_S = 30.0

router = APIRouter(prefix="/v1", tags=["datasets"])


@router.post(
    "/datasets",
    status_code=202,
    response_model=DatasetView,
    responses={
        200: {"model": DatasetView, "description": "Known already: no work is done twice"},
        **problems.documented(400, 401, 405, 413, 422, 500, 507),
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": SpecModel.model_json_schema()}},
        }
    },
)
async def post_dataset(
    request: Request,
    service: Service = Depends(service_of),  # noqa: B008
) -> Response:
    """Pack what a spec asks for. The same spec and content give the same dataset."""
    if service.scheduler is None:
        raise problems.read_only()
    document = specs.json_of(await read_body(request, service.settings.max_spec_bytes))
    job = await service.long_in_thread(specs.resolved, specs.parsed(document), service, service.store)
    is_new = await service.long_in_thread(_register, job, service.store, logs.request_id.get())
    if is_new:
        service.scheduler.submit(job.dataset)
    feed = await service.feeds.get(job.dataset)
    view = await feed.view()
    if view is None:  # deleted in this very moment
        raise problems.unknown_dataset(job.dataset)
    if told := kept_name(job.dataset, view["name"], job.spec.name):
        view["warnings"] = [*view.get("warnings", []), told]
    headers = {"Location": f"/v1/datasets/{job.dataset}"}
    return JSONResponse(view, status_code=202 if is_new else 200, headers=headers)


def _register(job: Job, store: Store, request_id: str | None) -> bool:
    """Make the dataset known to all replicas. Returns whether there is work to do that nobody had."""
    spec, failed = (dataset_key(job.dataset, name) for name in ("spec.json", "failed.json"))
    stopped = [key for key in (failed, cancelled_key(job.dataset)) if store.exists(key)]
    is_known = store.exists(spec)
    if is_known and not stopped:
        return False
    if is_known:  # and has stopped: what it failed for may be said otherwise now
        _renew(job, store, spec)
    for key in stopped:  # what is committed stays and is not packed again
        store.delete(key)
    write_origin(store, job.dataset, request_id=request_id)
    if not is_known:
        store.put(spec, canonical_json(job_to_document(job)))
    return True


def _renew(job: Job, store: Store, spec: str) -> None:
    """Write down the job as it was asked for now, in all that is no part of the id but the name.

    Its files may lie elsewhere now, and what was left open (`loss`) may be settled. A damaged spec stays: it
    is told as such.
    """
    with contextlib.suppress(ValueError, KeyError, TypeError):
        name = json.loads(store.get(spec))["spec"]["name"]
        renewed = dataclasses.replace(job, spec=dataclasses.replace(job.spec, name=name))
        store.put(spec, canonical_json(job_to_document(renewed)))


@router.get(
    "/datasets",
    response_model=DatasetList,
    responses=problems.documented(401),
    dependencies=[Depends(known_parameters_only)],
)
async def list_datasets(service: Service = Depends(service_of)) -> Response:  # noqa: B008
    """All datasets of the store."""
    views = await views_of_all(service)
    return JSONResponse({"datasets": views})


async def views_of_all(service: Service) -> list[dict[str, Any]]:
    views, unread = [], None
    for dataset in await service.feeds.all_ids():
        try:
            view = await (await service.feeds.get(dataset)).view()
        except problems.Problem:
            continue  # removed meanwhile
        except StoreError as error:  # of this one alone, or of the whole store
            log.error("dataset %s cannot be read now: %s", dataset, error)
            view, unread = damaged_view(dataset, error), unread or error
        if view is not None:
            views.append(view)
    if unread is not None and all(view["state"] == "failed" for view in views):
        raise unread
    return views


@router.get(
    "/datasets/{dataset}",
    response_model=DatasetView,
    responses=problems.documented(401, 404, 409),
    dependencies=[Depends(known_parameters_only)],
)
async def get_dataset(
    dataset: str,
    service: Service = Depends(service_of),  # noqa: B008
) -> Response:
    """One dataset: its state, progress, report, and why it failed."""
    feed = await service.feeds.get(dataset)
    view = await feed.view()
    if view is None:
        raise problems.unknown_dataset(dataset)
    return JSONResponse(view)


@router.delete(
    "/datasets/{dataset}",
    status_code=204,
    response_class=Response,
    responses=problems.documented(401, 404, 409, 503),
)
async def delete_dataset(
    dataset: str,
    service: Service = Depends(service_of),  # noqa: B008
) -> Response:
    """Cancel a dataset that is packed, by whichever replica, then remove it. Open streams are cut off."""
    feed = await service.feeds.get(dataset)
    if not await service.in_thread(service.store.exists, cancelled_key(dataset)):
        with contextlib.suppress(NoSpaceLeft):  # then only this replica is told; what follows makes room
            await service.in_thread(service.store.put, cancelled_key(dataset), b"{}")
    feed.nudge()
    if service.scheduler is not None:
        service.scheduler.cancel(dataset)
    until = time.monotonic() + _CANCEL_WAIT_S
    while not await service.long_in_thread(_remove, service.store, dataset):
        if time.monotonic() >= until:
            raise problems.transient(
                f"dataset {dataset} is cancelled, but its worker has not stopped yet; DELETE it again",
                retry_after_s=5,
            )
        await asyncio.sleep(0.1)
    service.feeds.drop(dataset)
    service.names.pop(dataset, None)  # posted again it may have another
    service.files.forget(dataset_key(dataset))
    log.info("dataset %s was removed", dataset)
    return Response(status_code=204)


def _remove(store: Store, dataset: str) -> bool:
    """Remove a cancelled dataset unless some process packs it. Returns whether it is gone."""
    with store.lock(lock_key(dataset)) as mine:
        if not mine:
            return False
        remove_dataset(store, dataset)
        store.delete(cancelled_key(dataset))
    return True
