"""A process that has the device, in which tests call the functions of `on_device.py`: Paddle was loaded without it in the
test's own process.
"""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.devices.board import Board
from tests.devices.build import environment


class Child:
    def __init__(self, plugin: Path, board: Board, **more: str) -> None:
        variables = environment(plugin, board, **more)
        self.board = board
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=_set_environment, initargs=(variables,))

    def call(self, function: str, *arguments: Any, **options: Any) -> Any:
        """Call a function in the child and return or raise its result."""
        return self._pool.submit(call_there, function, arguments, options).result()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown()


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def call_there(function: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a function of `on_device.py` in this process."""
    return getattr(importlib.import_module("tests.devices.on_device"), function)(*arguments, **options)
