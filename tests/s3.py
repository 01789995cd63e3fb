"""A small server of the S3 protocol, for tests: objects in memory, with the calls that pyarrow makes.

GET with ranges, HEAD, PUT, uploads in parts, DELETE of one and of many, listing by pages.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import BinaryIO
from xml.sax.saxutils import escape, unescape

import pytest

Objects = dict[str, bytes]  # "bucket/key": content

_PAGE = 100  # keys in one answer; small, so that the tests see several
_XML = {"Content-Type": "application/xml"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects: Objects
    calls: list[str]
    refused: set[str]
    parts: dict[str, dict[int, bytes]]

    def do_HEAD(self) -> None:
        self._answer()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD  # noqa: N815

    def _answer(self) -> None:
        path, _, query = self.path.partition("?")
        key = urllib.parse.unquote(path).lstrip("/")
        bucket, _, name = key.partition("/")
        options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        body = self._body()
        self.calls.append(f"{self.command} {key}")
        if self.command in self.refused or any(
            key.startswith(f"{one}/") or key == one for one in self.refused
        ):
            self._error(403, "AccessDenied")
        elif bucket not in {key.split("/")[0] for key in self.objects}:
            self._error(404, "NoSuchBucket")
        elif not name:
            self._bucket(bucket, options, body)
        elif self.command in ("PUT", "POST"):
            self._write(key, options, body)
        elif self.command == "DELETE":
            self.objects.pop(key, None)
            self._send(204, b"", {})
        elif key not in self.objects:
            self._error(404, "NoSuchKey")
        else:
            self._object(self.objects[key])

    def _body(self) -> bytes:
        """The body, out of HTTP's chunks and out of those of S3 within."""
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = _chunks(self.rfile)
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return (
            _chunks(io.BytesIO(body)) if "aws-chunked" in self.headers.get("Content-Encoding", "") else body
        )

    def _bucket(self, bucket: str, options: dict[str, str], body: bytes) -> None:
        if self.command == "POST" and "delete" in options:
            for key in re.findall(r"<Key>(.*?)</Key>", body.decode()):
                self.objects.pop(f"{bucket}/{unescape(key, {'&quot;': chr(34), '&apos;': chr(39)})}", None)
            self._send(200, b"<DeleteResult></DeleteResult>", _XML)
        else:
            self._send(200, self._list(bucket, options) if self.command == "GET" else b"", _XML)

    def _write(self, key: str, options: dict[str, str], body: bytes) -> None:
        upload = options.get("uploadId", "")
        if "uploads" in options:
            upload = f"upload-{len(self.parts)}"
            self.parts[upload] = {}
            tag = f"<UploadId>{upload}</UploadId>"
            self._send(
                200, f"<InitiateMultipartUploadResult>{tag}</InitiateMultipartUploadResult>".encode(), _XML
            )
        elif self.command == "PUT" and upload:
            self.parts[upload][int(options["partNumber"])] = body
            self._send(200, b"", {"ETag": _etag(body)})
        elif upload:
            self.objects[key] = b"".join(data for _, data in sorted(self.parts.pop(upload).items()))
            tag = f"<ETag>{escape(_etag(self.objects[key]))}</ETag>"
            self._send(
                200, f"<CompleteMultipartUploadResult>{tag}</CompleteMultipartUploadResult>".encode(), _XML
            )
        else:
            self.objects[key] = body
            self._send(200, b"", {"ETag": _etag(body)})

    def _object(self, data: bytes) -> None:
        headers = {
            "ETag": _etag(data),
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
            "Accept-Ranges": "bytes",
        }
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            self._send(200, data, headers)
            return
        start, end = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
        self._send(206, data[start : end + 1], headers)

    def _list(self, bucket: str, options: dict[str, str]) -> bytes:
        prefix, delimiter = options.get("prefix", ""), options.get("delimiter", "")
        after = options.get("continuation-token", "")
        names = sorted(key.split("/", 1)[1] for key in list(self.objects) if key.startswith(f"{bucket}/"))
        found: dict[str, str] = {}  # what is listed: its XML
        for name in names:
            rest = name[len(prefix) :]
            if not name or not name.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                common = prefix + rest.split(delimiter)[0] + delimiter
                found[common] = f"<CommonPrefixes><Prefix>{escape(common)}</Prefix></CommonPrefixes>"
            else:
                size = len(self.objects.get(f"{bucket}/{name}", b""))
                found[name] = (
                    f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size>"
                    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                )
        left = [name for name in sorted(found) if name > after]
        page = left[: min(_PAGE, int(options.get("max-keys", _PAGE)))]
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if page != left else ""
        return (
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<IsTruncated>{'true' if more else 'false'}</IsTruncated><KeyCount>{len(page)}</KeyCount>{more}"
            f"{''.join(found[name] for name in page)}</ListBucketResult>"
        ).encode()

    def _error(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self._send(status, text, _XML)

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


def _chunks(file: BinaryIO) -> bytes:
    """SIZE[;signature], a line's end, as many bytes, a line's end; the last has none."""
    parts = []
    while size := int(file.readline().split(b";")[0], 16):
        parts.append(file.read(size))
        file.readline()
    return b"".join(parts)


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


@contextlib.contextmanager
def s3_server(
    objects: Objects, *, calls: list[str] | None = None, refused: set[str] | None = None
) -> Iterator[str]:
    """Serve `objects` (may change while it runs); yields the endpoint's url.

    A bucket is there as soon as an object is, for which the key "" will do ("bucket/"). `calls` gets each
    call as "METHOD bucket/key"; methods in `refused`, and calls for "bucket/key" or what is below, get 403.
    """
    about = {"objects": objects, "parts": {}}
    about |= {"calls": [] if calls is None else calls, "refused": set() if refused is None else refused}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), about))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environment(endpoint: str) -> dict[str, str]:
    """The variables with which pyarrow finds the server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextlib.contextmanager
def use(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process find the server, and no other."""
    from packer.store import objects, remote

    for name, value in environment(endpoint).items():
        monkeypatch.setenv(name, value)
    for kept in (remote.filesystem, objects._shared):
        kept.cache_clear()
    try:
        yield
    finally:
        for kept in (remote.filesystem, objects._shared):
            kept.cache_clear()
