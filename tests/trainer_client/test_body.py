"""The body of a response: taken apart whatever way it was cut to pieces on its way."""

from __future__ import annotations

import http.client
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trainer_client.body import Body


@contextmanager
def answered(raw: list[bytes]) -> Iterator[tuple[http.client.HTTPResponse, socket.socket]]:
    """A response whose bytes come in these pieces, and the server's end of its connection."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)

    def send() -> None:
        for piece in raw:
            theirs.sendall(piece)

    sending = threading.Thread(target=send)
    sending.start()
    with ours, theirs:
        response = http.client.HTTPResponse(ours)
        response.begin()
        yield response, theirs
        sending.join()


def cut(data: bytes, rng: random.Random, longest: int) -> list[bytes]:
    pieces, at = [], 0
    while at < len(data):
        size = rng.randint(1, longest)
        pieces.append(data[at : at + size])
        at += size
    return pieces


def chunked(data: list[bytes], end: bytes = b"0\r\n\r\n") -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x;ext=1\r\n%s\r\n" % (len(one), one) for one in data) + end


def with_length(data: bytes, announced: int | None = None) -> bytes:
    length = len(data) if announced is None else announced
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length + data


@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_every_byte_comes_once_and_in_order(seed: int, is_chunked: bool) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(700_000)
    raw = chunked(cut(data, rng, rng.choice([9, 9_000, 300_000]))) if is_chunked else with_length(data)
    got, longest = [], rng.choice([50, 20_000, 400_000])
    with answered(cut(raw, rng, rng.choice([700, 50_000, 10**6]))) as (response, _):
        body = Body(response)
        left = len(data)
        while left:
            size = min(rng.randint(1, longest), left)
            view = body.ahead(size)
            assert bytes(view) == bytes(body.ahead(size))  # looking takes nothing
            got.append(bytes(view))
            body.take(size)
            left -= size
        assert bytes(body.ahead(5)) == b""
        body.finish()
        assert response.isclosed()
    assert b"".join(got) == data


@pytest.mark.parametrize("size", [1, 5_000, 8_192, 8_193, 100_000])
def test_it_never_waits_for_more_than_is_asked_for(size: int) -> None:
    data = random.Random(0).randbytes(size)
    for raw in (chunked([data], end=b""), with_length(data, announced=10**7)):
        with answered([raw]) as (response, theirs):  # nothing more comes, and nobody hangs up
            body = Body(response)
            for at in range(0, size, 700):
                part = data[at : at + 700]
                assert bytes(body.ahead(len(part))) == part
                body.take(len(part))
            response.fp.raw._sock.settimeout(0.05)
            with pytest.raises(TimeoutError):
                body.ahead(1)
            assert body.num_ready == 0
            theirs.close()


@pytest.mark.parametrize("keep", [60, 1_000, 9_000, 100_000])
def test_a_body_that_is_cut_off_is_shorter(keep: int) -> None:
    data = random.Random(1).randbytes(200_000)
    for raw in (chunked([data[:500], data[500:]]), with_length(data)):
        with answered([raw[:keep]]) as (response, theirs):
            theirs.shutdown(socket.SHUT_WR)
            found = Body(response).ahead(len(data))
            assert len(found) < keep
            assert data.startswith(bytes(found))


def test_what_is_no_chunk_is_told() -> None:
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nhello\r\n"
    with answered([raw]) as (response, _), pytest.raises(http.client.HTTPException, match="hello"):
        Body(response).ahead(1)


def test_trailers_are_read_over() -> None:
    raw = chunked([b"abc"], end=b"0\r\nX-Sum: 1\r\n\r\n")
    with answered([raw, b"NEXT"]) as (response, theirs):
        file = response.fp
        body = Body(response)
        assert bytes(body.ahead(3)) == b"abc"
        body.take(3)
        assert bytes(body.ahead(1)) == b""
        assert file.read(4) == b"NEXT"
        theirs.close()
