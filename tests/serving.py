"""A real server for tests, and small clients of it.

    with running(store_root) as server:
        answer = server.get("/healthz")

The server runs in a thread of this process, on a port of its own. Tests of signals use `spawned`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import uvicorn

from packer import shard
from packer.runners import Runner
from packer.shard import Pack, Stamp
from service.app import create_app
from service.main import bind, server_for
from service.settings import Settings
from service.state import Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    headers: Mapping[str, str]  # names in small letters
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    port: int
    service: Service | None = None
    process: subprocess.Popen[bytes] | None = None
    log: IO[bytes] | None = None  # what a process of its own writes on standard error

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def said(self) -> str:
        """What a process of its own has written on standard error."""
        return _said(self.log)

    def open(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body=body, headers=dict(headers or {}))
        return connection, connection.getresponse()

    def request(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> Answer:
        connection, response = self.open(method, path, headers=headers, body=body)
        with contextlib.closing(connection):
            return Answer(
                status=response.status,
                headers={name.lower(): value for name, value in response.getheaders()},
                body=response.read(),
            )

    def get(self, path: str, **headers: str) -> Answer:
        """GET; `Range="bytes=0-1"`, `If_None_Match=…` and the like are headers."""
        return self.request("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})

    def post_spec(self, document: Any) -> Answer:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        return self.request("POST", "/v1/datasets", body=body, headers={"Content-Type": "application/json"})

    def stream(self, dataset: str, **query: Any) -> Answer:
        return self.get(f"/v1/datasets/{dataset}/stream?{urllib.parse.urlencode(query)}")

    def wait_for_state(self, dataset: str, *states: str, timeout_s: float = 120) -> dict[str, Any]:
        def view() -> dict[str, Any] | None:
            found = self.get(f"/v1/datasets/{dataset}").json
            return found if found.get("state") in states else None

        return wait_for(view, timeout_s=timeout_s)


def wait_for(found: Callable[[], Any], *, timeout_s: float = 120) -> Any:
    """What `found()` returns, once that is true. The limit is for what never comes, on a slow machine too."""
    until = time.monotonic() + timeout_s
    while not (value := found()):
        if time.monotonic() > until:
            raise AssertionError(f"not so after {timeout_s} s: {found}")
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def running(
    store: Path | str, *, runner: Runner | Callable[[], Runner] | None = None, **settings: Any
) -> Iterator[Server]:
    """A server on `store` in a thread, started; without a runner it only serves."""
    chosen = Settings.from_environment({}, store=store, port=0, **settings)
    app = create_app(chosen, runner)
    listener = bind(chosen)
    server: uvicorn.Server = server_for(app, chosen)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        # Until then its start may be writing to the store, whose files a test may be about to damage.
        wait_for(lambda: server.started or not thread.is_alive())
        yield Server(port=listener.getsockname()[1], service=app.state.padfree)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@contextlib.contextmanager
def spawned(
    store: Path | str, *, port: int = 0, data_root: Path | None = None, **environ: str
) -> Iterator[Server]:
    """`padfree serve` without Ray in a process of its own; killed at the end where it still runs."""
    port = port or free_port()
    command = [sys.executable, "-m", "padfree", "serve", "--workers", "0", "--port", str(port)]
    command += ["--store", str(store), "--data-root", str(data_root or store)]
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed below. A pipe that nobody reads would stop it
    process = subprocess.Popen(command, env={**os.environ, **environ}, stderr=log)
    try:
        server = Server(port=port, process=process, log=log)
        wait_for(lambda: process.poll() is not None or _answers(server))
        assert process.poll() is None, _said(log)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        log.close()


def _said(log: IO[bytes] | None) -> str:
    assert log is not None
    log.seek(0)
    return log.read().decode()


def _answers(server: Server) -> bool:
    try:
        return server.get("/readyz").status == 200
    except OSError:
        return False


def free_port() -> int:
    """A port for a process to come. It is none of those that the system gives to outgoing connections, or to
    whoever asks for any, nor of Ray's workers: so nobody takes it until then."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One record batch message of a stream, checked."""

    stamp: Stamp
    packs: list[Pack]
    header: bytes
    body: bytes


def messages(body: bytes) -> list[Message]:
    """The messages of a complete stream. Fails where it has no end, or a message is damaged."""
    found = []
    view = memoryview(body)
    at = 8 + int.from_bytes(view[4:8], "little")  # the schema
    while bytes(view[at : at + 8]) != shard.END_OF_STREAM:
        header_bytes = 8 + int.from_bytes(view[at + 4 : at + 8], "little")
        size = header_bytes + shard.read_stamp(view[at : at + header_bytes]).body_bytes
        message = view[at : at + size]
        found.append(
            Message(
                stamp=shard.verify_message(message, header_bytes),
                packs=shard.decode_message(message),
                header=bytes(message[:header_bytes]),
                body=bytes(message[header_bytes:]),
            )
        )
        at += size
    assert at + 8 == len(view)
    return found


def packs_by_arrow(body: bytes) -> list[list[Pack]]:
    """The packs of each record batch, read by nothing but pyarrow."""
    return [shard.decode_batch(batch) for batch in pa.ipc.open_stream(body)]
