"""The files of tools/deploy, parsed as their readers parse them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.paths import REPOSITORY
from tools.deploy.rehearsal import Instruction, stages

DEPLOY = REPOSITORY / "tools" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"


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
