"""A proxy that holds answers back, between a client and a server of the same machine.

    with BufferingProxy(server.port) as proxy:
        PackedStream(proxy.url, dataset=dataset)

sends an answer on when it is whole; with `piece_bytes` whenever it holds so many. One request at a time and
connection, each over a connection of its own to the server.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import select
import socket
import threading
from typing import Any

_READ_BYTES = 4096


class BufferingProxy:
    """piece_bytes: what is held back at most; None: the whole answer.
    most_bytes: an answer of more is not sent on but 502.
    bytes_a_second: how fast the server's answers come.
    drops: for one answer of a stream after the other the share of it that is sent before the connection is
        reset; None lets one through. Only for whole answers.
    """

    def __init__(
        self,
        port: int,
        *,
        piece_bytes: int | None = None,
        most_bytes: int | None = None,
        bytes_a_second: float | None = None,
        drops: list[float | None] | None = None,
    ) -> None:
        self.drops = drops or []
        self.num_dropped = self.num_refused = self.num_streams = self.most_held_bytes = 0
        self._server = ("127.0.0.1", port)
        self._piece_bytes, self._most_bytes = piece_bytes, most_bytes
        self._bytes_a_second = bytes_a_second
        self._stopping = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> BufferingProxy:
        self._listener.settimeout(0.05)
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        self._listener.close()

    def _start(self, run: Any, *args: Any) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                self._start(self._serve, self._listener.accept()[0])

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            while (request := self._request(client)) is not None:
                with socket.create_connection(self._server) as server:
                    server.sendall(request)
                    if not self._answer(client, server, b"/stream?" in request.partition(b"\r\n")[0]):
                        return

    def _request(self, client: socket.socket) -> bytes | None:
        """The client's next request, asking the server to close behind its answer. None: it has gone."""
        found = b""
        while not self._stopping.is_set():
            if not select.select([client], [], [], 0.05)[0]:
                continue
            data = client.recv(_READ_BYTES)
            found += data
            head, end, body = found.partition(b"\r\n\r\n")
            if not data:
                return None
            if end:
                fields = http.client.parse_headers(io.BytesIO(head.partition(b"\r\n")[2] + end))
                if len(body) >= int(fields.get("Content-Length", 0)):
                    return head + b"\r\nConnection: close" + end + body
        return None

    def _answer(self, client: socket.socket, server: socket.socket, is_stream: bool) -> bool:
        """Send the server's answer on. Whether the client's connection can be used again."""
        self.num_streams += is_stream
        held = bytearray()
        while not self._stopping.is_set():
            ready = select.select([client, server], [], [], 0.05)[0]
            if client in ready:
                return False  # it has gone, and so does the connection to the server
            if not ready:
                continue
            data = server.recv(_READ_BYTES)
            held += data
            self.most_held_bytes = max(self.most_held_bytes, len(held))
            if self._piece_bytes is not None:
                if not data or len(held) >= self._piece_bytes:
                    client.sendall(held)
                    held.clear()
                if not data:
                    return False
            elif not data:
                return self._send_whole(client, bytes(held), is_stream)
            elif self._most_bytes is not None and len(held) > self._most_bytes:
                self.num_refused += 1
                client.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
                return True
            if self._bytes_a_second is not None:
                self._stopping.wait(len(data) / self._bytes_a_second)
        return False

    def _send_whole(self, client: socket.socket, raw: bytes, is_stream: bool) -> bool:
        answer = http.client.HTTPResponse(_Ended(raw))  # type: ignore[arg-type]
        answer.begin()
        body = answer.read()
        head = f"HTTP/1.1 {answer.status} {answer.reason}\r\nContent-Length: {len(body)}\r\n\r\n"
        share = self.drops.pop(0) if is_stream and self.drops else None
        if share is None:
            client.sendall(head.encode() + body)
            return True
        self.num_dropped += 1
        client.sendall(head.encode() + body[: int(share * len(body))])
        return False


class _Ended:
    """What http.client needs of a socket that has brought everything."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)
