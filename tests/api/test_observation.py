"""`/health`, `/metrics`, `/load`, the page, and the OpenAPI document."""

from __future__ import annotations

import asyncio
import posixpath
import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from api import prometheus
from api.dashboard import LOG_TAIL_BYTES
from api.durations import route_of
from api.fingerprint import Fingerprints
from api.health import problems
from api.model import ServedModel
from api.openapi import document
from api.prometheus import Look, Renderings, information
from api.routes import routes
from engine.checkpoint.record import ModelRecord
from engine.installation import package_version
from engine.messages import WeightsState
from engine.metrics import BY_ROLE, EVERY_ROLE
from engine.process.context import ActorContext
from shm.counters import ActorSnapshot, State
from tests.api.api_server import OPERATOR, ApiServer
from tests.waiting import WATCHDOG_S, wait_until

VLLM_NAMES = (
    *(
        f"vllm:{name}_bucket"
        for name in (
            "e2e_request_latency_seconds",
            "inter_token_latency_seconds",
            "iteration_tokens_total",
            "request_decode_time_seconds",
            "request_generation_tokens",
            "request_inference_time_seconds",
            "request_max_num_generation_tokens",
            "request_params_max_tokens",
            "request_params_n",
            "request_prefill_time_seconds",
            "request_prompt_tokens",
            "request_queue_time_seconds",
            "request_time_per_output_token_seconds",
            "time_to_first_token_seconds",
        )
    ),
    "vllm:cache_config_info",
    "vllm:generation_tokens_total",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_total",
    "vllm:request_success_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_drafts_total",
)
SAMPLE = re.compile(r'tokamak:([a-z0-9_]+)\{((?:[a-z_]+="(?:[^"\\]|\\.)*",?)*)\} (\S+)')


def samples(server: ApiServer) -> dict[tuple[str, str], float]:
    """Return every sample of /metrics by name and labels; check the format."""
    response = server.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found: dict[tuple[str, str], float] = {}
    described: set[str] = set()
    for line in response.text.splitlines():
        if line.startswith("#"):
            kind, name = line.split(" ")[1:3]
            assert kind in ("HELP", "TYPE")
            assert (kind == "TYPE") == (name in described), f"{name} is described twice or in the wrong order"
            described.add(name)
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert re.sub("_(bucket|sum|count)$", "", f"tokamak:{match[1]}") in described or f"tokamak:{match[1]}" in described
            assert (match[1], match[2]) not in found, f"{line} comes twice"
            found[match[1], match[2]] = float(match[3])
    return found


# ------------------------------------------------------------------------------------------------------------- health


@pytest.fixture
def well(server: ApiServer) -> Iterator[ApiServer]:
    assert server.get("/health").json()["status"] == "ok"
    yield server
    wait_until(lambda: server.get("/health").status_code == 200, what="well again")


@pytest.mark.parametrize("state", [State.SPAWNED, State.LOADING, State.PAUSED, State.FAILED, State.DEAD])
@pytest.mark.parametrize("actor", ["worker0", "supervisor"])
def test_an_actor_that_is_not_ready(well: ApiServer, actor: str, state: State) -> None:
    row = well.counters.actor(actor)
    row.set_state(state)
    answer = well.get("/health")
    assert (answer.status_code, answer.json()["status"], answer.json()["actor"]) == (503, "unavailable", actor)
    assert state.name in answer.json()["reason"]
    assert well.get("/health/live").status_code == 200
    row.set_state(State.RUNNING)


def test_a_death_is_named_with_its_cause(well: ApiServer) -> None:
    row = well.counters.actor("worker0")
    well.counters.errors.record("worker0", "worker0 died: killed by SIGKILL")
    row.set_state(State.DEAD)
    assert well.get("/health").json()["reason"] == "is DEAD, not READY or RUNNING: worker0 died: killed by SIGKILL"
    row.set_state(State.READY)


def test_missing_files_are_reported_while_the_engine_serves(well: ApiServer) -> None:
    is_incomplete = well.counters.counter("is_run_incomplete", "supervisor")
    well.counters.errors.record("supervisor", "the disk is full")
    is_incomplete.set(1)
    answer = well.get("/health")
    is_incomplete.set(0)
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    assert answer.json()["problems"] == [{"actor": "supervisor", "reason": "the disk is full"}]


