"""`--otlp-traces-endpoint`: a span for each request that uses the model, by OpenTelemetry's conventions for generative AI, sent
over OTLP (HTTP, protobuf).

The event loop collects the data of spans; a helper thread creates and sends them, and only that imports `opentelemetry`. The
data waits in a bounded queue: if a collector is slow or dead, spans are lost and counted, without other effects. Spans contain
names, numbers and ids, never text of a prompt or an answer.

Conventions: https://opentelemetry.io/docs/specs/semconv/gen-ai/ and https://www.w3.org/TR/trace-context/.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from api.client.generation import Generation
from api.request_log import figures_of
from api.span import SAMPLED, NotedSpan, SpanContext, context_of
from engine.process.adapters import AdapterRegistry
from engine.process.context import ActorContext

if TYPE_CHECKING:
    from starlette.datastructures import Headers

MAX_WAITING = 2048  # spans
MAX_BATCH = 512
SEND_TIMEOUT_S = 5
END_TIMEOUT_S = 1.0  # for waiting spans when the process ends
FIRST_TOKEN = "gen_ai.latency.time_to_first_token"  # vLLM's name; seconds
_PARAMETERS = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed", "max_tokens")


class Spans:
    """Spans of one api process. Call `close` at its end."""

    def __init__(self, context: ActorContext, adapters: AdapterRegistry | None) -> None:
        config = context.config
        self._endpoint = config.otlp_traces_endpoint
        self._base_name = config.served_model_name[0]
        self._adapters = adapters
        self._server = {"server.address": config.host, "server.port": config.port}
        self._run_id = config.run_id
        self._log = context.log
        self._num_sent = context.counter("otlp_spans_total", outcome="sent")
        self._num_lost = context.counter("otlp_spans_total", outcome="lost")
        self._waiting: deque[NotedSpan] = deque()
        self._is_wanted = threading.Event()
        self._is_ending = False
        self._sender: Any = None
        self._has_warned = False
        self._thread = threading.Thread(target=self._send_all, name="spans", daemon=True)
        self._thread.start()

    def begin(self, path: str, headers: Headers) -> SpanContext | None:
        """Begin the span of a new request; None: it gets no span."""
        return context_of(path, headers)

    def finish(self, context: SpanContext, path: str, request_id: str, status: int, generation: Generation | None) -> None:
        """Finish a request's span; `status` 0: its client disconnected before the answer began. Called by the event loop."""
        if not context.flags & SAMPLED:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._num_lost.add(1)
            return
        model_name = self._model_name(generation)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": context.operation,
            "gen_ai.provider.name": "tokamak",
            "gen_ai.request.model": model_name,
            "gen_ai.response.id": request_id,
            "http.request.method": "POST",
            "url.path": path,
            **self._server,
        }
        if status:
            attributes["http.response.status_code"] = status
        if not status or status >= 400:
            attributes["error.type"] = str(status) if status else "client_gone"
        first_token_s = 0.0
        if generation is not None:
            attributes |= {"gen_ai.response.model": model_name, **_attributes_of(generation)}
            first_token_s = attributes.get(FIRST_TOKEN, 0.0)
        first_ns = context.begin_ns + int(first_token_s * 1e9) if first_token_s else 0
        error = f"HTTP {status}" if status >= 500 else ""
        name = f"{context.operation} {model_name}"
        self._waiting.append(NotedSpan(context, name, time.time_ns(), first_ns, attributes, error))
        self._is_wanted.set()

    def _model_name(self, generation: Generation | None) -> str:
        """Return the name of the adapter that was used, or of the base model."""
        use = None if generation is None else generation.adapter
        if use is None or self._adapters is None:
            return self._base_name
        return next((each.name for each in self._adapters.adapters if each.number == use.number), self._base_name)

    def close(self) -> None:
        """Send the waiting spans, as far as possible at once."""
        self._is_ending = True
        self._is_wanted.set()
        self._thread.join(END_TIMEOUT_S)
        if self._sender is not None:
            self._sender.end()

    # ------------------------------------------------------------------------------------------------------ the thread

    def _send_all(self) -> None:
        while not self._is_ending or self._waiting:
            self._is_wanted.wait()
            self._is_wanted.clear()
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
                is_sent = self._send(batch)
                (self._num_sent if is_sent else self._num_lost).add(len(batch))

    def _send(self, batch: list[NotedSpan]) -> bool:
        error: Exception | None = None
        try:
            if self._sender is None:
                from api.span_sender import SpanSender

                self._sender = SpanSender(self._endpoint, self._run_id, SEND_TIMEOUT_S)
            if self._sender.send(batch):
                return True
        except Exception as raised:  # any error in a library costs only spans
            error = raised
        if not self._has_warned:
            self._has_warned = True
            text = "lost spans: %s does not accept them; further losses are only counted in otlp_spans_total"
            self._log.warning(text, self._endpoint, exc_info=error)
        return False


def _attributes_of(generation: Generation) -> dict[str, Any]:
    """Attributes of a span: parameters of the request, numbers of the answer."""
    sampling, figures = generation.shared.sampling, figures_of(generation)
    found: dict[str, Any] = {
        "gen_ai.request.choice.count": generation.sequences_per_prompt,
        "gen_ai.usage.input_tokens": figures["prompt_tokens"],
        "gen_ai.usage.output_tokens": figures["generation_tokens"],
        "gen_ai.response.finish_reasons": [sequence.finish_reason or "none" for sequence in generation.sequences],
        "tokamak.attempts": figures["attempts"],
        "tokamak.cached_tokens": figures["cached_tokens"],
    }
    if "time_to_first_token" in figures:
        found[FIRST_TOKEN] = figures["time_to_first_token"]
    if sampling.pooling is None:
        parameters = {name: getattr(sampling, name) for name in _PARAMETERS}
        parameters["seed"] = _as_signed(sampling.seed)
        found |= {f"gen_ai.request.{name}": value for name, value in parameters.items() if name != "max_tokens" or value >= 0}
    return found


def _as_signed(value: int) -> int:
    """Return a seed as OTLP's signed 64-bit number."""
    return value - (1 << 64) if value >> 63 else value
