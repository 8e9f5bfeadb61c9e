"""Spans of requests, and how they get to a collector."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from backfill.api import tracing
from backfill.api.tracing import RequestTracer
from backfill.core.clock import WallClock
from backfill.core.request import FinishReason, ServiceClass
from backfill.generation.timeline import RequestRecord
from tests.api.servers import small_server

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def record(**fields: object) -> RequestRecord:
    values = {
        "service_class": ServiceClass.OFFLINE,
        "slo": None,
        "num_prompt_tokens": 7,
        "max_tokens": 9,
        "arrived_at_s": 10.0,
        "first_scheduled_at_s": 11.0,
        "first_token_at_s": 13.0,
        "last_token_at_s": 17.0,
        "finished_at_s": 18.0,
        "finish_reason": FinishReason.LENGTH,
        "num_preemptions": 2,
        "response_id": "cmpl-1",
    }
    return RequestRecord(**{**values, **fields})  # type: ignore[arg-type]


def all_spans_of(*records: RequestRecord, provider: TracerProvider | None = None) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    provider = provider or TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = RequestTracer(provider, "m", WallClock())
    for each in records:
        tracer.record(each)
    tracer.close()
    return list(exporter.get_finished_spans())


def spans_of(*records: RequestRecord, provider: TracerProvider | None = None) -> dict[str, ReadableSpan]:
    return {span.name: span for span in all_spans_of(*records, provider=provider)}


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_request_is_a_span_with_its_queue_prefill_and_decode() -> None:
    spans = spans_of(record(traceparent=f"00-{TRACE}-{PARENT}-01"))
    assert {name: round(seconds(span), 6) for name, span in spans.items()} == {
        "queue": 1.0,
        "prefill": 2.0,
        "decode": 4.0,
        "llm_request": 8.0,
    }
    whole = spans["llm_request"]
    assert whole.parent is not None and f"{whole.parent.span_id:016x}" == PARENT
    assert {f"{span.context.trace_id:032x}" for span in spans.values() if span.context} == {TRACE}
    assert whole.attributes is not None
    assert whole.attributes["backfill.class"] == "offline" and whole.attributes["backfill.preemptions"] == 2
    assert whole.attributes["gen_ai.response.id"] == "cmpl-1"
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("length",)


def test_each_preemption_is_a_span() -> None:
    spans = all_spans_of(record(pauses=((11.5, 12.0), (14.0, 16.0))))
    first, second = (span for span in spans if span.name == "preempted")
    (whole,) = (span for span in spans if span.name == "llm_request")
    assert [seconds(first), seconds(second)] == pytest.approx([0.5, 2.0])
    assert whole.start_time is not None and whole.context is not None
    since_arrival_s = [((span.start_time or 0) - whole.start_time) / 1e9 for span in (first, second)]
    assert since_arrival_s == pytest.approx([1.5, 4.0])
    assert {span.parent and span.parent.span_id for span in (first, second)} == {whole.context.span_id}


def test_a_request_that_never_ran_has_no_parts() -> None:
    never = record(first_scheduled_at_s=None, first_token_at_s=None, last_token_at_s=None, traceparent="x")
    assert list(spans_of(never)) == ["llm_request"]


def test_what_is_not_sampled_is_not_made() -> None:
    assert spans_of(record(), provider=TracerProvider(sampler=ALWAYS_OFF)) == {}


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
    finally:
        server.shutdown()
        server.server_close()


def test_a_collector_that_never_answers_holds_up_no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_CLOSE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        tracer = RequestTracer.to_endpoint(endpoint, "m", WallClock())
        tracer.record(record())
        began_s = time.monotonic()
        tracer.close()
    assert time.monotonic() - began_s < 9, "an attempt alone would take ten seconds"


@pytest.mark.slow  # a server of its own
def test_a_server_sends_the_traces_of_its_clients(small_model: Path, tmp_path: Path) -> None:
    with collector() as (url, bodies):
        with small_server(small_model, "--otlp-traces-endpoint", url, data_dir=tmp_path) as server:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            body = {"prompt": [5, 6, 7], "max_tokens": 3}
            assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 200
            server.stop()
        sent = [ExportTraceServiceRequest.FromString(each) for each in bodies]
    spans = [
        span for each in sent for part in each.resource_spans for s in part.scope_spans for span in s.spans
    ]
    assert {span.name for span in spans} == {"llm_request", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in spans} == {TRACE}
