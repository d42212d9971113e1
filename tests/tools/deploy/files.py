"""The files of tools/deploy as their readers see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.paths import REPOSITORY
from tools.deploy.rehearsal import Instruction, stages

DEPLOY = REPOSITORY / "tools" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"


def image() -> list[Instruction]:
    """The stage that runs."""
    return stages()[-1]


def service() -> dict[str, list[str]]:
    """Settings of the systemd unit, each with its values."""
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
    """The Kubernetes object of that kind."""
    (found,) = (each for path in sorted(KUBERNETES.glob("*.yaml")) for each in [document(path)] if each.get("kind") == kind)
    return found


def container() -> Any:
    """The one of a pod."""
    (found,) = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    return found
