"""A small server of Google Cloud Storage's JSON protocol, for tests: metadata, content with ranges, listing.

Read-only. Objects are the files of a folder, as BUCKET/KEY. A process of its own: pyarrow's client waits for
some answers without letting go of the interpreter's lock.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_METADATA = re.compile(r"/storage/v1/b/([^/]+)(/o(?:/([^/]+))?)?")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path

    @property
    def objects(self) -> dict[str, bytes]:
        """BUCKET/KEY: content."""
        files = (path for path in self.root.rglob("*") if path.is_file())
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in files}

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        metadata = _METADATA.fullmatch(path)
        if metadata is None:
            self._send(404, b"")
            return
        bucket, objects, name = metadata.groups()
        key = f"{bucket}/{urllib.parse.unquote(name or '')}"
        if name is None and bucket not in {one.split("/")[0] for one in self.objects}:
            self._send(404, b"{}")
        elif objects is None:
            self._send_json({"kind": "storage#bucket", "id": bucket, "name": bucket, "metageneration": "1"})
        elif name is None:
            prefix = f"{bucket}/{options.get('prefix', '')}"
            items = [self._about(one) for one in sorted(self.objects) if one.startswith(prefix)]
            self._send_json({"kind": "storage#objects", "items": items})
        elif key not in self.objects:
            self._send(404, b"{}")
        elif options.get("alt") == "media":
            self._content(key)
        else:
            self._send_json(self._about(key))

    def _about(self, key: str) -> dict[str, Any]:
        bucket, _, name = key.partition("/")
        digest = hashlib.md5(self.objects[key])
        generation = str(int(digest.hexdigest()[:12], 16))
        return {
            "kind": "storage#object",
            "id": f"{key}/{generation}",
            "bucket": bucket,
            "name": name,
            "generation": generation,
            "metageneration": "1",
            "size": str(len(self.objects[key])),
            "md5Hash": base64.b64encode(digest.digest()).decode(),
            "etag": base64.b64encode(generation.encode()).decode(),
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "updated": "2026-01-01T00:00:00.000Z",
        }

    def _content(self, key: str) -> None:
        if key not in self.objects:
            self._send(404, b"")
            return
        data = self.objects[key]
        headers = {"x-goog-generation": self._about(key)["generation"]}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            self._send(200, data, headers)
            return
        start, end = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        if start >= len(data):
            self._send(416, b"")
            return
        headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
        self._send(206, data[start : end + 1], headers)

    def _send_json(self, document: dict[str, Any]) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def gcs_server(root: Path) -> Iterator[str]:
    """Serve the folder `root`, which may change meanwhile; gives "host:port"."""
    with subprocess.Popen(
        [sys.executable, __file__, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()  # which ends it, as does the end of this process
            process.wait(60)


def _main() -> None:
    handler = type("Handler", (_Handler,), {"root": Path(sys.argv[1])})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _main()
