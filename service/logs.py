"""How the service logs: one line an event, for people or as JSON for machines."""

from __future__ import annotations

import logging
import sys

from packer.logs import JsonFormatter, TextFormatter
from service.settings import Settings

_UNFINISHED = "ASGI callable returned without completing response."


def _is_news(record: logging.LogRecord) -> bool:
    # What uvicorn says of an answer that was cut off on purpose; the reason is logged by service.sending.
    return record.getMessage() != _UNFINISHED


def configure(settings: Settings) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else TextFormatter())
    handler.addFilter(_is_news)
    for name in ("padfree", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(settings.log_level.upper() if name == "padfree" else logging.WARNING)
