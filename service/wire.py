"""The bytes of a long answer, handed to the connection as they lie.

What goes through ASGI's `send` passes every middleware, and uvicorn copies each chunk to put its size before
it. So where uvicorn and httptools serve, the parts of a body go to the transport themselves, with the same
bytes on the wire and the same flow control. Its beginning and end go by ASGI, and all of it elsewhere.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

try:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
except ImportError:  # no httptools: ASGI does
    RequestResponseCycle = None  # type: ignore[assignment,misc]

_KEY = "padfree.wire"
# Of uvicorn's own, not promised to stay: a release without one of them is served by ASGI.
_USED = ("flow", "transport", "disconnected", "chunked_encoding", "expected_content_length")


class Wire:
    """The way of one response's body to its connection."""

    __slots__ = ("_cycle", "num_bytes")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.num_bytes = 0  # that were handed over

    async def write(self, data: bytes | memoryview) -> None:
        """Send one part, once the reader has taken what was before it. The response must have begun.

        `data` is not copied where it has to wait: it must never change afterwards. What is written to a
        reader that has gone is dropped, as ASGI's `send` does.
        """
        cycle, transport = self._cycle, self._cycle.transport
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected or transport.is_closing():
            return
        num_bytes = len(data)
        if cycle.chunked_encoding:
            transport.writelines((b"%x\r\n" % num_bytes, data, b"\r\n"))
        elif num_bytes > cycle.expected_content_length:
            raise RuntimeError(f"{num_bytes} bytes more than the answer's Content-Length says")
        else:
            cycle.expected_content_length -= num_bytes
            transport.write(data)
        self.num_bytes += num_bytes

    @property
    def must_wait(self) -> bool:
        """Whether the next part has to wait for the reader."""
        return self._cycle.flow.write_paused


def wire_of(scope: Scope) -> Wire | None:
    """The wire of a request's answer; None where there is only ASGI."""
    return scope.get(_KEY)


def with_wires(app: ASGIApp) -> ASGIApp:
    """The application for uvicorn to run, in which each request knows its wire.

    It has to be outermost, for what is below wraps `send`.
    """
    if RequestResponseCycle is None:
        return app

    async def wired(scope: Scope, receive: Receive, send: Send) -> None:
        cycle = getattr(send, "__self__", None)
        if isinstance(cycle, RequestResponseCycle) and all(hasattr(cycle, name) for name in _USED):
            scope[_KEY] = Wire(cycle)
        await app(scope, receive, send)

    return wired