def test_an_actor_that_is_stuck(well: ApiServer) -> None:
    with well.stuck("scheduler", since_s=10):
        answer = well.get("/health")
    assert (answer.status_code, answer.json()["actor"]) == (503, "scheduler")
    said = re.search(r"has not responded for ([\d.]+) s", answer.json()["reason"])
    assert said is not None
    assert float(said[1]) >= 10


@pytest.mark.parametrize(
    ("role", "hang_timeout_s", "stale_s"),
    [("worker", 60, 30), ("worker", 5, 2.5), ("scheduler", 60, 4), ("scheduler", 5, 2.5), ("scheduler", 2, 1)],
)
def test_stuck_actor_is_told_before_it_is_replaced(role: str, hang_timeout_s: float, stale_s: float) -> None:
    now_ns = 10**12
    for age_s, is_stuck in ((stale_s - 0.1, False), (stale_s + 0.1, True)):
        actor = ActorSnapshot(f"{role}0", role, 0, 1, 1, 1, State.RUNNING, now_ns - int(age_s * 1e9), 1, 0)
        assert bool(problems([actor], [], {}, now_ns, hang_timeout_s)) is is_stuck


@pytest.mark.parametrize(
    ("state", "status", "reason"),
    [
        (WeightsState.CLEARED, 503, "is asleep; wake it with POST /wake_up"),
        (WeightsState.PAUSED, 503, "paused"),
        (WeightsState.LOADING, 200, ""),
    ],
)
def test_an_engine_that_does_not_serve(well: ApiServer, state: WeightsState, status: int, reason: str) -> None:
    cell = well.counters.counter("engine_state", "scheduler")
    cell.set(state)
    answer = well.get("/health")
    cell.set(WeightsState.NORMAL)
    assert (answer.status_code, answer.json().get("actor") or "scheduler") == (status, "scheduler")
    assert reason in (answer.json().get("reason") or "")
    assert well.get("/health/live").status_code == 200


def test_unwritten_record_makes_the_engine_unhealthy(well: ApiServer) -> None:
    cell = well.counters.counter("is_record_unwritten", "scheduler")
    well.counters.errors.record("scheduler", "weights.json: No space left on device")
    cell.set(1)
    answer = well.get("/health")
    cell.set(0)
    assert (answer.status_code, answer.json()["actor"]) == (503, "scheduler")
    assert "No space left on device" in answer.json()["reason"]
    assert well.get("/health").status_code == 200


# ------------------------------------------------------------------------------------------------------------ counting


def test_every_row_is_there(server: ApiServer) -> None:
    server.get("/health")  # rows of routes are there with the first request
    names = {name for name, _ in samples(server)}
    roles = BY_ROLE.keys() - {"media", "link"}  # of models that see, and of clusters
    for metric in (*EVERY_ROLE, *(metric for role in roles for metric in BY_ROLE[role])):
        is_there = (f"{metric.name}_count" if metric.kind == "histogram" else metric.name) in names
        has_place = max(metric.place("position"), metric.place("adapter_slot")) >= 0
        assert is_there != has_place, "of drafts' positions and adapters' slots this engine has none"
    assert {"actor_state", "actor_up", "ring_fill_bytes"} <= names


def test_request_counters(server: ApiServer) -> None:
    server.post("/v1/completions", {"prompt": "warm"})
    before = samples(server)
    server.post("/v1/completions", {"prompt": "hello", "n": 2, "max_tokens": 10})
    server.post("/v1/completions", {"prompt": "hello", "stop_token_ids": [ord("m")]})
    server.post("/v1/completions", {"prompt": 5})
    after = samples(server)

    def grown(name: str, **labels: str) -> float:
        own = {"model_name": "tiny", **labels, "actor": "api0"}
        return sum(
            after[key] - before.get(key, 0)
            for key in after
            if key[0] == name and all(f'{label}="{value}"' in key[1] for label, value in own.items())
        )

    assert grown("http_requests_total") == 4  # the first look at /metrics is one of them
    assert grown("http_responses_total", status="2xx") == 3
    assert grown("http_responses_total", status="4xx") == 1
    assert grown("request_success_total", finished_reason="length") == 2
    assert grown("request_success_total", finished_reason="stop") == 1
    assert grown("prompt_tokens_total") == 15
    assert grown("generation_tokens_total") == 25
    for name in ("time_to_first_token_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds"):
        assert grown(f"{name}_count") == 3
        assert grown(f"{name}_bucket", le="+Inf") == 3
        assert grown(f"{name}_sum") > 0
    assert grown("inter_token_latency_seconds_count") == 22
    assert grown("request_prompt_tokens_sum") == 15
    assert grown("request_generation_tokens_bucket", le="5.0") == 1
    assert grown("request_generation_tokens_bucket", le="10.0") == 3
    assert grown("request_max_num_generation_tokens_count") == 2
    assert grown("request_params_n_sum") == 3
    assert grown("request_params_max_tokens_sum") == 10 + 16  # what /v1/completions takes for none
    name = "http_request_duration_seconds_count"
    assert (grown(name, route="/v1/completions", status="2xx"), grown(name, route="/v1/completions", status="4xx")) == (2, 1)


