"""Shards as files: the list of those that are committed, and their bytes."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from packer.manifest import Shard
from service import problems
from service.auth import known_parameters_only
from service.feeds import Feed, Snapshot
from service.files import ShardFiles, ShardMissing
from service.ranges import Unsatisfiable, is_unchanged, may_send_range, parse_range
from service.schemas import ShardPage
from service.sending import ChunkedResponse
from service.state import Service, service_of

MEDIA_TYPE = "application/vnd.apache.arrow.file"
MAX_WAIT_S = 60.0

_PAGE = 1000  # shards
_INDEX = re.compile(r"[0-9]{1,9}")

router = APIRouter(prefix="/v1", tags=["shards"])


@router.get(
    "/datasets/{dataset}/shards",
    response_model=ShardPage,
    responses=problems.documented(401, 404, 409, 422),
    dependencies=[Depends(known_parameters_only)],
)
async def list_shards(
    dataset: str,
    start: Annotated[int, Query(ge=0, le=1 << 40, description="The first shard to list")] = 0,
    wait_s: Annotated[
        float, Query(ge=0, allow_inf_nan=False, description="How long to wait for a shard; at most 60")
    ] = 0.0,
    service: Service = Depends(service_of),  # noqa: B008
) -> dict[str, Any]:
    """Committed shards from `start` on, in order. Waits until there is one, or none will come."""
    feed = await service.feeds.get(dataset)
    snapshot = await _wait_for_shard(service, feed, start, min(wait_s, MAX_WAIT_S))
    view = await feed.view() if not snapshot.finished else None
    if snapshot.stopped is not None or snapshot.cancelled:  # what is committed is no dataset
        state = "cancelled" if snapshot.cancelled else "failed"
        return {"shards": [], "next": start, "finished": False, "state": state, "error": snapshot.stopped}
    stop = max(start, min(start + _PAGE, snapshot.num_shards))
    return {
        "shards": [_shard_view(one) for one in snapshot.shards[start:stop]],
        "next": stop,
        "finished": snapshot.finished and stop >= snapshot.num_shards,
        "state": "ready" if snapshot.finished else (view or {}).get("state", "queued"),
        "error": None,
    }


async def _wait_for_shard(service: Service, feed: Feed, start: int, wait_s: float) -> Snapshot:
    snapshot = await feed.fresh()

    async def wait() -> Snapshot:
        seen = snapshot
        while seen.num_shards <= start and not (seen.finished or seen.stopped or seen.cancelled):
            seen = await feed.after(seen)
        return seen

    waiting = asyncio.ensure_future(wait())
    stopping = asyncio.ensure_future(service.stopping.wait())
    try:
        await asyncio.wait((waiting, stopping), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else snapshot
    finally:
        waiting.cancel()
        stopping.cancel()


def _shard_view(one: Shard) -> dict[str, Any]:
    return {name: getattr(one, name) for name in ("index", "num_packs", "num_tokens", "num_bytes", "sha256")}


@router.head("/datasets/{dataset}/shards/{index}", include_in_schema=False)
@router.get(
    "/datasets/{dataset}/shards/{index}",
    response_class=Response,
    responses={
        200: {"content": {MEDIA_TYPE: {}}, "description": "The Arrow file; ETag is its SHA-256"},
        206: {"content": {MEDIA_TYPE: {}}, "description": "The bytes asked for by Range"},
        304: {"description": "If-None-Match names its ETag"},
        **problems.documented(401, 404, 409, 416),
    },
)
async def get_shard(
    request: Request,
    dataset: str,
    index: str,
    service: Service = Depends(service_of),  # noqa: B008
) -> Response:
    """The file of one shard; byte ranges as RFC 9110 has them."""
    one = await _find(service, dataset, index)
    etag = f'"{one.sha256}"'
    headers = {
        "ETag": etag,
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, max-age=31536000, immutable",
    }
    if is_unchanged(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    try:
        size = await service.read_in_thread(_size_of_whole, service.files, one)
    except ShardMissing as error:
        raise await _damage(service, dataset, error) from error
    if size != one.num_bytes:
        raise problems.damaged(dataset, f"shard {index} has {size} bytes instead of {one.num_bytes}")
    wanted = None
    # HEAD describes the whole file: a range is defined for GET alone.
    if request.method == "GET" and may_send_range(request.headers.get("if-range"), etag):
        try:
            wanted = parse_range(request.headers.get("range"), size)
        except Unsatisfiable as error:
            raise problems.unsatisfiable_range(size, headers) from error
    start, stop = wanted or (0, size)
    headers["Content-Length"] = str(stop - start)
    if wanted:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    if request.method == "HEAD":
        return Response(headers=headers, media_type=MEDIA_TYPE)
    return ChunkedResponse(
        service,
        _bytes(service, dataset, one, start, stop),
        kind="shard",
        what=f"shard {index} of {dataset}",
        status_code=206 if wanted else 200,
        headers={name.lower(): value for name, value in headers.items()},
        media_type=MEDIA_TYPE,
    )


def _size_of_whole(files: ShardFiles, one: Shard) -> int:
    files.require_whole(one.key, one.sha256)
    return files.num_bytes(one.key, one.sha256)


async def _find(service: Service, dataset: str, index: str) -> Shard:
    feed = await service.feeds.get(dataset)
    if not _INDEX.fullmatch(index):
        wanted = "a shard's index is a whole number from 0 to 999999999"
        raise problems.unknown_shard(dataset, f"{wanted}, found {index[:40]!r}")
    snapshot = await feed.fresh()
    snapshot.raise_if_stopped(dataset)
    if int(index) >= snapshot.num_shards:
        more = "; more will come" if not snapshot.finished else ""
        raise problems.unknown_shard(
            dataset, f"it has {snapshot.num_shards} shards, found index {index}{more}"
        )
    return snapshot.shards[int(index)]


async def _damage(service: Service, dataset: str, error: ShardMissing) -> problems.Problem:
    """What to answer where a shard is not what the manifest says."""
    problem = await (await service.feeds.get(dataset)).damage(str(error))
    service.feeds.drop(dataset)
    return problem


async def _bytes(
    service: Service, dataset: str, one: Shard, start: int, stop: int
) -> AsyncIterator[memoryview]:
    """The bytes of a range. Raises Problems."""
    read = functools.partial(service.files.read_into, sha256=one.sha256)
    try:
        while start < stop:
            size = min(service.chunk_bytes(), stop - start)
            buffer = service.buffers.take(size)
            await service.read_in_thread(read, one.key, start, buffer)
            yield buffer
            start += size
    except ShardMissing as error:
        raise await _damage(service, dataset, error) from error
    except OSError as error:
        raise problems.from_store_error(error) from error
