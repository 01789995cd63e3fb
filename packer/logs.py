"""Log lines that carry ids, so that one request can be followed from the client to a worker and back.

Whoever begins something says what it is about (`using`); every line that is logged meanwhile carries it,
here and, since a runner takes the ids along with each task, on the workers. The ids:

    request_id   of the HTTP request that asked for it (X-Request-Id), the client's own where it sent one
    job          of one run of packing: posting again what failed gives another
    dataset, partition
    traceparent  of the span that this is part of (packer.traces), as W3C writes it
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
job_id: ContextVar[str | None] = ContextVar("job_id", default=None)
dataset_id: ContextVar[str | None] = ContextVar("dataset_id", default=None)
partition_number: ContextVar[int | None] = ContextVar("partition_number", default=None)
traceparent: ContextVar[str | None] = ContextVar("traceparent", default=None)

_IDS: dict[str, ContextVar[Any]] = {
    "request_id": request_id,
    "job": job_id,
    "dataset": dataset_id,
    "partition": partition_number,
    "traceparent": traceparent,
}
_EXTRAS = (*_IDS, "worker")  # what `extra` of one line may say; it wins over what is in use


def ids() -> dict[str, Any]:
    """What is in use here: the ids that are known, by name. Picklable, for another process."""
    return {name: value for name, variable in _IDS.items() if (value := variable.get()) is not None}


@contextlib.contextmanager
def using(given: Mapping[str, Any]) -> Iterator[None]:
    """Lines of this block carry the ids of `given` too."""
    tokens = [(_IDS[name], _IDS[name].set(value)) for name, value in given.items()]
    try:
        yield
    finally:
        for variable, token in reversed(tokens):
            variable.reset(token)


class TextFormatter(logging.Formatter):
    """A line for people; the request's id at its end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        name = request_id.get()
        return f"{text} [{name}]" if name else text


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and the ids that are known."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= ids()
        said = {name: getattr(record, name, None) for name in _EXTRAS}
        line |= {name: value for name, value in said.items() if value is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def this_worker() -> str:
    """Name of this process among all machines: host/pid."""
    return f"{socket.gethostname()}/{os.getpid()}"


def configure_worker() -> None:
    """Log JSON lines to standard error, which a runner's worker process keeps in a file of its own.

    Level: PADFREE_LOG_LEVEL, as the service's. Calling it again changes nothing.
    """
    logger = logging.getLogger("padfree")
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(_with_worker)
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(os.environ.get("PADFREE_LOG_LEVEL", "").strip().upper() or "INFO")


def _with_worker(record: logging.LogRecord) -> bool:
    record.worker = this_worker()
    return True
