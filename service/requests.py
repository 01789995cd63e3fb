"""Around every request: its id, a log line, the request metrics, and the answer to an error of our own."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from packer import logs, traces
from service import problems
from service.metrics import Metrics
from service.wire import wire_of

log = logging.getLogger("padfree.access")

_GIVEN_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
# Asked for every few seconds by probes, scrapers, pages and waiting clients: told at level debug.
_PROBED = frozenset({"/healthz", "/readyz", "/metrics"})
_POLLED = frozenset(
    {
        ("GET", "/v1/datasets"),
        ("GET", "/v1/datasets/{dataset}"),
        ("GET", "/v1/datasets/{dataset}/shards"),
        ("POST", "/v1/datasets/{dataset}/streams"),
    }
)


class RequestContext:
    """Gives each request an id (X-Request-Id, the caller's where it sent one), counts it and logs it."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, stopping: asyncio.Event) -> None:
        self._app, self._metrics, self._stopping = app, metrics, stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        ids = {"request_id": given if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex}
        if parent := traces.valid_parent(headers.get("traceparent", "")):
            ids["traceparent"] = parent
        with logs.using(ids):
            if scope["path"] in _PROBED:  # of no interest to a trace
                await self._answer(scope, receive, send)
                return
            with traces.span(scope["method"], kind="SERVER", request_id=ids["request_id"]) as span:
                status = await self._answer(scope, receive, send)
                span.update_name(f"{scope['method']} {_route(scope)}")
                span.set_attribute("http.request.method", scope["method"])
                span.set_attribute("http.route", _route(scope))
                span.set_attribute("http.response.status_code", status)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Let the application answer; counted and told. Returns the status, 0 where none was sent."""
        since = time.perf_counter()
        status, num_bytes = 0, 0

        async def counted(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = logs.request_id.get() or ""
                if _route(scope).endswith("/stream"):  # the line at its end may be days away
                    log.info(
                        "%s %s?%s begins: %d",
                        scope["method"],
                        scope["path"],
                        _query(scope),
                        status,
                        extra=_about(scope),
                    )
            else:
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except asyncio.CancelledError:
            if not self._stopping.is_set():
                raise
            log.warning("%s %s is given up: the service stops", scope["method"], scope["path"])
            if status == 0:
                await problems.service_stops().response()(scope, receive, counted)
        except Exception:
            # Here, and not in the server, so that log line and answer carry the id.
            log.exception("%s %s failed", scope["method"], scope["path"])
            if status == 0:
                await problems.internal().response()(scope, receive, counted)
        finally:
            if (wire := wire_of(scope)) is not None:
                num_bytes += wire.num_bytes
            self._tell(scope, status, num_bytes, time.perf_counter() - since)
        return status

    def _tell(self, scope: Scope, status: int, num_bytes: int, seconds: float) -> None:
        route = _route(scope)
        self._metrics.requests.labels(route, scope["method"], str(status)).inc()
        if not route.endswith("/stream"):
            self._metrics.request_seconds.labels(route).observe(seconds)
        is_poll = route in _PROBED or (0 < status < 400 and (scope["method"], route) in _POLLED)
        log.log(
            logging.DEBUG if is_poll else logging.INFO,
            "%s %s %d, %d bytes, %.1f ms",
            scope["method"],
            scope["path"],
            status,
            num_bytes,
            seconds * 1000,
            extra=_about(scope),
        )


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises the Problem too-large, without reading on."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise problems.too_large(max_bytes)
    return bytes(body)


def _route(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", "none")


def _query(scope: Scope) -> str:
    return scope.get("query_string", b"").decode("latin-1")


def _about(scope: Scope) -> dict[str, str | None]:
    return {"dataset": scope.get("path_params", {}).get("dataset")}
