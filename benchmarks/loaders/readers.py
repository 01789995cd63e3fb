"""What one reader process does: `python -m loaders.readers NAME JSON` prints one JSON object.

tokens and num_bytes (as they came over the wire or from files), seconds from the first byte asked for to
the last batch, cpu_s in that time, first_batch_s, peak_mib of this process.
"""

from __future__ import annotations

import http.client
import json
import selectors
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BUFFER_BYTES, PIECE_BYTES = 1 << 20, 16 << 10


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(start: tuple[float, float]) -> dict[str, Any]:
    return {"seconds": time.perf_counter() - start[0], "cpu_s": time.process_time() - start[1]}


def padfree(source: str, dataset: str, epochs: int, first_epoch: int = 0, **options: Any) -> dict[str, Any]:
    """A PackedStream at its defaults; of every batch a trainer's arrays are taken."""
    from loaders.taking import Taker

    from trainer_client import PackedStream

    with PackedStream(source, dataset=dataset, epochs=first_epoch + epochs, **options) as stream:
        if first_epoch:
            stream.load_state_dict({**stream.state_dict(), "epoch": first_epoch})
        since, first, taker = _now(), 0.0, Taker()
        for batch in stream:
            taker.take(batch.input_ids, batch.labels, batch.position_ids, batch.cu_seqlens)
            first = first or time.perf_counter() - since[0]
        return {"tokens": taker.num_tokens, "first_batch_s": first, **_since(since)}


def first_batch(source: str, dataset: str, epoch: int) -> dict[str, Any]:
    """How long the first batch of an epoch takes, on a stream that was made but not opened."""
    from trainer_client import PackedStream

    times = []
    for _ in range(5):
        with PackedStream(source, dataset=dataset, epochs=None) as stream:
            stream.load_state_dict({**stream.state_dict(), "epoch": epoch})
            start = time.perf_counter()
            next(iter(stream))
            times.append(time.perf_counter() - start)
    return {"times": times}


def raw_socket(port: int, num_bytes: int) -> dict[str, Any]:
    """Bytes from a socket into one buffer."""
    buffer, got = memoryview(bytearray(BUFFER_BYTES)), 0
    since = _now()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while got < num_bytes:
            got += connection.recv_into(buffer)
    return {"num_bytes": got, **_since(since)}


def files_over_http(port: int, paths: list[str]) -> dict[str, Any]:
    """Whole answers, one after the other on one connection, into the buffer that padfree's client has."""
    from trainer_client.body import Body

    got, since = 0, _now()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for path in paths:
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.status == 200, (path, response.status)
        body = Body(response)
        while count := len(body.ahead(PIECE_BYTES)):
            body.take(count)
            got += count
        body.finish()
    return {"num_bytes": got, **_since(since)}


def drain(port: int, paths: list[str]) -> dict[str, Any]:
    """Many answers at once, each on a connection of its own; what comes is counted and let go."""
    buffer, got = memoryview(bytearray(BUFFER_BYTES)), 0
    since = _now()
    with selectors.DefaultSelector() as selector:
        for path in paths:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                count = key.fileobj.recv_into(buffer)  # type: ignore[union-attr]
                got += count
                if not count:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
    return {"num_bytes": got, **_since(since)}


def serve_bytes(paths: list[str], repeat: int) -> dict[str, Any]:
    """The other end of `raw_socket`: the files from memory, to whoever connects. Prints its port."""
    data = [Path(path).read_bytes() for path in paths]
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            connection, _ = server.accept()
            with connection:
                for _ in range(repeat):
                    for one in data:
                        connection.sendall(one)


READERS: dict[str, Callable[..., dict[str, Any]]] = {
    one.__name__: one for one in (padfree, first_batch, raw_socket, files_over_http, drain, serve_bytes)
}


def peak_mib() -> float:
    """Of this process alone; getrusage would count the process that it was forked from."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def main() -> None:
    name, options = sys.argv[1], json.loads(sys.argv[2])
    if name in READERS:
        read = READERS[name]
    else:
        from loaders import peers

        read = peers.READERS[name]
    found = read(**options)
    found["peak_mib"] = peak_mib()
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
