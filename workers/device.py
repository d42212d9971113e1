"""The device of this rank: where tensors live, and how the host writes what a step reads.

Used by the runner and the loader. On a CPU the host's arrays and the device's tensors are the same memory, so an upload is
nothing.
"""

from __future__ import annotations

import numpy as np
import paddle
from paddle.utils import dlpack

from engine.errors import OptionError
from ops import _cpu, reference
from ops.cpu import table as native
from ops.table import OpTable


class Device:
    """A Paddle place. `name` is "cpu", "gpu" or "xpu"."""

    def __init__(self, name: str) -> None:
        available = {
            "cpu": True,
            "gpu": paddle.is_compiled_with_cuda(),
            "xpu": paddle.is_compiled_with_xpu(),
        }
        if not available.get(name, False):
            usable = ", ".join(kind for kind, is_usable in available.items() if is_usable)
            raise OptionError(f"--device {name}: the installed Paddle {paddle.__version__} supports {usable}")
        self.name = name
        self.is_host = name == "cpu"
        paddle.set_device("cpu" if self.is_host else f"{name}:0")

    def table(self, name: str, num_threads: int) -> OpTable:
        """The op table "native" (on a CPU alone; `num_threads` threads from now on) or "reference"."""
        if name == "reference":
            return reference.TABLE
        assert self.is_host, f"there are no native ops for {self.name}"
        _cpu.set_num_threads(num_threads)
        return native.TABLE

    def tensor(self, host: np.ndarray) -> paddle.Tensor:
        """A tensor that stays tied to `host`: the same memory on a CPU, else a copy that `upload` refreshes."""
        return dlpack.from_dlpack(host) if self.is_host else paddle.to_tensor(host)

    def upload(self, host: np.ndarray, tensor: paddle.Tensor) -> None:
        """Make `tensor` hold what `host` holds; its address stays."""
        if not self.is_host:
            paddle.assign(host, output=tensor)
