"""A small HTTP server that speaks the stream protocol from a store folder, with faults on demand.

It is written from the protocol, not from the service, so that client and service are tested apart:

    with FakeService(store_root) as service:
        service.faults = [Fault(cut_after=400), Fault(status=503)]   # one a stream request, in order
        PackedStream(service.url, dataset=dataset)
"""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from packer import order, shard
from packer.manifest import Manifest
from packer.shard import Stamp, encode_message, padding_pack
from packer.store import LocalStore


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with one stream request."""

    cut_after: int | None = None  # bytes of the body, then the connection is closed
    reset: bool = False  # closed with a reset, not in order
    status: int | None = None  # answered instead of the stream
    retry_after: str | None = None
    stall_after: int | None = None  # bytes, then nothing for stall_s
    stall_s: float = 0.0
    flip_byte: int | None = None  # of the body
    end_after_steps: int | None = None  # an orderly end, too early
    epoch: int | None = None  # waits for a request of it


class FakeService:
    """Serves a store on a port of its own; `stop` and `start` are a restart."""

    def __init__(self, root: Path, *, token: str | None = None, chunked: bool = True) -> None:
        self.store = LocalStore(root)
        self.token = token
        self.chunked = chunked
        self.faults: list[Fault] = []
        self.always: Fault | None = None  # when no fault is left
        self.names: str | None = None  # the dataset that its streams say they are of, if another
        self.requests: list[dict[str, str]] = []  # queries of stream requests
        self.connections: set[int] = set()  # client ports that asked for a stream
        self.problem: tuple[int, dict[str, Any]] | None = None  # answered to every stream request
        self.num_views_refused = 0  # how many of the next questions for the dataset get status 503
        self.port = 0
        self._server: ThreadingHTTPServer | None = None
        self._open: set[socket.socket] = set()
        self._stopping = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> FakeService:
        service = self

        class Handler(_Handler):
            fake = service

        class Server(ThreadingHTTPServer):
            allow_reuse_address = True
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Connections broken off are what these tests are about."""

        self._stopping.clear()
        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self) -> None:
        """Close the port and break off every connection."""
        self._stopping.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        for connection in list(self._open):
            _reset(connection)

    def next_fault(self, epoch: int) -> Fault:
        if self.faults and self.faults[0].epoch in (None, epoch):
            return self.faults.pop(0)
        return self.always or Fault()

    def __enter__(self) -> FakeService:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeService
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.fake._open.add(self.connection)

    def finish(self) -> None:
        self.fake._open.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        names = parts.path.strip("/").split("/")
        if self.fake.token and self.headers.get("Authorization") != f"Bearer {self.fake.token}":
            return self._problem(401, "unauthorized", "a bearer token is required")
        if names[:2] != ["v1", "datasets"]:
            return self._answer(404, b"<html>nothing here</html>", "text/html")
        manifest = Manifest(self.fake.store, names[2])
        if manifest.spec() is None:
            return self._problem(404, "unknown-dataset", f"there is no dataset {names[2]}")
        manifest.refresh()
        if len(names) == 3:
            return self._view(manifest)
        if names[3] == "steps":
            return self._steps(manifest, int(dict(parse_qsl(parts.query)).get("start", 0)))
        return self._stream(manifest, dict(parse_qsl(parts.query)))

    def _view(self, manifest: Manifest) -> None:
        if self.fake.num_views_refused:
            self.fake.num_views_refused -= 1
            self._problem(503, "transient", "try again")
            return
        failed = manifest.failed()
        state = "failed" if failed else "ready" if manifest.finished else "packing"
        view = {
            "id": manifest.dataset,
            "state": state,
            "report": manifest.finished["report"] if manifest.finished else None,
            "error": failed,
            "spec": (manifest.spec() or {})["spec"],
        }
        self._answer(200, json.dumps(view).encode(), "application/json")

    def _steps(self, manifest: Manifest, start: int) -> None:
        sizes = [len(list(group)) for _, group in itertools.groupby(manifest.rows["step"].tolist())]
        page = {"start": start, "num_packs": sizes[start:], "finished": manifest.finished is not None}
        self._answer(200, json.dumps(page).encode(), "application/json")

    def _problem(self, status: int, kind: str, detail: str, **more: str) -> None:
        problem = {"type": f"urn:padfree:problem:{kind}", "status": status, "detail": detail}
        self._answer(status, json.dumps(problem).encode(), "application/problem+json", **more)

    def _answer(self, status: int, body: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, manifest: Manifest, query: dict[str, str]) -> None:
        self.fake.requests.append(query)
        self.fake.connections.add(self.client_address[1])
        fault = self.fake.next_fault(int(query["epoch"]))
        if fault.status is not None:
            more = {"Retry_After": fault.retry_after} if fault.retry_after else {}
            return self._problem(fault.status, "transient", "try again", **more)
        if self.fake.problem is not None:
            status, problem = self.fake.problem
            return self._answer(status, json.dumps(problem).encode(), "application/problem+json")
        if failed := manifest.failed():
            return self._problem(409, "dataset-failed", failed["detail"])
        if manifest.finished is not None and int(query["start"]) > len(plain_steps(manifest, query)):
            return self._problem(422, "bad-parameter", "start: behind the end of the epoch")
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.apache.arrow.stream")
        if self.fake.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        return _Body(self, fault).send(manifest, query)


