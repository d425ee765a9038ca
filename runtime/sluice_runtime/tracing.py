"""Traces of a request through gateway, decode and prefill: OpenTelemetry over OTLP/HTTP, off unless a URL is given.

The way from process to process is a W3C `traceparent` in the request itself. Where tracing is off it is handed on as it
came, so that one process without it does not tear the trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from sluice_runtime.errors import SpecError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

Value = str | int | float | bool


class Span(Protocol):
    """`context` goes to processes that work for this span. `end` comes once; what is told afterwards is lost."""

    @property
    def context(self) -> str: ...

    def event(self, name: str, **attributes: Value) -> None: ...

    def end(self, error: str = "", **attributes: Value) -> None: ...


class Tracer(Protocol):
    def begin(self, name: str, parent: str = "", **attributes: Value) -> Span: ...

    def close(self) -> None:
        """Send what has not been sent yet."""


class _NoSpan:
    __slots__ = ("context",)

    def __init__(self, context: str) -> None:
        self.context = context

    def event(self, name: str, **attributes: Value) -> None:
        pass

    def end(self, error: str = "", **attributes: Value) -> None:
        pass


_NOTHING = _NoSpan("")


class NoTracer:
    def begin(self, name: str, parent: str = "", **attributes: Value) -> Span:
        return _NoSpan(parent) if parent else _NOTHING

    def close(self) -> None:
        pass


NO_TRACER = NoTracer()


class _OtelSpan:
    def __init__(self, span: Any) -> None:
        self._span = span
        told = span.get_span_context()
        self.context = f"00-{told.trace_id:032x}-{told.span_id:016x}-{int(told.trace_flags):02x}"

    def event(self, name: str, **attributes: Value) -> None:
        self._span.add_event(name, attributes)

    def end(self, error: str = "", **attributes: Value) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end()


class OtelTracer:
    """Spans are handed to the exporter by a thread of the library's own; a collector that is away costs memory for
    `max_queue_size` spans and no time."""

    def __init__(self, exporter: SpanExporter, service: str, instance: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource({"service.namespace": "sluice", "service.name": service, "service.instance.id": instance})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
        self._tracer = self._provider.get_tracer("sluice")

    def begin(self, name: str, parent: str = "", **attributes: Value) -> Span:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({"traceparent": parent}) if parent else None
        return _OtelSpan(self._tracer.start_span(name, context, attributes=attributes))

    def close(self) -> None:
        self._provider.shutdown()


def make_tracer(url: str, service: str, instance: str) -> Tracer:
    """`url` of a collector's OTLP/HTTP traces endpoint, e.g. http://collector:4318/v1/traces; "" is off.

    Raises SpecError where the `trace` extra is not installed.
    """
    if not url:
        return NO_TRACER
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise SpecError("otlp is set, but OpenTelemetry is not here: pip install 'sluice-serve[trace]'") from error
    return OtelTracer(OTLPSpanExporter(endpoint=url, timeout=5), service, instance)
