"""Traces for OpenTelemetry, where somebody collects them; elsewhere nothing is imported and nothing done.

They are on where OTEL_EXPORTER_OTLP_ENDPOINT (or …_TRACES_ENDPOINT) is set and the extra `otel` is
installed. A trace goes from the training program, where that has one, through a request and the packing
it asked for to each partition on its worker: the parent (W3C's `traceparent`) is one of the ids of
packer.logs, so it goes where these go, and is in the log lines too.

The provider is our own, not the process's global one: a program that traces itself is left as it is.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, Literal, Protocol

from packer import logs

log = logging.getLogger("padfree.traces")

_GIVEN = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Span(Protocol):
    """What OpenTelemetry's span has of use here."""

    def update_name(self, name: str) -> None: ...

    def set_attribute(self, key: str, value: Any) -> None: ...


class _NoSpan:
    def update_name(self, name: str) -> None:
        pass

    def set_attribute(self, key: str, value: Any) -> None:
        pass


@contextlib.contextmanager
def span(name: str, *, kind: Literal["INTERNAL", "SERVER"] = "INTERNAL", **attributes: Any) -> Iterator[Span]:
    """A span of this block, below the one that is in use (logs.traceparent).

    An exception that leaves the block makes it an error.
    """
    tracer = _tracer()
    if tracer is None:
        yield _NoSpan()
        return
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = {"traceparent": logs.traceparent.get() or ""}
    one = tracer.start_span(
        name,
        context=TraceContextTextMapPropagator().extract(parent),
        kind=trace.SpanKind[kind],
        attributes={f"padfree.{key}": value for key, value in attributes.items() if value is not None},
    )
    try:
        with logs.using({"traceparent": _written(one.get_span_context())}):
            yield one
    except Exception as error:
        one.record_exception(error)
        one.set_status(trace.StatusCode.ERROR, f"{type(error).__name__}: {error}")
        raise
    finally:
        one.end()


def valid_parent(given: str) -> str | None:
    """A traceparent that somebody sent; None where it is none."""
    return given if _GIVEN.fullmatch(given) else None


def ambient() -> str | None:
    """The traceparent of the span that the calling program is in, where it traces itself."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    return _written(context) if context.is_valid else None


def _written(context: Any) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


@functools.cache
def _tracer() -> Any:
    """The tracer of this process, made when it is first asked for; None where traces are off."""
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning(
            "%s is set, but there is no %s: pip install '.[otel]' in padfree's checkout",
            _ENDPOINTS[0],
            error.name,
        )
        return None
    name = os.environ.get("OTEL_SERVICE_NAME") or "padfree"
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("padfree")
