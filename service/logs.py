"""How the service logs: one line an event, for people or as JSON for machines."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from service.requests import dataset_id, request_id
from service.settings import Settings

_UNFINISHED = "ASGI callable returned without completing response."


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        name = request_id.get()
        return f"{text} [{name}]" if name else text


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        partition = getattr(record, "partition", None)
        dataset = getattr(record, "dataset", None) or dataset_id.get()
        fields = {"request_id": request_id.get(), "dataset": dataset, "partition": partition}
        line |= {name: value for name, value in fields.items() if value is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _is_news(record: logging.LogRecord) -> bool:
    # What uvicorn says of an answer that was cut off on purpose; the reason is logged by service.sending.
    return record.getMessage() != _UNFINISHED


def configure(settings: Settings) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    text = _Text("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_Json() if settings.log_format == "json" else text)
    handler.addFilter(_is_news)
    for name in ("padfree", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(settings.log_level.upper() if name == "padfree" else logging.WARNING)
