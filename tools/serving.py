"""`tokamak serve`: the engine's launcher, with the embedded models as default, and our kernels."""

from __future__ import annotations

from engine.supervisor import launch
from tools.demo import MODELS
from workers.devices.kernels import kernels


def main(arguments: list[str]) -> int:
    """Serve until asked to stop; return the exit code."""
    return launch.main(arguments, MODELS, kernels)
