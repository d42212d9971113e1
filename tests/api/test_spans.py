"""`--otlp-traces-endpoint` against a small collector: spans and their parents; an unreachable collector costs only a
counter."""

from __future__ import annotations

import http.server
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from starlette.datastructures import Headers

from api.routes import ENDPOINTS
from api.span import OPERATIONS as SPANNED
from api.span import context_of
from api.spans import MAX_WAITING
from tests.api.api_server import ApiServer
from tests.waiting import WATCHDOG_S, wait_until

SECRET = "xyzzy-plugh"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Server that accepts OTLP over HTTP at /v1/traces, or refuses it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.raw = b""
        self.status = 200
        own = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if own.status == 200:
                    own.take(self.path, body)
                self.send_response(own.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        self.raw += body
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            self.resources.append(values(resource.resource.attributes))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def of(self, request_id: str) -> Span:
        """Return a request's span once it has arrived."""

        def found() -> list[Span]:
            return [span for span in self.spans if values(span.attributes)["gen_ai.response.id"] == request_id]

        wait_until(found, what=f"the span of {request_id}")
        (span,) = found()
        return span

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


def values(attributes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def server(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(tmp_path_factory.mktemp("run"), otlp_traces_endpoint=collector.url) as running:
        yield running
        running.run.log_path("api0").write_text("")  # one test has it complain


def test_span_has_request_and_answer_attributes(server: ApiServer, collector: Collector) -> None:
    body = {
        "model": "tiny",
        "prompt": SECRET,
        "max_tokens": 5,
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": -2,
        "stop": [SECRET],
    }
    answer = server.post("/v1/completions", body, headers={"x-request-id": "plain"})
    span = collector.of("plain")
    found = values(span.attributes)
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tokamak",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": -2,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": answer.json()["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 10,
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "tokamak.attempts": 1,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert (span.name, span.kind) == ("text_completion tiny", Span.SPAN_KIND_SERVER)
    assert span.start_time_unix_nano < span.end_time_unix_nano
    (first,) = span.events
    assert span.start_time_unix_nano <= first.time_unix_nano <= span.end_time_unix_nano
    assert not span.parent_span_id
    assert collector.resources[0].items() >= {"service.name": "tokamak", "service.instance.id": server.run.run_id}.items()
    assert answer.headers["traceparent"] == f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"


def test_it_is_part_of_the_clients_trace(server: ApiServer, collector: Collector) -> None:
    headers = {"x-request-id": "child", "traceparent": PARENT, "tracestate": f"vendor=1,{LONG[0]},k=2,{','.join(LONG[1:])}"}
    body = {"messages": [{"role": "user", "content": SECRET}], "stream": True, "max_tokens": 4}
    answer = server.post("/v1/chat/completions", body, headers=headers)
    span = collector.of("child")
    _, trace_id, parent_id, _ = PARENT.split("-")
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (
        trace_id,
        parent_id,
        f"vendor=1,{LONG[0]},k=2,{LONG[1]}",
    )
    assert answer.headers["traceparent"] == f"00-{trace_id}-{span.span_id.hex()}-01"
    assert span.name == "chat tiny"


def test_unsampled_trace_is_only_propagated(server: ApiServer, collector: Collector) -> None:
    headers = {"x-request-id": "silent", "traceparent": PARENT[:-2] + "00"}
    answer = server.post("/v1/completions", {"prompt": "a"}, headers=headers)
    assert re.fullmatch(rf"{PARENT[:36]}[0-9a-f]{{16}}-00", answer.headers["traceparent"])
    server.post("/v1/completions", {"prompt": "a"}, headers={"x-request-id": "next"})
    collector.of("next")
    assert all(values(span.attributes)["gen_ai.response.id"] != "silent" for span in collector.spans)


def test_errors_and_routes_without_a_span(server: ApiServer, collector: Collector) -> None:
    refused = server.post("/v1/chat/completions", {"messages": SECRET}, headers={"x-request-id": "wrong"})
    span = collector.of("wrong")
    found = values(span.attributes)
    assert (refused.status_code, found["http.response.status_code"], found["error.type"]) == (400, 400, "400")
    assert span.status.code == 0, "a client's mistake is no error of the server"
    for answer in (server.get("/health"), server.post("/tokenize", {"prompt": "a"}), server.get("/v1/completions")):
        assert "traceparent" not in answer.headers


def test_every_generating_route_has_a_span() -> None:
    """Routes that may answer 429 wait for the engine; some of them only count, render, show or store."""
    answering = {each.path for each in ENDPOINTS if each.method == "POST" and 429 in each.errors}
    beside = {path for path in answering if path.endswith(("/render", "_tokens", "tokenize", "/show", "/pull", "/batches"))}
    assert answering - beside == set(SPANNED)


def test_no_text_is_sent(server: ApiServer, collector: Collector) -> None:
    body = {"prompt": SECRET, "user": SECRET, "metadata": {"a": SECRET}}
    server.post("/v1/completions", body, headers={"x-request-id": "last"})
    collector.of("last")
    assert SECRET.encode() not in collector.raw


def test_a_collector_that_is_away_costs_a_counter(server: ApiServer, collector: Collector) -> None:
    collector.status = 400  # which is not tried again
    before = server.count("otlp_spans_total", outcome="lost")
    try:
        for _ in range(3):
            assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200
        wait_until(lambda: server.count("otlp_spans_total", outcome="lost") == before + 3, what="three lost spans")
    finally:
        collector.status = 200
    server.post("/v1/completions", {"prompt": "a"}, headers={"x-request-id": "after"})
    collector.of("after")
    assert server.log.count("does not accept them") == 1


@pytest.mark.slow
def test_hanging_collector_blocks_no_request(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The collector accepts connections and never answers: requests are served, waiting spans are bounded, and the process ends
    at once."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        with ApiServer(tmp_path_factory.mktemp("run"), otlp_traces_endpoint=endpoint) as server:
            for _ in range(20):
                assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
            server.child.terminate()
            assert server.child.wait(WATCHDOG_S) == 0
            server.run.log_path("api0").write_text("")
    assert MAX_WAITING < 10_000


@pytest.mark.parametrize(
    "given",
    [
        "",
        "00",
        PARENT.upper(),
        PARENT.replace("00-", "ff-", 1),
        PARENT + "-more",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        "x" * 10_000,
        PARENT + "\xb2",
    ],
)
def test_invalid_traceparent_begins_a_new_trace(given: str) -> None:
    context = context_of("/v1/completions", Headers({"traceparent": given}))
    assert context is not None
    assert context.parent_id == 0
    assert context.flags == 1
    assert f"{context.trace_id:032x}" not in PARENT


def test_a_later_version_is_understood() -> None:
    context = context_of("/v1/completions", Headers({"traceparent": PARENT.replace("00-", "01-", 1) + "-more"}))
    assert context is not None
    assert f"{context.parent_id:016x}" in PARENT


LONG, SHORT = [f"{name}={name * 198}" for name in "abc"], [f"v{number}={'x' * 20}" for number in range(30)]


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        (["a=1, b=2"], "a=1, b=2"),
        (["a=1", "b=2"], "a=1,b=2"),  # headers of one name are one list
        ([",".join(LONG[:2])], ",".join(LONG[:2])),  # long entries are none too many while there is room
        ([",".join([LONG[0], *SHORT[:10], *LONG[1:]])], ",".join([LONG[0], *SHORT[:10]])),
        ([" , ".join([*SHORT[:3], LONG[0], *SHORT[3:]])], ",".join(SHORT[:20])),  # long ones go first, then the last
        ([",".join(f"v{number}=" for number in range(40))], ",".join(f"v{number}=" for number in range(32))),
        (["x" * 10_000], ""),
        (["," * 10_000], ""),
    ],
)
def test_long_tracestate_loses_whole_entries(given: list[str], passed_on: str) -> None:
    raw = [(b"traceparent", PARENT.encode()), *((b"tracestate", each.encode()) for each in given)]
    context = context_of("/v1/completions", Headers(raw=raw))
    assert context is not None
    assert context.state == passed_on
    assert len(passed_on) <= 512
