"""The root of the exception tree, and the errors of shared memory. `engine.errors` imports both, so that imports go one way and
there is one tree.
"""

from __future__ import annotations


class TokamakError(Exception):
    """Base class of all errors that the engine reports on purpose."""


class SharedMemoryError(TokamakError):
    """A segment cannot be created, found or trusted."""
