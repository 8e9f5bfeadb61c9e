"""OpenTelemetry traces: a span of each choice; in it its queue, prefill, decode and preemptions."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from backfill.core.clock import Clock
from backfill.core.errors import ConfigError
from backfill.generation.timeline import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_CLOSE_S = 2.0


def check_packages() -> None:
    """Raises: ConfigError without OpenTelemetry."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        raise ConfigError(
            "needs OpenTelemetry: pip install 'backfill[otel]'.", field="otlp_traces_endpoint"
        ) from None


class RequestTracer:
    """Makes the spans of a request when it has ended, from the instants that metrics are made of.

    Args:
        provider: samples and exports.
        clock: that of the records.
    """

    def __init__(self, provider: TracerProvider, model: str, clock: Clock) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("backfill")
        self._extract = TraceContextTextMapPropagator().extract
        self._model = model
        self._clock = clock

    @classmethod
    def to_endpoint(cls, endpoint: str, model: str, clock: Clock) -> RequestTracer:
        """Spans go to a collector from a thread of their own; those that it cannot take are dropped.

        Service name, sampling and headers are those of OpenTelemetry's environment variables.

        Raises: ImportError without the packages (``check_packages``).
        """
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = Resource({SERVICE_NAME: "backfill"}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=named)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider, model, clock)

    def record(self, record: RequestRecord) -> None:
        """Make the spans of a request that has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        epoch_ns = time.time_ns() - round(self._clock.now_s() * 1e9)

        def at(instant_s: float) -> int:
            return epoch_ns + round(instant_s * 1e9)

        span = self._tracer.start_span(
            "llm_request",
            self._extract({"traceparent": record.traceparent}),
            SpanKind.SERVER,
            start_time=at(record.arrived_at_s),
        )
        if span.is_recording():
            span.set_attributes(
                {
                    "gen_ai.request.model": self._model,
                    "gen_ai.request.max_tokens": record.max_tokens,
                    "gen_ai.response.id": record.response_id,
                    "gen_ai.response.finish_reasons": (record.finish_reason.value,),
                    "gen_ai.usage.input_tokens": record.num_prompt_tokens,
                    "gen_ai.usage.output_tokens": record.num_output_tokens,
                    "backfill.class": record.service_class.value,
                    "backfill.cached_tokens": record.num_cached_tokens,
                    "backfill.preemptions": record.num_preemptions,
                }
            )
            if record.finish_reason.value == "error":
                span.set_status(Status(StatusCode.ERROR))
            inside = set_span_in_context(span)
            spans = (
                ("queue", record.arrived_at_s, record.first_scheduled_at_s),
                ("prefill", record.first_scheduled_at_s, record.first_token_at_s),
                ("decode", record.first_token_at_s, record.last_token_at_s),
                *(("preempted", *pause) for pause in record.pauses),
            )
            for name, from_s, to_s in spans:
                if from_s is not None and to_s is not None:
                    self._tracer.start_span(name, inside, start_time=at(from_s)).end(at(to_s))
        span.end(at(record.finished_at_s))

    def close(self) -> None:
        """Export what is left, for two seconds at most."""
        # Its own timeouts are of each attempt, and a collector that never answers takes most of a minute.
        closing = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
