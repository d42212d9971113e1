"""Every expression of every panel has data, every rule is right on series written down for it, and what `/metrics` prints is
what Prometheus reads."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.engine_process import DEMO, EngineProcess
from tests.e2e.router_process import RouterProcess, free_address
from tests.paths import REPOSITORY
from tests.waiting import WATCHDOG_S, wait_until

GRAFANA = REPOSITORY / "tools" / "grafana"
DASHBOARDS = sorted(path for path in GRAFANA.glob("*.json"))
VARIABLES = {"$__rate_interval": "30s", "$model": ".*"}  # as Grafana fills them in
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
LOAD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "What is 12 + 345?", "max_tokens": 20, "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is 1 + 2?"}], "max_tokens": 20}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Add 1"}], "tools": [TOOL], "max_tokens": 20}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Say it"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}}},
            },
            "max_tokens": 20,
        },
    ),
    ("/v1/completions", {"prompt": 5}),
    ("/tokenize", {"prompt": "hello"}),
)


def promtool(*arguments: str, code: int = 0, text: str | None = None) -> str:
    done = subprocess.run(["promtool", *arguments], cwd=GRAFANA, input=text, capture_output=True, text=True, timeout=WATCHDOG_S)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_rules_are_right() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", "rules.yml")
    promtool("test", "rules", "rules_test.yml")


def test_the_rules_test_can_fail(tmp_path: Path) -> None:
    """promtool really compares: without the cause of the alert, its test fails."""
    for name in ("rules.yml", "rules_test.yml"):
        shutil.copy(GRAFANA / name, tmp_path)
    rules = tmp_path / "rules.yml"
    rules.write_text(rules.read_text().replace("> 0.95", "> 1.95"))
    done = subprocess.run(
        ["promtool", "test", "rules", "rules_test.yml"], cwd=tmp_path, capture_output=True, timeout=WATCHDOG_S
    )
    assert done.returncode == 1


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(DEMO, "--tool-call-parser", "hermes", "--cluster-listen", free_address()) as running:
        yield running


@pytest.fixture(scope="module")
def router(engine: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    with RouterProcess(tmp_path_factory.mktemp("router"), [engine.run.manifest().config.cluster_listen]) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(engine: EngineProcess, router: RouterProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Prometheus that scrapes an engine and a router every second."""
    directory = tmp_path_factory.mktemp("prometheus")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(GRAFANA / "rules.yml")],
        "scrape_configs": [
            {
                "job_name": "tokamak",
                "static_configs": [{"targets": [f"127.0.0.1:{process.port}" for process in (engine, router)]}],
            }
        ],
    }
    path = directory / "prometheus.yml"
    path.write_text(json.dumps(config))  # which is YAML
    with (directory / "log").open("w") as log:
        server = subprocess.Popen(
            ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={directory}/data", f"--web.listen-address={address}"],
            stdout=log,
            stderr=log,
        )
    try:
        url = f"http://{address}"
        wait_until(lambda: _is_ready(url) or server.poll() is not None, what="Prometheus ready")
        assert server.poll() is None, (directory / "log").read_text()
        yield url
    finally:
        server.kill()
        server.wait()


def _is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/-/ready", timeout=WATCHDOG_S).status_code == 200
    return False


@pytest.fixture(scope="module")
def load(engine: EngineProcess, prometheus: str) -> Iterator[None]:
    """Send requests of many kinds until the tests are over, and crash an actor in the middle of an answer."""
    is_over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=engine.url, timeout=WATCHDOG_S) as client:
            while not is_over.is_set():
                for path, body in LOAD:
                    client.post(path, json=body)
                is_over.wait(0.2)

    # Prometheus sees no growth of a counter before its first look
    wait_until(lambda: query(prometheus, 'up{job="tokamak"}') == [1.0, 1.0], what="Prometheus has looked at both")
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        body = {"prompt": "What is", "max_tokens": 500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{engine.url}/v1/completions", json=body, timeout=WATCHDOG_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            engine.kill("tokenizer0")
            assert [line for line in lines if line][-1] == "data: [DONE]"
        yield
    finally:
        is_over.set()
        asking.join()


def query(url: str, expression: str) -> list[float]:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=WATCHDOG_S)
    assert answer.status_code == 200, (expression, answer.text)
    return [float(series["value"][1]) for series in answer.json()["data"]["result"]]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_every_expression_has_data(dashboard: Path, prometheus: str, load: None) -> None:
    document = json.loads(dashboard.read_text())
    expressions = [target["expr"] for panel in document["panels"] for target in panel.get("targets", ())]
    assert len(expressions) > 20
    missing = list(expressions)

    def has_all() -> bool:
        missing[:] = [each for each in missing if not any(map(math.isfinite, query(prometheus, each)))]
        return not missing

    try:
        wait_until(has_all, what="data for every expression")
    except TimeoutError as error:
        raise AssertionError(f"no data for {missing}") from error
    for annotation in document["annotations"]["list"]:
        query(prometheus, annotation["expr"])


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_are_laid_out(dashboard: Path) -> None:
    """Each panel has a place of its own, a title, and a selectable data source."""
    panels = json.loads(dashboard.read_text())["panels"]
    taken = {
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    }
    assert len(taken) == sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in panels)
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] for panel in panels)
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels if panel["type"] != "row")


def test_the_rules_are_evaluated(prometheus: str, load: None) -> None:
    def rules() -> list[dict[str, Any]]:
        groups = httpx.get(f"{prometheus}/api/v1/rules", timeout=WATCHDOG_S).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] == "ok" for rule in rules()), what="every rule was evaluated")
    # because of the crash: one restart in a short time is extrapolated to more in ten minutes
    allowed = {"TokamakErrors", "TokamakActorRestarting"}
    assert {rule["name"] for rule in rules() if rule["state"] == "firing"} <= allowed
    wait_until(lambda: query(prometheus, 'up{job="tokamak"}') == [1.0, 1.0], what="looks that took less than their second")


def test_promtool_accepts_the_metrics(engine: EngineProcess) -> None:
    """The syntax is valid; promtool only complains about the colon of the prefix and about some names that are vLLM's."""
    text = httpx.get(f"{engine.url}/metrics", timeout=WATCHDOG_S).text
    said = promtool("check", "metrics", code=3, text=text).splitlines()
    others = [line for line in said if "should not contain ':'" not in line]
    assert {re.split(r"[ :]", line.removeprefix("tokamak:"))[0] for line in others} <= {"iteration_tokens_total"}, others
