"""The files of tools/deploy as their readers see them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.paths import REPOSITORY

DEPLOY = REPOSITORY / "tools" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"


class Instruction(NamedTuple):
    """One of a Containerfile: its name in capitals, and what follows."""

    name: str
    text: str

    @property
    def command(self) -> list[str]:
        """Of one in JSON's form, with or without CMD and options before it."""
        words: list[str] = json.loads(self.text[self.text.index("[") :])
        return words


def containerfile() -> list[list[Instruction]]:
    """The instructions of each stage."""
    stages: list[list[Instruction]] = []
    for line in (DEPLOY / "Containerfile").read_text().replace("\\\n", "").splitlines():
        if line and not line.startswith("#"):
            name, _, text = line.partition(" ")
            if name == "FROM":
                stages.append([])
            stages[-1].append(Instruction(name, text))
    return stages


def image_environment() -> dict[str, str]:
    """Variables of the image that runs."""
    pairs = (word.partition("=") for name, text in containerfile()[-1] if name == "ENV" for word in shlex.split(text))
    return {name: value for name, _, value in pairs}


def service() -> dict[str, list[str]]:
    """Settings of the systemd unit, each with its values."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "tokamak.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def document(path: Path) -> Any:
    """Of YAML, the one in it."""
    return yaml.safe_load(path.read_text())


def manifest(kind: str) -> Any:
    """The Kubernetes object of that kind."""
    (found,) = (each for path in sorted(KUBERNETES.glob("*.yaml")) for each in [document(path)] if each.get("kind") == kind)
    return found


def container() -> Any:
    """The one of a pod."""
    (found,) = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    return found
