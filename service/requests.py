"""Around every request: its id, a log line, the request metrics, and the answer to an error of our own."""

from __future__ import annotations

import contextvars
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import problems
from service.metrics import Metrics

log = logging.getLogger("padfree.access")

# The id of the request that is being handled; the log formatters read it.
request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)
# The dataset that a request or a packing thread is about; likewise.
dataset_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("dataset_id", default=None)

_GIVEN_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})  # asked for every few seconds


class RequestContext:
    """Gives each request an id (X-Request-Id, the caller's where it sent one), counts it and logs it."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
        token = request_id.set(name)
        since = time.perf_counter()
        status, num_bytes = 0, 0

        async def counted(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = name
            else:
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            # Here, and not in the server, so that log line and answer carry the id.
            log.exception("%s %s failed", scope["method"], scope["path"])
            if status == 0:
                await problems.internal().response()(scope, receive, counted)
        finally:
            self._tell(scope, status, num_bytes, time.perf_counter() - since)
            request_id.reset(token)

    def _tell(self, scope: Scope, status: int, num_bytes: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        self._metrics.requests.labels(route, scope["method"], str(status)).inc()
        if not route.endswith("/stream"):
            self._metrics.request_seconds.labels(route).observe(seconds)
        log.log(
            logging.DEBUG if scope["path"] in _QUIET else logging.INFO,
            "%s %s %d, %d bytes, %.1f ms",
            scope["method"],
            scope["path"],
            status,
            num_bytes,
            seconds * 1000,
            extra={"dataset": scope.get("path_params", {}).get("dataset")},
        )
