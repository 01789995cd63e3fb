"""Urls behind which no padfree service is, or a proxy without one: told at once, on one line."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_service import FakeService, Fault
from packs import build_dataset, numbered_packs

from padfree.cli import main
from trainer_client import PackedStream, StreamRefused, StreamTimeout
from trainer_client.strangers import first_words

DATASET = "0" * 32
NGINX = b"""<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n<body>\r\n<center>
<h1>502 Bad Gateway</h1></center>\r\n<hr><center>nginx/1.27.0</center>\r\n</body>\r\n</html>\r\n"""


@contextlib.contextmanager
def answering(answer: bytes, wrap: Callable[[socket.socket], socket.socket] = lambda it: it) -> Iterator[int]:
    """A server that gives one answer to whatever is said. Its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), connection, wrap(connection) as wrapped:
                wrapped.recv(1 << 16)
                wrapped.sendall(answer)
                wrapped.shutdown(socket.SHUT_WR)
                while wrapped.recv(1 << 16):
                    pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def page(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


@pytest.fixture
def own_certificate() -> ssl.SSLContext:
    """A TLS server's context, whose certificate (localhost, valid for a century) nobody has signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Path(__file__).with_name("own_certificate.pem"))
    return context


@pytest.mark.parametrize("dataset", [DATASET, "by-name"])
def test_https_to_an_http_port_is_refused_at_once(dataset: str, capsys: Any) -> None:
    with answering(page("400 Bad Request", b"")) as port:
        with pytest.raises(StreamRefused, match=rf"does not speak TLS: give http://127\.0\.0\.1:{port},"):
            next(iter(PackedStream(f"https://127.0.0.1:{port}", dataset=dataset)))
        assert main(["stream", dataset, "--url", f"https://127.0.0.1:{port}"]) == 1
    assert f"does not speak TLS: give http://127.0.0.1:{port}," in capsys.readouterr().err


def test_a_certificate_that_cannot_be_verified_is_refused_at_once(
    own_certificate: ssl.SSLContext, capsys: Any
) -> None:
    def wrap(connection: socket.socket) -> socket.socket:
        return own_certificate.wrap_socket(connection, server_side=True)

    with answering(page("200 OK", b"{}"), wrap) as port:
        with pytest.raises(
            StreamRefused, match=r"certificate of .* cannot be verified \(self.signed.*SSL_CERT_FILE"
        ):
            next(iter(PackedStream(f"https://127.0.0.1:{port}", dataset=DATASET)))
        assert main(["stream", DATASET, "--url", f"https://127.0.0.1:{port}"]) == 1
    assert "SSL_CERT_FILE" in capsys.readouterr().err


@pytest.mark.parametrize("cut", [1, 4, 5, 8, 10, 11, 12, 15, 17, 30, 38, 45])
def test_an_answer_that_is_cut_off_is_no_strangers(tmp_path: Path, cut: int) -> None:
    """The very first one, also within its first line: what comes next is asked for again."""
    dataset = build_dataset(tmp_path, numbered_packs(2), packs_per_shard=2)
    service, listener = FakeService(tmp_path), socket.create_server(("127.0.0.1", 0))
    service.port = listener.getsockname()[1]

    def cut_one_and_serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(1 << 16)
            connection.sendall(page("200 OK", b'{"state": "ready"}')[:cut])
        service.start()

    thread = threading.Thread(target=cut_one_and_serve)
    thread.start()
    try:
        stream = PackedStream(service.url, dataset=dataset, timeout_s=30, report_s=None)
        assert [batch.step for batch in stream] == [0, 1]
        assert stream.stats().num_retries >= 1
    finally:
        thread.join()
        service.stop()


def test_a_port_that_speaks_no_http_is_refused_at_once(capsys: Any) -> None:
    with answering(b"SSH-2.0-OpenSSH_9.6\r\n") as port:
        with pytest.raises(StreamRefused, match=r"an HTTP server is required at .*'SSH-2\.0-OpenSSH_9\.6'"):
            next(iter(PackedStream(f"http://127.0.0.1:{port}", dataset=DATASET)))
        assert main(["stream", DATASET, "--url", f"http://127.0.0.1:{port}"]) == 1
    assert "SSH-2.0" in capsys.readouterr().err


def test_behind_a_first_answer_such_a_fault_is_taken_to_pass(tmp_path: Path, monkeypatch: Any) -> None:
    dataset = build_dataset(tmp_path, numbered_packs(6), packs_per_shard=6)
    real, left = socket.create_connection, [2]

    def connect(*args: Any, **options: Any) -> socket.socket:
        if service.requests and left[0]:
            left[0] -= 1
            error = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number")
            error.reason = "WRONG_VERSION_NUMBER"
            raise error
        return real(*args, **options)

    with FakeService(tmp_path) as service:
        service.faults = [Fault(cut_after=2000, reset=True)]
        stream = PackedStream(service.url, dataset=dataset, prefetch_steps=1)
        monkeypatch.setattr(socket, "create_connection", connect)
        assert [n for batch in stream for n in batch.example_ids.tolist()] == list(range(6))
        assert left == [0]


def test_a_proxys_page_is_told_on_one_line(caplog: Any) -> None:
    with answering(page("502 Bad Gateway", NGINX)) as port, pytest.raises(StreamTimeout) as caught:
        next(iter(PackedStream(f"http://127.0.0.1:{port}", dataset=DATASET, timeout_s=0.2)))
    for said in (str(caught.value), *caplog.messages):
        assert f"http://127.0.0.1:{port} answered 502: Bad Gateway (request " in said
        assert "<" not in said
        assert "\n" not in said


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (NGINX, 502, "Bad Gateway"),
        (
            b"<h1>Not &lt;here&gt;</h1>\n<style>h1 {}</style><p>ask\n elsewhere",
            404,
            "Not <here> ask elsewhere",
        ),
        (b"upstream connect error\nor disconnect", 503, "upstream connect error or disconnect"),
        (b"if a < b then 502 it is", 502, "if a < b then 502 it is"),
        (b"x" * 300, 500, "x" * 199 + "…"),
        (b"", 500, ""),
        (b"<html><head><title> </title></head><body>\xff down", 500, "\ufffd down"),
    ],
)
def test_the_first_words_of_a_page(body: bytes, status: int, words: str) -> None:
    assert first_words(body, status) == words


@pytest.mark.parametrize("dataset", [DATASET, "by-name"])
def test_a_url_that_names_the_api_is_told_without_it(service: FakeService, dataset: str, capsys: Any) -> None:
    url = f"{service.url}/v1"
    with pytest.raises(StreamRefused) as caught:
        next(iter(PackedStream(url, dataset=dataset)))
    assert str(caught.value).startswith(f"{url} answered 404: nothing here")
    assert str(caught.value).endswith(f"give the url without /v1: {service.url}")
    assert main(["stream", dataset, "--url", f"{url}/"]) == 1
    assert f"give the url without /v1: {service.url}\n" in capsys.readouterr().err


@pytest.mark.parametrize("dataset", [DATASET, "by-name"])
def test_a_redirect_is_told_with_where_it_leads(dataset: str) -> None:
    """Of an ingress that answers http with https: the token is not sent on to whatever it names."""
    to = f"https://padfree.example.com:8443/base/v1/datasets/{dataset}"
    answer = f"HTTP/1.1 308 Permanent Redirect\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()
    with (
        answering(answer) as port,
        pytest.raises(
            StreamRefused, match=r"redirects to https://padfree.example.com:8443/base, .*give the url"
        ),
    ):
        next(iter(PackedStream(f"http://127.0.0.1:{port}", dataset=dataset, timeout_s=5)))
