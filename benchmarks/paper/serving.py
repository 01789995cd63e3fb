"""Datasets packed by padfree, and a padfree service that streams them, on this machine."""

from __future__ import annotations

import gzip
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from paper.settings import Source

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "examples" / "tokenizer"
_ROOM = 96  # a text that was cut may be split into a few tokens more at its end


def prepare(source: Source, data: Path, folder: Path) -> Path:
    """The source's file, with texts (the code) cut to the maximum sequence length, as padding would cut
    them. Prompts with completions are shorter; in a dry run (max_rows) those that are not are left out."""
    out = folder / source.file
    if out.exists():
        return out
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    folder.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    with (
        gzip.open(data / source.file, "rt", encoding="utf-8") as rows,
        gzip.open(partial, "wt", encoding="utf-8", compresslevel=6) as kept,
    ):
        written = 0
        for line in rows:
            row = json.loads(line)
            if "text" in row:
                row = {"text": _cut(row["text"], tokenizer, source.max_example)}
            elif source.max_rows is not None and len(line) > source.max_example:
                continue
            kept.write(json.dumps(row, ensure_ascii=False) + "\n")
            written += 1
            if written == source.max_rows:
                break
    partial.rename(out)
    return out


def _cut(text: str, tokenizer: Any, max_tokens: int) -> str:
    limit = max_tokens - _ROOM
    ends = tokenizer.encode(text[: limit * 12], add_special_tokens=False).offsets
    return text if len(ends) <= limit else text[: ends[limit - 1][1]]


def pack(source: Source, file: Path, store: Path, packing: Mapping[str, Any]) -> dict[str, Any]:
    """Pack one dataset of the source in a process of its own; returns its view."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in packing.items()]
    options += [f"--field={ours}={theirs}" for ours, theirs in source.spec.get("fields", {}).items()]
    command = ["pack", str(file), "--tokenizer", str(TOKENIZER), "--store", str(store), "--workers=0"]
    ran = subprocess.run(
        [sys.executable, "-m", "padfree", *command, *options, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"packing {source.name} as {packing} failed:\n{ran.stderr[-2000:]}")
    return json.loads(ran.stdout.splitlines()[-1])


class Service:
    """A padfree service in a process of its own, on a free port."""

    def __init__(self, store: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._store, self._log, self._port = store, log, port

    def __enter__(self) -> Service:
        options = [f"--port={self._port}", f"--store={self._store}", "--workers=0"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "padfree", "serve", *options],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + 120
        while time.monotonic() < until and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/readyz", timeout=5):
                    return self
            except OSError:
                time.sleep(0.1)
        self.__exit__(None, None, None)
        raise RuntimeError(f"the service is not ready:\n{self._log.read_text()[-2000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
