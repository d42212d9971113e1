"""tools/deploy: parsed by its real readers where these are installed, and compared with the engine: options, routes, metrics
and exit codes.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from starlette.routing import Route

from api.routes import routes
from engine.cluster.key import is_exposed
from engine.cluster.membership import DNS, parse_address
from engine.errors import EXIT_BAD_OPTIONS
from engine.metrics import BY_ROLE
from engine.options.read import ENVIRONMENT_PREFIX
from engine.options.router import ROUTER_OPTIONS
from engine.options.table import OPTIONS
from tests.tools.deploy.files import (
    CLUSTER,
    DEPLOY,
    KUBERNETES,
    cluster_object,
    cluster_pod,
    container,
    document,
    image,
    manifest,
    service,
    variables_of,
)
from tools.deploy.rehearsal import environment, stages

COMPOSE = document(DEPLOY / "compose.yaml")
POD = manifest("Deployment")["spec"]["template"]["spec"]
CONTAINER = container()
WAITING = "tokamak:num_requests_waiting"


def test_variables_are_options() -> None:
    literals = manifest("Kustomization")["configMapGenerator"][0]["literals"]
    named = {*environment(image()), *COMPOSE["services"]["tokamak"]["environment"]}
    named |= {literal.partition("=")[0] for literal in literals}
    ours = {name.removeprefix(ENVIRONMENT_PREFIX).lower() for name in named if name.startswith(ENVIRONMENT_PREFIX)}
    assert ours
    assert ours <= {*OPTIONS}


def test_image_runs_unprivileged_without_paddle() -> None:
    last = image()
    assert [text for name, text in last if name == "USER"] == ["10001:10001"]
    assert [each.command for each in last if each.name == "ENTRYPOINT"] == [["tokamak", "serve"]]
    assert not [text for stage in stages() for name, text in stage if name == "RUN" and "paddle" in text]
    bases = {text.partition(" ")[0] for stage in stages() for name, text in stage if name == "FROM"}
    assert len(bases) == 1, "modules are built for the Python that runs them"


def test_image_ignores_stray_files() -> None:
    left_out = (DEPLOY.parents[1] / ".dockerignore").read_text().split("\n")
    assert {".*", "build", "**/*.so"} <= {*left_out}
    assert {"**/.git", "tools", "api"}.isdisjoint(left_out)


def test_compose_publishes_on_loopback_only() -> None:
    for name, each in COMPOSE["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in each["ports"]), name
        for volume in each.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).resolve().is_relative_to(DEPLOY.parent), source
            assert source in COMPOSE["volumes"] or (DEPLOY / source).exists(), source
    engine = COMPOSE["services"]["tokamak"]
    assert engine["read_only"]
    assert engine["cap_drop"] == ["ALL"]
    assert (DEPLOY / engine["build"]["context"] / engine["build"]["dockerfile"]).exists()


def test_prometheus_asks_the_engine_and_grafana_asks_prometheus() -> None:
    (job,) = document(DEPLOY / "prometheus.yml")["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert host in COMPOSE["services"]
    assert port == environment(image())["TOKAMAK_PORT"]
    (source,) = document(DEPLOY / "grafana" / "datasources" / "prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = document(DEPLOY / "grafana" / "dashboards" / "tokamak.yaml")["providers"]
    places = [volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"]]
    assert provider["options"]["path"] in places


def test_probes_ask_routes_that_say_it() -> None:
    paths = {route.path for route in routes() if isinstance(route, Route)}
    asked = {name: CONTAINER[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: get["path"] for name, get in asked.items()} == {
        "startup": "/health",
        "readiness": "/health",
        "liveness": "/health/live",  # what is paused or loads is not to be killed
    }
    assert {get["path"] for get in asked.values()} <= paths
    assert CONTAINER["ports"] == [{"name": "http", "containerPort": int(environment(image())["TOKAMAK_PORT"])}]
    assert {get["port"] for get in asked.values()} == {"http"} == {manifest("Service")["spec"]["ports"][0]["targetPort"]}


def test_pod_matches_the_image() -> None:
    """No other paths than those of the image are writable, and service links set no variables."""
    users = [text for name, text in image() if name == "USER"]
    context = POD["securityContext"]
    assert users == [f"{context['runAsUser']}:{context['runAsGroup']}"]
    assert context["runAsNonRoot"]
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    assert {mount["mountPath"] for mount in CONTAINER["volumeMounts"]} == {"/tmp", environment(image())["XDG_CACHE_HOME"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {volume["name"] for volume in POD["volumes"]}
    assert POD["enableServiceLinks"] is False, "a service `tokamak` sets TOKAMAK_PORT"


def test_pods_are_scaled_by_waiting_requests() -> None:
    scaler = manifest("HorizontalPodAutoscaler")["spec"]
    target = scaler["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", manifest("Deployment")["metadata"]["name"])
    (metric,) = scaler["metrics"]
    (rule,) = document(KUBERNETES / "prometheus-adapter.yaml")["rules"]["custom"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"] == WAITING.replace(":", "_")
    assert f'"{WAITING}"' in rule["seriesQuery"]
    assert WAITING.partition(":")[2] in {each.name for each in BY_ROLE["scheduler"]}


PODS = {"StatefulSet": OPTIONS, "Deployment": ROUTER_OPTIONS}  # of engines and of routers


@pytest.mark.parametrize("kind", PODS)
def test_cluster_pods_match_the_image(kind: str) -> None:
    pod, own = cluster_pod(kind)
    users = [text for name, text in image() if name == "USER"]
    context = pod["securityContext"]
    assert users == [f"{context['runAsUser']}:{context['runAsGroup']}"]
    assert context["fsGroup"] == context["runAsGroup"], "the group of the mounted key"
    assert own["securityContext"] == CONTAINER["securityContext"]
    assert own["ports"][0] == CONTAINER["ports"][0]
    assert {name: own[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")} == {
        name: CONTAINER[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")
    }
    key = Path(variables_of(own)["TOKAMAK_CLUSTER_KEY_FILE"])
    (volume,) = (each["secret"] for each in pod["volumes"] if "secret" in each)
    assert not is_exposed(volume["defaultMode"], owner=0, user=context["runAsUser"])
    places = {mount["mountPath"]: mount for mount in own["volumeMounts"]}
    assert places.keys() == {"/tmp", environment(image())["XDG_CACHE_HOME"], str(key.parent)}
    assert places[str(key.parent)]["readOnly"]
    assert pod["enableServiceLinks"] is False


@pytest.mark.parametrize("kind", PODS)
def test_cluster_variables_are_options(kind: str) -> None:
    _, own = cluster_pod(kind)
    (name, *_) = (each["configMapRef"]["name"] for each in own["envFrom"] if "configMapRef" in each)
    generated = {each["name"]: each["literals"] for each in cluster_object("Kustomization")["configMapGenerator"]}
    named = [*variables_of(own), *(literal.partition("=")[0] for literal in generated[name])]
    assert {each.removeprefix(ENVIRONMENT_PREFIX).lower() for each in named} <= PODS[kind].keys()
    assert own.get("command", ["tokamak", "serve"]) == ["tokamak", "serve" if kind == "StatefulSet" else "router"]


def test_routers_find_engines_by_the_headless_service() -> None:
    engines, (_, router) = cluster_object("StatefulSet"), cluster_pod("Deployment")
    _, engine = cluster_pod("StatefulSet")
    headless = cluster_object("Service", engines["spec"]["serviceName"])
    (port,) = headless["spec"]["ports"]
    assert (headless["spec"]["clusterIP"], headless["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert headless["spec"]["selector"] == engines["spec"]["template"]["metadata"]["labels"]
    listed = variables_of(router)["TOKAMAK_ENGINES"]
    assert listed.startswith(DNS)
    found = parse_address(listed.removeprefix(DNS))
    assert (found.host, found.port) == (headless["metadata"]["name"], port["port"])
    assert parse_address(variables_of(engine)["TOKAMAK_CLUSTER_LISTEN"]).port == found.port
    assert {"name": port["targetPort"], "containerPort": found.port} in engine["ports"]
    routers = cluster_object("Deployment")["spec"]
    assert cluster_object("Service", "tokamak")["spec"]["selector"] == routers["template"]["metadata"]["labels"]
    assert engines["spec"]["replicas"] <= ROUTER_OPTIONS["max_engines"].default


def test_service_with_bad_options_is_not_restarted() -> None:
    unit = service()
    assert unit["ExecStart"] == ["/opt/tokamak/bin/tokamak serve"]
    assert unit["Restart"] == ["on-failure"]
    assert unit["RestartPreventExitStatus"] == [str(EXIT_BAD_OPTIONS)]
    assert unit["OOMPolicy"] == ["continue"], "the engine starts its actors again by itself"
    assert unit["DynamicUser"] == ["yes"]


def test_every_document_is_yaml() -> None:
    paths = [path for path in DEPLOY.rglob("*") if path.suffix in (".yaml", ".yml")]
    assert all(list(yaml.safe_load_all(path.read_text())) for path in paths)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing (Debian: systemd; the unit)")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "tokamak.service"
    unit.write_text((DEPLOY / "tokamak.service").read_text().replace("/opt/tokamak/bin/tokamak", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60, check=False)
    ours = [line for line in done.stderr.splitlines() if unit.name in line]
    assert (done.returncode, ours) == (0, [])


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is missing (the manifests, put together)")
def test_kubectl_puts_the_manifests_together() -> None:
    done = subprocess.run(["kubectl", "kustomize", KUBERNETES], capture_output=True, text=True, timeout=60, check=True)
    kinds = [each["kind"] for each in yaml.safe_load_all(done.stdout)]
    assert sorted(kinds) == ["ConfigMap", "Deployment", "HorizontalPodAutoscaler", "PodDisruptionBudget", "Service"]
    done = subprocess.run(["kubectl", "kustomize", CLUSTER], capture_output=True, text=True, timeout=60, check=True)
    assert len(list(yaml.safe_load_all(done.stdout))) == 8
