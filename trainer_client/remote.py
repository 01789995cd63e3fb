"""Packs from a padfree service: the standard library's HTTP client, received into one buffer.

One response is one Arrow IPC stream (service: GET /v1/datasets/{id}/stream): the schema message, then
one record batch message a pack, then the end-of-stream mark. A response that stops without the mark is
incomplete; whoever reads opens the stream again at the next step. An epoch is read in several responses,
whose lengths a `Portion` tells.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from packer import shard
from packer.shard import ShardError, read_stamp
from trainer_client import answers, strangers
from trainer_client.body import Body
from trainer_client.course import Layout
from trainer_client.cursor import Split
from trainer_client.errors import DatasetFailed, Lost, Silent, StreamRefused
from trainer_client.portion import Portion
from trainer_client.transport import Received, Request, RequestIds, capacities_of, decode, query_of

_CONNECT_S = 10.0
_ASK_S = 10.0  # for a dataset's view
_REPORT_S = 5.0
_MAX_HEADER_BYTES = 1 << 20
_MAX_MESSAGE_BYTES = 1 << 31
_CONTINUATION = b"\xff\xff\xff\xff"
_FAULTS = (OSError, http.client.HTTPException)  # TimeoutError and ssl.SSLError are OSErrors


class HttpTransport:
    """Reads one dataset's stream from a service.

    `portion`: how much is asked for at once, and after what silence an answer is given up.
    `ids`: each request is sent under one of them (X-Request-Id), and errors name it.
    """

    hears_reports = True

    def __init__(
        self,
        url: str,
        dataset: str,
        *,
        token: str | None = None,
        portion: Portion | None = None,
        ids: RequestIds | None = None,
    ) -> None:
        parts = urlsplit(url)
        if not parts.hostname:
            raise ValueError(f"a url like http://host:8000 is required, found {url!r}")
        self.dataset, self._ids = dataset, ids or RequestIds()
        self.label = f"dataset {dataset} (stream {self._ids.stream})"
        port = parts.port or (443 if parts.scheme == "https" else 80)
        base = parts.path.rstrip("/")
        self._url = f"{parts.scheme}://{parts.hostname}:{port}{base}"
        self._parts, self._given_url = parts, url
        self._path = f"{base}/v1/datasets/{quote(dataset, safe='')}"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._portion = portion or Portion()
        self._layout = Layout()
        self._token = token
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None
        self._lock = threading.RLock()  # a signal's handler may close it from within
        self._closed = False
        self._has_answered = False
        self._prefix, self._header_bytes = b"", 8  # of the last message, and the size that it says

    # -------------------------------------------------------------- the dataset

    def layout(self) -> Layout:
        if self._layout.num_packs is None:
            view = self._view()
            is_ready = view.get("state") == "ready"
            sizes = None
            if answers.strategy_of(view) == "step":
                sizes = self._step_sizes(is_ready)
            self._layout = Layout(
                num_packs=int(view["report"]["num_packs"]) if is_ready else None,
                capacities=capacities_of(view.get("spec")),
                step_sizes=sizes,
                spec=view.get("spec"),
            )
        return self._layout

    def known(self) -> Layout:
        return self._layout

    def find(self) -> str:
        """The id of the dataset, which may be called here by its name or the beginning of its id."""
        return str(self._ask("")["id"])

    def spec(self) -> dict[str, Any]:
        return self._view().get("spec") or {}

    def idle_shares(self, split: Split, epoch: int, max_steps: int) -> dict[str, float]:
        query = {**query_of(Request(split=split, epoch=epoch)), "max_steps": max_steps}
        names = ("world_size", "packs_per_step", "epoch", "shuffle_seed", "tail", "max_steps")
        wanted = {name: query[name] for name in names if name in query}
        return self._ask(f"/balance?{urlencode(wanted)}")["idle_share"]

    def still_packing(self) -> bool:
        try:
            is_packing = self._view().get("state") in ("queued", "packing")
        except Lost:
            return False
        if is_packing:
            self._portion.only_waits()
        return is_packing

    def report(self, figures: dict[str, Any]) -> bool:
        headers = {**self._numbered_headers(), "Content-Type": "application/json"}
        connection = self._connect(_REPORT_S)
        try:
            connection.request("POST", f"{self._path}/streams", json.dumps(figures), headers)
            return connection.getresponse().status == 204
        except _FAULTS:
            return False
        finally:
            connection.close()

    def _step_sizes(self, is_ready: bool) -> NDArray[np.int64]:
        """Packs of each optimiser step that is committed by now."""
        known = self._layout.step_sizes
        parts = [np.empty(0, np.int64) if known is None else known]
        while True:
            page = self._ask(f"/steps?start={sum(map(len, parts))}")
            parts.append(np.array(page["num_packs"] or [], np.int64))
            if page["finished"] or not (is_ready and len(parts[-1])):
                return np.concatenate(parts)

    def _view(self) -> dict[str, Any]:
        """The dataset's view. Raises what its state or an error status means."""
        view = self._ask("")
        if view.get("state") in ("failed", "cancelled"):
            raise DatasetFailed(self.dataset, answers.reason_of(view))
        return view

    def _ask(self, what: str) -> dict[str, Any]:
        """A JSON answer about the dataset."""
        connection = self._connect(_ASK_S)
        try:
            headers = self._numbered_headers()
            connection.request("GET", self._path + what, headers=headers)
            response = connection.getresponse()
            self._has_answered = True
            body = response.read()
            if response.status != 200:
                raise self._problem(response, body, headers["X-Request-Id"])
            return json.loads(body)
        except (*_FAULTS, ValueError) as error:
            what = f"{self._url} cannot be asked for dataset {self.dataset}"
            raise self._lost(error, what) from error
        finally:
            connection.close()

    # -------------------------------------------------------------- the stream

    def packs(self, request: Request) -> Generator[Received, None, None]:
        start, left = request.start, request.max_steps
        while left is None or left:
            count = self._portion.num_steps if left is None else min(left, self._portion.num_steps)
            last = yield from self._answer(replace(request, start=start, max_steps=count))
            if last != start + (count - 1) * request.stride:
                return  # the epoch is over; whether rightly, the reader knows
            start, left = start + count * request.stride, None if left is None else left - count

    def _answer(self, request: Request) -> Generator[Received, None, int | None]:
        """The packs of one response. Returns the number of the last one's step, None where none came."""
        since, waited_s, last, whole = time.monotonic(), 0.0, None, False
        try:
            response = self._open(request)
            body = Body(response)
            self._read_schema(body)
            while (received := self._read_message(body)) is not None:
                if last is None:
                    waited_s = time.monotonic() - since
                last = received.stamp.step
                yield received
            body.finish()
            whole = not response.will_close
            if last is not None:
                self._portion.came(waited_s)
            return last
        except (Lost, *_FAULTS) as error:
            if last is None:
                self._portion.brought_nothing()
            if isinstance(error, Lost):
                raise
            raise Lost(f"the connection to {self._url} broke off: {_shown(error)}") from error
        finally:
            if not whole:
                self._drop()

    def fresh(self) -> HttpTransport:
        more: dict[str, Any] = {"token": self._token, "portion": replace(self._portion), "ids": self._ids}
        other = HttpTransport(self._given_url, self.dataset, **more)
        other._layout, other._has_answered = self._layout, self._has_answered
        return other

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._socket is not None:
                # Wakes the reader's recv, which closing alone would not.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _numbered_headers(self) -> dict[str, str]:
        headers = {**self._headers, "X-Request-Id": self._ids.next()}
        if self._ids.traceparent is not None:
            headers["traceparent"] = self._ids.traceparent
        return headers

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=timeout_s)

    def _open(self, request: Request) -> http.client.HTTPResponse:
        target = f"{self._path}/stream?{urlencode(query_of(request))}"
        kept = self._connection is not None
        try:
            if self._connection is None:
                self._connection = self._dial()
            self._connection.sock.settimeout(self._portion.patience_s)
            headers = self._numbered_headers()
            self._connection.request("GET", target, headers=headers)
            response = self._connection.getresponse()
        except _FAULTS as error:
            is_asked = self._connection is not None
            self._drop()
            if kept and not self._closed and isinstance(error, ConnectionError | http.client.BadStatusLine):
                return self._open(request)  # an idle connection the server had closed: no fault at all
            if is_asked and isinstance(error, TimeoutError):
                raise self._given_up(Silent, "of an answer") from error
            raise self._lost(error, f"cannot reach {self._url}") from error
        self._has_answered = True
        if response.status != 200:
            body = _quietly_read(response)
            self._drop()
            raise self._problem(response, body, headers["X-Request-Id"])
        return response

    def _dial(self) -> http.client.HTTPConnection:
        connection = self._connect(_CONNECT_S)
        connection.connect()
        with self._lock:
            self._socket = connection.sock  # http.client lets go of it in a response that ends by closing
            if self._closed:
                connection.close()
                raise Lost("closed")
        return connection

    def _drop(self) -> None:
        with self._lock:
            connection, self._connection, self._socket = self._connection, None, None
        if connection is not None:
            connection.close()

    def _read_schema(self, body: Body) -> None:
        size = _header_size(self._ahead(body, 8, "the schema", silent=True))
        message = bytes(self._ahead(body, size, "the schema"))
        # The one message without a checksum: what it says is known beforehand.
        if not _says_the_same(message, shard.schema_message(self.dataset)):
            raise Lost(
                f"{self._url} sends another schema than that of dataset {self.dataset}, format version "
                f"{shard.FORMAT_VERSION} (client and service must be of one release)",
                damaged=True,
            )
        body.take(size)

    def _read_message(self, body: Body) -> Received | None:
        """The next pack, or None at the end-of-stream mark."""
        here, header_bytes = body.here(), self._header_bytes
        if len(here) < header_bytes or here[:8] != self._prefix:  # else as the last one, and all here
            prefix = self._ahead(body, 8, "the next pack", silent=True)
            if prefix == shard.END_OF_STREAM:
                return None
            header_bytes = self._header_bytes = _header_size(prefix)
            self._prefix = bytes(prefix)
            here = self._ahead(body, header_bytes, "a pack's header")
        try:
            stamp = read_stamp(here[:header_bytes])
        except ShardError as error:
            raise Lost(str(error), damaged=True) from error
        size = header_bytes + stamp.body_bytes
        if size > _MAX_MESSAGE_BYTES:
            raise Lost(f"a pack of {size} bytes was announced", damaged=True)
        if len(here) < size:
            here = self._ahead(body, size, "a pack")
        pack = decode(here[:size], header_bytes)
        body.take(size)
        return Received(pack, stamp, size)

    def _ahead(self, body: Body, size: int, what: str, *, silent: bool = False) -> memoryview:
        """The next `size` bytes. Raises Lost; Silent where not one came and none was due."""
        try:
            found = body.ahead(size)
        except TimeoutError as error:
            kind = Silent if silent and not body.num_ready else Lost
            raise self._given_up(kind, f"after {body.num_ready} of {size} bytes of {what}") from error
        if len(found) < size:
            raise Lost(f"{self._url} closed the stream after {len(found)} of {size} bytes of {what}")
        return found

    # -------------------------------------------------------------- errors

    def _lost(self, error: Exception, what: str) -> Exception:
        """A fault on the way, as the exception to raise: no try more where nothing has ever answered here and
        nothing will. Behind a first answer all faults are taken to pass."""
        why = "" if self._has_answered else strangers.why_never(self._url, error)
        return StreamRefused(why) if why else Lost(f"{what}: {_shown(error)}")

    def _given_up(self, kind: type[Lost], where: str) -> Lost:
        silence_s = self._portion.patience_s
        self._portion.fell_silent()
        return kind(f"{self._url} sent nothing for {silence_s:g} s, {where}")

    def _problem(self, response: http.client.HTTPResponse, body: bytes, request_id: str) -> Exception:
        asked = answers.Asked(
            url=self._url, dataset=self.dataset, request_id=request_id, has_token=bool(self._headers)
        )
        return answers.error_of(response, body, asked)


def _header_size(prefix: memoryview) -> int:
    """Bytes of a message's header, prefix included, from its first 8 bytes."""
    raw = bytes(prefix)
    size = 8 + int.from_bytes(raw[4:], "little")
    if raw[:4] != _CONTINUATION or not 8 < size <= _MAX_HEADER_BYTES:
        raise Lost(f"no Arrow message begins with {raw.hex()}", damaged=True)
    return size


def _quietly_read(response: http.client.HTTPResponse) -> bytes:
    with contextlib.suppress(*_FAULTS):
        return response.read(1 << 16)
    return b""


def _shown(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _says_the_same(message: bytes, wanted: bytes) -> bool:
    """Whether two schema messages are of equal schemas; releases of Arrow may write them in other bytes."""
    if message == wanted:
        return True
    try:
        found, ours = (pa.ipc.read_schema(pa.py_buffer(one)) for one in (message, wanted))
        return bool(found.equals(ours, check_metadata=True))
    except (pa.ArrowException, OSError, ValueError):
        return False
