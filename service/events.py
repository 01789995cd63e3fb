"""GET /v1/datasets/{id}/events: progress as server-sent events, until the dataset is at rest.

Each event is a dataset view: `event: progress` while it is queued or packed, and a last one named by its
state (`ready`, `failed`, `cancelled`, or `removed`, without a view), after which the stream ends.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from service import problems
from service.auth import known_parameters_only
from service.feeds import Feed
from service.problems import Problem
from service.sending import ChunkedResponse
from service.state import Service, service_of

MEDIA_TYPE = "text/event-stream"

_AT_REST = frozenset({"ready", "failed", "cancelled"})
_LOOK_S = 1.0  # queued and packing differ by a lock: that is no commit, and has to be looked for
_SILENCE_S = 15.0  # then a comment, so that proxies keep the connection

router = APIRouter(prefix="/v1", tags=["datasets"])


@router.get(
    "/datasets/{dataset}/events",
    response_class=Response,
    responses={
        200: {"content": {MEDIA_TYPE: {}}, "description": "Server-sent events; data: a dataset view"},
        **problems.documented(401, 404, 409),
    },
    dependencies=[Depends(known_parameters_only)],
)
async def events(
    dataset: str,
    service: Service = Depends(service_of),  # noqa: B008
) -> Response:
    """Progress events of a dataset; the last one tells how it ended."""
    feed = await service.feeds.get(dataset)
    return ChunkedResponse(
        service,
        _events(service, feed),
        kind="events",
        what=f"events of {dataset}",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        media_type=MEDIA_TYPE,
    )


async def _events(service: Service, feed: Feed) -> AsyncIterator[bytes]:
    told: dict[str, Any] | None = None
    silence_s = 0.0
    try:
        while True:
            snapshot = await feed.fresh()
            view = await feed.view()
            if view is None:
                yield _event("removed", {"id": feed.dataset})
                return
            if view != told:
                at_rest = view["state"] in _AT_REST
                yield _event(view["state"] if at_rest else "progress", view)
                if at_rest:
                    return
                told, silence_s = view, 0.0
            try:
                await asyncio.wait_for(feed.after(snapshot), _LOOK_S)
            except TimeoutError:
                silence_s += _LOOK_S
            if silence_s >= _SILENCE_S:
                yield b": waiting\n\n"
                silence_s = 0.0
    except Problem:  # the feed was closed: the dataset is removed
        yield _event("removed", {"id": feed.dataset})
    except OSError as error:
        raise problems.from_store_error(error) from error


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
