"""A Paddle place with the reference ops. Besides the ops themselves, `groups.py` and `parallel/gloo.py` the one module that
imports Paddle; made by `device.py` where no native table serves. On a CPU the host's arrays and Paddle's tensors are the same
memory.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import numpy as np
import paddle
from paddle.utils import dlpack

from engine.errors import OptionError
from ops.paddle import reference
from ops.paddle.gang import GangOps
from workers.devices.groups import PaddleGroup
from workers.parallel.meetings import Meetings


class PaddleDevice:
    """`name` is "cpu", "gpu" or "xpu". Of several ranks that exchange tensors each has a device of its own, by its number."""

    def __init__(self, name: str, rank: int = 0, meetings: Meetings | None = None) -> None:
        available = {
            "cpu": True,
            "gpu": paddle.is_compiled_with_cuda(),
            "xpu": paddle.is_compiled_with_xpu(),
        }
        if not available.get(name, False):
            usable = ", ".join(kind for kind, is_usable in available.items() if is_usable)
            raise OptionError(f"--device {name}: the installed Paddle {paddle.__version__} supports {usable}")
        self._is_host = name == "cpu"
        paddle.set_device("cpu" if self._is_host else f"{name}:{rank if meetings else 0}")
        self.ops = reference.TABLE
        if meetings is not None:
            groups = [PaddleGroup(meeting, name) if meeting else None for meeting in (meetings.tensor, meetings.experts)]
            self.ops = GangOps(*groups).table()

    def tensor(self, host: np.ndarray) -> paddle.Tensor:
        return dlpack.from_dlpack(host) if self._is_host else paddle.to_tensor(host)

    def upload(self, host: np.ndarray, tensor: paddle.Tensor) -> None:
        if not self._is_host:
            paddle.assign(host, output=tensor)

    def threads_of(self, num_ranks: int) -> AbstractContextManager[None]:
        """Paddle's own."""
        return contextlib.nullcontext()