def test_open_metrics(server: ApiServer) -> None:
    """OpenMetrics is served when Prometheus asks for it, passes a strict parser and has the same samples as the text."""
    server.post("/v1/completions", {"prompt": "hello"})
    server.get("/metrics")  # the first look adds rows of its own
    accepted = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
    response = server.get("/metrics", headers={"accept": accepted})
    assert response.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert response.text.endswith("\n# EOF\n")
    strict = [sample.name for family in openmetrics_families(response.text) for sample in family.samples]
    plain = [sample.name for family in text_families(server.get("/metrics").text) for sample in family.samples]
    assert Counter(strict) == Counter(plain)


def test_vllm_prefix_provides_its_dashboards_metrics(server: ApiServer) -> None:
    """`--metrics-prefix vllm` provides every metric of vLLM's own dashboard, except those that cannot exist here."""
    look = Look(server.counters, [], information(server.config), {"model_name": "tiny"}, "vllm")
    found = {sample.name: sample.labels for family in look.collect() for sample in family.samples}
    assert set(VLLM_NAMES) - found.keys() == set()
    assert all(labels["model_name"] == "tiny" for labels in found.values())
    cache = found["vllm:cache_config_info"]
    assert (cache["block_size"], cache["num_gpu_blocks"]) == (str(server.config.block_size), str(server.config.num_kv_blocks))
    assert found["vllm:build_info"]["version"] == package_version()


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/completions", "/v1/completions"),
        ("/v1/chat/completions/render", "/v1/chat/completions/render"),
        ("/v1/responses/resp_1", "/v1/responses"),
        ("/v1/models/a/b", "/v1/models"),
        ("/admin/actors/x/restart", "/admin"),
        ("/administrator", "other"),
        ("/.env", "other"),
    ],
)
def test_paths_are_counted_by_route(path: str, route: str) -> None:
    assert route_of(path) == route


def test_load(server: ApiServer) -> None:
    server.counters.counter("num_requests_running", "scheduler").set(3)
    server.counters.counter("num_requests_waiting", "scheduler").set(4)
    with server.paced(2):
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", {"prompt": ["a", "b"]})))
        asking.start()
        wait_until(lambda: server.get("/load").json()["server_load"] == 2, what="two open samples")
        load = server.get("/load").json()
        assert load.pop("replicas")[0].items() >= {"replica": 0, "running": 3, "waiting": 4}.items()
        assert load == {"server_load": 2, "running": 3, "waiting": 4}
    asking.join()
    assert server.get("/load").json()["server_load"] == 0


# ----------------------------------------------------------------------------------------------------- page, document


def test_page(server: ApiServer) -> None:
    """The files are served under the names by which they reference each other, with a policy that allows no other code."""
    waiting, seen = ["/"], set[str]()
    while waiting:
        path = waiting.pop()
        seen.add(path)
        answer = server.get(path)
        assert answer.status_code == 200, path
        assert "default-src 'none'; script-src 'self';" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        asked = re.findall(r'(?:(?:src|href)=|from )"((?:page|\.)/[^"]+)"', answer.text)
        waiting += {posixpath.normpath(posixpath.join(posixpath.dirname(path), name)) for name in asked} - seen
    assert {
        "/page/main.js",
        "/page/style.css",
        "/page/vendor/marked.js",
        "/page/vendor/purify.js",
        "/page/vendor/highlight.js",
    } <= seen
    assert server.get("/page/vendor/katex/fonts/KaTeX_Main-Regular.woff2").headers["content-type"] == "font/woff2"
    assert server.get("/version").json()["version"]
    assert server.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert server.get("/page/main.js").headers["content-type"] == "text/javascript; charset=utf-8"
    for path in ("/page/", "/page/none.js", "/page/../app.py", "/page/%2e%2e/app.py", "/page/vendor/marked.LICENSE"):
        assert server.get(path).status_code == 404, path


