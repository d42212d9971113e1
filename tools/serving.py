"""`tokamak serve`: the engine's launcher, with the model of this repository for those who name none, and our kernels."""

from __future__ import annotations

from engine.supervisor import launch
from tools.demo import MODEL
from workers.devices.kernels import kernels


def main(arguments: list[str]) -> int:
    """Serve until asked to stop. The exit code."""
    return launch.main(arguments, str(MODEL), kernels)
