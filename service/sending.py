"""Answers of many bytes: sent in chunks, at the reader's pace, and cut off when they cannot go on.

An answer that is cut off has no end (no last chunk, too few bytes for its Content-Length), so that no
client takes it for complete. Whoever asks again is told why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.problems import Problem, service_stops
from service.state import Service
from service.wire import Wire, wire_of

log = logging.getLogger("padfree.service")


class ChunkedResponse(Response):
    """Sends the chunks of an iterator, which raises a Problem where it cannot go on.

    The first chunk is asked for before the status is sent: a Problem until then is the answer, and cuts it
    off afterwards.
    end: follows the last chunk of an answer that is complete, and leaves with its end in one piece.
    `on_end(how)` hears "complete", "disconnected", "cut" or "refused".
    """

    def __init__(
        self,
        service: Service,
        chunks: AsyncIterator[bytes | memoryview],
        *,
        kind: str,
        what: str,
        status_code: int = 200,
        headers: dict[str, str] | None = None,
        media_type: str | None = None,
        end: bytes = b"",
        on_end: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(None, status_code, headers, media_type)
        if headers is None or "content-length" not in headers:
            del self.headers["content-length"]
        self._service, self._chunks, self._kind, self._what = service, chunks, kind, what
        self._end, self._on_end = end, on_end or (lambda how: None)
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        how = "disconnected"
        sending = asyncio.create_task(self._send(send, wire_of(scope)))
        gone = asyncio.create_task(_disconnected(receive))
        stopping = asyncio.create_task(self._service.stopping.wait())
        tasks = (sending, gone, stopping)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                how = "complete"
            elif not gone.done():
                if not self._started:
                    raise service_stops()
                how = "cut"
                log.info("%s is cut off: the service stops", self._what)
        except Exception as error:
            how = "cut" if self._started else "refused"
            if not self._started or not isinstance(error, Problem):
                raise
            log.warning("%s is cut off: %s", self._what, error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._on_end(how)

    async def _send(self, send: Send, wire: Wire | None) -> None:
        waited = self._service.metrics.wait_seconds.labels("reader")
        served = self._service.metrics.served_bytes.labels(self._kind)
        async with aclosing(self._chunks) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                if not self._started:
                    await self._start(send)
                if len(chunk) == 0:
                    continue
                since = time.perf_counter()
                if wire is not None:
                    await wire.write(chunk)
                else:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                waited.inc(time.perf_counter() - since)
                served.inc(len(chunk))
                # Neither reading what is in memory nor sending need ever wait: without this nobody else's
                # turn would come, and a reader that has gone would be sent all that is left.
                if wire is None or not wire.must_wait:
                    await asyncio.sleep(0)
        if not self._started:
            await self._start(send)
        served.inc(len(self._end))  # before: whoever has all of it may ask what was counted
        await send({"type": "http.response.body", "body": self._end, "more_body": False})

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
