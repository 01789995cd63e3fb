"""Traces: from the training program through a request and its packing to partitions, and off by default."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from packs import build_dataset, numbered_packs
from serving import running

from packer import logs, traces
from packer.runners import InlineRunner
from trainer_client import PackedStream

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collected(monkeypatch):
    """An OTLP collector; gives a function that ends the tracer and returns its spans by name."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            sent = ExportTraceServiceRequest.FromString(body)
            spans.extend(one for r in sent.resource_spans for s in r.scope_spans for one in s.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    traces._tracer.cache_clear()

    def end():
        traces._tracer().span_processor.shutdown()
        return {one.name: one for one in spans}

    yield end
    traces._tracer.cache_clear()
    server.shutdown()
    thread.join()
    server.server_close()


def attributes(span):
    return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}


def test_a_post_its_packing_and_its_partitions_are_one_trace(collected, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2, 3]}\n' * 20)
    spec = {"source": {"paths": [str(tmp_path / "rows.jsonl")]}, "packing": {"max_tokens": 8}}
    headers = {"X-Request-Id": "job-7", "traceparent": PARENT}
    with running(tmp_path / "store", runner=InlineRunner(), data_roots=(tmp_path,)) as server:
        posted = server.request("POST", "/v1/datasets", headers=headers, body=json.dumps(spec).encode())
        dataset = posted.json["id"]
        server.wait_for_state(dataset, "ready")
    spans = collected()
    request, job, partition = (spans[n] for n in ("POST /v1/datasets", "pack dataset", "pack partition"))
    assert {one.trace_id.hex() for one in (request, job, partition)} == {PARENT.split("-")[1]}
    assert request.parent_span_id.hex() == PARENT.split("-")[2]
    assert job.parent_span_id == request.span_id
    assert partition.parent_span_id == job.span_id
    assert attributes(request)["padfree.request_id"] == "job-7"
    assert attributes(request)["http.response.status_code"] == 202
    assert attributes(partition)["padfree.dataset"] == dataset


def test_a_stream_belongs_to_the_span_of_the_training_program(collected, tmp_path):
    from opentelemetry import context, trace

    dataset = build_dataset(tmp_path, numbered_packs(6), packs_per_shard=3)
    _, trace_id, span_id, _ = PARENT.split("-")
    own = trace.SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=trace.TraceFlags(1)
    )
    with running(tmp_path) as server:
        token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(own)))
        try:
            assert len(list(PackedStream(server.url, dataset=dataset, report_s=None))) == 6
        finally:
            context.detach(token)
    stream = collected()["GET /v1/datasets/{dataset}/stream"]
    assert (stream.trace_id.hex(), stream.parent_span_id.hex()) == (trace_id, span_id)


def test_an_error_is_told_and_goes_on_to_its_caller(collected):
    def pack():
        with traces.span("pack partition", partition=3):
            assert traces.valid_parent(logs.traceparent.get())
            raise ValueError("bad row")

    with pytest.raises(ValueError, match="bad row"):
        pack()
    assert logs.traceparent.get() is None
    span = collected()["pack partition"]
    assert (span.status.code, span.status.message) == (2, "ValueError: bad row")


def test_without_a_collector_there_are_none(monkeypatch):
    for name in traces._ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    traces._tracer.cache_clear()
    with logs.using({"traceparent": PARENT}), traces.span("x") as span:
        span.set_attribute("a", 1)
        assert logs.traceparent.get() == PARENT  # what the caller sent goes on all the same


@pytest.mark.parametrize(
    "given", ["", "00-x", PARENT + "-0", PARENT.upper(), PARENT.replace("b7ad6b7169203331", 16 * "0")]
)
def test_what_is_no_traceparent_is_not_taken(given):
    assert traces.valid_parent(given) is None
    assert traces.valid_parent(PARENT) == PARENT
