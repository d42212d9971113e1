"""`tokamak router`: one address for the engines of many machines."""

from __future__ import annotations

from engine.supervisor import launch


def main(arguments: list[str]) -> int:
    """Serve until asked to stop; return the exit code."""
    return launch.route(arguments)