def test_dashboard(server: ApiServer) -> None:
    """The counters, one snapshot for all concurrent requests, and the end of a log."""
    looks = [server.get("/dashboard").json() for _ in range(3)]
    assert {actor["name"] for actor in looks[0]["actors"]} == {actor.name for actor in server.counters.actors()}
    assert looks[0]["figures"]["num_kv_blocks"] == server.get("/load").json()["replicas"][0]["kv_blocks"]
    assert looks[0]["taken_ns"] <= looks[-1]["taken_ns"]
    name = looks[0]["actors"][0]["name"]
    path = server.run.log_path(name)
    path.write_text("cut\n" + "".join(f"line {index}\n" for index in range(5000)))
    lines = server.get(f"/dashboard/logs/{name}").json()["text"].splitlines()
    assert lines[-1] == "line 4999"
    assert lines[0].startswith("line ")
    assert sum(len(line) + 1 for line in lines) <= LOG_TAIL_BYTES
    assert server.get("/dashboard/logs/..%2Fmanifest").status_code == 404
    assert server.get("/dashboard/logs/nobody").json()["error"]["code"] == "not_found"


def test_every_route_is_described(server: ApiServer) -> None:
    described = server.get("/openapi.json").json()
    assert described["openapi"] == "3.1.0"
    existing = {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in routes()
        if isinstance(route, Route)
        for method in (route.methods or ())
        if method != "HEAD"
    }
    assert {(path, method) for path, item in described["paths"].items() for method in item} == existing


CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
OPERATIONS = {  # the others and each field's limits: tests/e2e/test_openapi.py
    result.ok().label: result.ok()
    for result in schemathesis.openapi.from_dict(document(("tiny", "alias")))
    .exclude(path_regex="^/($|v1/(messages|responses)|api/)")
    .get_all_operations()
}


# schemathesis' own `parametrize` gives all its tests one node id with pytest 9.2, and xdist would run one of them.
@pytest.mark.parametrize("label", OPERATIONS)
def test_the_document_holds(label: str, server: ApiServer) -> None:
    @settings(max_examples=5, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(OPERATIONS[label].as_strategy())
    def answers_as_described(case: Any) -> None:
        case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=WATCHDOG_S, headers=OPERATOR)

    answers_as_described()


@pytest.fixture
def renderings(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Renderings:
    """Renderings of this process, made as in the api process; no request waits for them."""
    monkeypatch.setattr(prometheus, "BURST_S", 3600.0)
    record = ModelRecord.of_run(server.run.model_path)
    context, model = ActorContext(server.run, server.config, "api0", 1), ServedModel.of(server.config, record, None)
    return Renderings(context, model, Fingerprints(server.config, server.run))


@pytest.mark.parametrize("is_open", [False, True])
def test_concurrent_requests_share_a_rendering(server: ApiServer, renderings: Renderings, is_open: bool) -> None:
    """The rendering began after all of them asked; requests that come while it is made get the next one."""

    async def ask() -> None:
        waiting = [asyncio.create_task(renderings.text(is_open)) for _ in range(50)]
        for is_awaited in (True, False):  # one waits, then it has begun
            while bool(renderings._next) != is_awaited:
                await asyncio.sleep(0)
        later = [asyncio.create_task(renderings.text(is_open)) for _ in range(50)]
        waiting[0].cancel()  # a cancelled request does not affect the others
        texts, newer = await asyncio.gather(*waiting[1:]), await asyncio.gather(*later)
        assert len({id(text) for text in texts}) == len({id(text) for text in newer}) == 1
        assert texts[0] is not newer[0]
        assert b"http_requests_total" in newer[0]

    asyncio.run(ask())


def test_frequent_scrapes_are_throttled(renderings: Renderings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renderings get a share of a processor: the second one comes after hours here, and other work does not wait for it."""
    monkeypatch.setattr(prometheus, "BURST_S", 0.0)
    monkeypatch.setattr(prometheus, "SHARE", 1e-7)

    async def ask() -> None:
        first = await renderings.text(False)
        waiting = [asyncio.create_task(renderings.text(False)) for _ in range(50)]
        await asyncio.to_thread(prometheus.rendered, renderings.context, "tiny", False, {}, renderings.fingerprints)
        assert renderings._next
        assert not any(task.done() for task in waiting)
        assert first

    asyncio.run(ask())
