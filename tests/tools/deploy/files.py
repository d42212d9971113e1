"""The files of tools/deploy, parsed as their readers parse them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.paths import REPOSITORY
from tools.deploy.rehearsal import Instruction, stages

DEPLOY = REPOSITORY / "tools" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
CLUSTER = DEPLOY / "kubernetes-cluster"


def image() -> list[Instruction]:
    """Return the instructions of the last stage, which is the one that runs."""
    return stages()[-1]


def service() -> dict[str, list[str]]:
    """Return the settings of the systemd unit, each with its values."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "tokamak.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def document(path: Path) -> Any:
    """Return the one document of a YAML file."""
    return yaml.safe_load(path.read_text())


def manifest(kind: str) -> Any:
    """Return the Kubernetes object of that kind."""
    (found,) = (each for path in sorted(KUBERNETES.glob("*.yaml")) for each in [document(path)] if each.get("kind") == kind)
    return found


def container() -> Any:
    """Return the only container of the pod."""
    (found,) = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    return found


def cluster_object(kind: str, name: str = "") -> Any:
    """Return the Kubernetes object of that kind and name, of the manifests for routers and engines."""
    documents = [each for path in sorted(CLUSTER.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]
    (found,) = (each for each in documents if each["kind"] == kind and name in ("", each.get("metadata", {}).get("name")))
    return found


def cluster_pod(kind: str) -> tuple[Any, Any]:
    """Return the pod of engines (StatefulSet) or routers (Deployment), and its only container."""
    pod = cluster_object(kind)["spec"]["template"]["spec"]
    (only,) = pod["containers"]
    return pod, only


def variables_of(container: Any) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"]}
