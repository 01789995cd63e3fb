"""A small server of the S3 protocol, for tests: GET with ranges, HEAD, and listing; objects in memory."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

Objects = dict[str, bytes]  # "bucket/key": content


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: Objects

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path, _, query = self.path.partition("?")
        key = urllib.parse.unquote(path).lstrip("/")
        bucket, _, name = key.partition("/")
        options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        if bucket not in {key.split("/")[0] for key in self.objects}:
            self._error("NoSuchBucket", body)
        elif not name:
            self._send(
                200, self._list(bucket, options) if body else b"", {"Content-Type": "application/xml"}, body
            )
        elif key not in self.objects:
            self._error("NoSuchKey", body)
        else:
            self._object(self.objects[key], body)

    def _object(self, data: bytes, body: bool) -> None:
        headers = {
            "ETag": f'"{hashlib.md5(data).hexdigest()}"',
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
            "Accept-Ranges": "bytes",
        }
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            self._send(200, data, headers, body)
            return
        start, end = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
        self._send(206, data[start : end + 1], headers, body)

    def _list(self, bucket: str, options: dict[str, str]) -> bytes:
        prefix, delimiter = options.get("prefix", ""), options.get("delimiter", "")
        names = sorted(key.split("/", 1)[1] for key in self.objects if key.startswith(f"{bucket}/"))
        contents, common = [], []
        for name in names:
            if not name.startswith(prefix):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                common.append(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                contents.append(name)
        items = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.objects[f'{bucket}/{name}'])}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name in contents
        )
        folders = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            for name in dict.fromkeys(common)
        )
        return (
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false"
            f"</IsTruncated><KeyCount>{len(contents)}</KeyCount>{items}{folders}</ListBucketResult>"
        ).encode()

    def _error(self, code: str, body: bool) -> None:
        text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self._send(404, text if body else b"", {"Content-Type": "application/xml"}, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def s3_server(objects: Objects) -> Iterator[str]:
    """Serve `objects` (may change while it runs); yields the endpoint's url."""
    handler = type("Handler", (_Handler,), {"objects": objects})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