class _Body:
    """Sends a stream's bytes, until the fault strikes."""

    def __init__(self, handler: _Handler, fault: Fault) -> None:
        self._handler, self._fault, self._sent = handler, fault, 0

    def send(self, manifest: Manifest, query: dict[str, str]) -> None:
        try:
            self._write(shard.schema_message(self._handler.fake.names or manifest.dataset))
            for index, message in enumerate(_messages(self._handler.fake, manifest, query)):
                if self._fault.end_after_steps == index // int(query["packs_per_step"]):
                    break
                self._write(message)
            self._write(shard.END_OF_STREAM)
            if self._handler.fake.chunked:
                self._handler.wfile.write(b"0\r\n\r\n")
        except _CutError:
            self._handler.close_connection = True

    def _write(self, data: bytes) -> None:
        fault, start = self._fault, self._sent
        if fault.flip_byte is not None and start <= fault.flip_byte < start + len(data):
            changed = bytearray(data)
            changed[fault.flip_byte - start] ^= 0xFF
            data = bytes(changed)
        for limit in (fault.cut_after, fault.stall_after):
            if limit is not None and start <= limit < start + len(data):
                self._raw(data[: limit - start])
                self._strike()
                data = data[limit - start :]
        self._raw(data)
        self._sent = start + len(data)

    def _strike(self) -> None:
        self._handler.wfile.flush()
        if self._fault.stall_after is not None:
            if self._handler.fake._stopping.wait(self._fault.stall_s):
                raise _CutError
            return
        if self._fault.reset:
            _reset(self._handler.connection)
        raise _CutError

    def _raw(self, data: bytes) -> None:
        if not data:
            return
        if self._handler.fake.chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._handler.wfile.write(data)


class _CutError(Exception):
    pass


def _messages(fake: FakeService, manifest: Manifest, query: dict[str, str]) -> Any:
    """Record batch messages of the stream, waiting for packs as they are committed."""
    epoch, start, rank = (int(query[name]) for name in ("epoch", "start", "rank"))
    stride = int(query.get("stride", 1))
    last = start + int(query["max_steps"]) * stride if "max_steps" in query else None
    step = start
    while last is None or step < last:
        while step >= len(steps := plain_steps(manifest, query)) and manifest.finished is None:
            if fake._stopping.is_set() or manifest.failed():
                raise _CutError
            if not manifest.refresh():
                time.sleep(0.01)
        if step >= len(steps):
            return
        whole, ranks, done = steps[step]
        items = int(manifest.rows["num_trained"][whole].sum())
        for place, number in enumerate(ranks[rank], start=1):
            is_last = done and place == len(ranks[rank])
            if number < 0:
                stamp = Stamp(epoch=epoch, step=step, num_items=items, step_done=is_last, padding=True)
                yield encode_message([padding_pack()], stamp=stamp)
                continue
            row = manifest.rows[number]
            data = fake.store.map(manifest.shards[row["shard"]].key)
            at, body = int(row["offset"]), int(row["offset"]) + int(row["header_bytes"])
            header = shard.stamped(
                bytes(data[at:body]), epoch=epoch, step=step, num_items=items, step_done=is_last
            )
            yield header + bytes(data[body : body + int(row["body_bytes"])])
        step += stride


def plain_steps(manifest: Manifest, query: dict[str, str]) -> list[tuple[list[int], list[list[int]], bool]]:
    """Every loop step that can be served, by the rules, in plain lists: (packs of its optimiser step, packs
    of each rank with -1 for a filler, whether the optimiser step is done)."""
    world_size, per_step, epoch, offset = (
        int(query[name]) for name in ("world_size", "packs_per_step", "epoch", "offset")
    )
    seed = int(query["shuffle_seed"]) if "shuffle_seed" in query else None
    if epoch > 0 and manifest.finished is None:
        return []
    numbers = manifest.rows["step"].tolist()
    found: list[tuple[list[int], list[list[int]], bool]] = []
    if numbers and numbers[0] >= 0:
        groups = [list(group) for _, group in itertools.groupby(range(len(numbers)), numbers.__getitem__)]
        ids = np.arange(len(groups))
        for which in order.pack_at(ids, num_packs=len(ids), epoch=epoch, shuffle_seed=seed):
            group = groups[which]
            left = group[min(offset, len(group)) :]
            offset = max(0, offset - len(group))
            while left:
                mine, left = left[:world_size], left[world_size:]
                ranks = [[pack] for pack in mine] + [[-1]] * (world_size - len(mine))
                found.append((group, ranks, not left))
        return found
    ids = np.arange(len(numbers))
    packs = order.pack_at(ids, num_packs=len(ids), epoch=epoch, shuffle_seed=seed).tolist()[offset:]
    size = world_size * per_step
    for first in range(0, len(packs), size):
        whole = packs[first : first + size]
        if len(whole) < size and not (manifest.finished and query["tail"] == "pad"):
            break
        filled = whole + [-1] * (size - len(whole))
        found.append((whole, [filled[r * per_step : (r + 1) * per_step] for r in range(world_size)], True))
    return found


def _reset(connection: socket.socket) -> None:
    """Close with a TCP reset."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
