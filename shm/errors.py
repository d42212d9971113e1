"""The root of the engine's exception tree and the errors of shared memory. `engine.errors` takes both from here, so that
imports point one way and there is one tree."""

from __future__ import annotations


class TokamakError(Exception):
    """Anything the engine reports on purpose."""


class SharedMemoryError(TokamakError):
    """A segment cannot be made, found or trusted."""
