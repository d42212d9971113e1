"""Creates spans with `opentelemetry` and sends them to a collector. Used only by the helper thread of `spans.py`, which imports
it with the first span."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.trace import SpanContext as ParentContext

from api.span import NotedSpan, SpanContext
from engine.installation import package_version


class _GivenIds(IdGenerator):
    """Returns given ids: the client got them before the span is created."""

    def __init__(self) -> None:
        self.context: SpanContext | None = None

    def generate_span_id(self) -> int:
        assert self.context is not None
        return self.context.span_id

    def generate_trace_id(self) -> int:
        assert self.context is not None
        return self.context.trace_id


class _Made(SpanProcessor):
    """Keeps finished spans until they are sent."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class SpanSender:
    def __init__(self, endpoint: str, run_id: str, timeout_s: float) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it logs more about each failure than is useful
        resource = Resource({"service.name": "tokamak", "service.version": package_version(), "service.instance.id": run_id})
        self._ids, self._made = _GivenIds(), _Made()
        provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=self._ids)
        provider.add_span_processor(self._made)
        self._tracer = provider.get_tracer("tokamak", package_version())
        self._exporter = OTLPSpanExporter(endpoint, timeout=timeout_s)

    def send(self, batch: Iterable[NotedSpan]) -> bool:
        """Send spans; return whether the collector took them."""
        for noted in batch:
            self._make(noted)
        spans, self._made.spans = self._made.spans, []
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def end(self) -> None:
        """End: nothing is sent or retried any more."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _make(self, noted: NotedSpan) -> None:
        context = noted.context
        self._ids.context = context
        parent = None
        if context.parent_id:
            state = TraceState.from_header([context.state]) if context.state else None
            above = ParentContext(context.trace_id, context.parent_id, True, TraceFlags(context.flags), state)
            parent = set_span_in_context(NonRecordingSpan(above))
        span = self._tracer.start_span(noted.name, parent, SpanKind.SERVER, noted.attributes, start_time=context.begin_ns)
        assert isinstance(span, Span)
        if noted.first_token_ns:
            span.add_event("gen_ai.first_token", timestamp=noted.first_token_ns)
        if noted.error:
            span.set_status(Status(StatusCode.ERROR, noted.error))
        span.end(noted.end_ns)
