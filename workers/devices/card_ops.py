"""CUDA's rows for the card of a rank: built by nvcc, where there is one, when they are first needed.

Called by `workers/runners/gpu.py` with `--ops cuda`. The library is kept for later starts, by what it was made of.
"""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING, Any

from engine.checkpoint.files import user_cache
from engine.errors import OptionError
from ops.table import OpTable

if TYPE_CHECKING:
    from ops.paddle.gang import GangOps

_LOG = logging.getLogger(__name__)


def card_ops(others: OpTable, needs_rows: str = "", gang: GangOps | None = None) -> OpTable:
    """The rows' table; without a compiler for them `others`, which is said. OptionError: an option `needs_rows`. `gang`: what
    several ranks exchange."""
    from ops.cuda.library import USUAL_NVCC, BuildError, Library, build, card_command  # with Paddle's table
    from ops.cuda.table import make_table

    nvcc = shutil.which("nvcc") or shutil.which(USUAL_NVCC)
    try:
        if nvcc is None:
            raise BuildError(f"there is no nvcc (on PATH or {USUAL_NVCC}), which builds these kernels")
        library = Library(build(card_command(nvcc), user_cache() / "cuda"))
    except BuildError as error:
        if needs_rows:
            raise OptionError(f"--ops cuda: {error}; {needs_rows} needs them, leave it out or install nvcc") from error
        _LOG.warning("--ops cuda: fused ops are taken: %s", error)
        return others
    return make_table(library, current_stream, gang)


def current_stream() -> int:
    """The address of that on which Paddle enqueues now."""
    import paddle

    stream: Any = paddle.device.current_stream()
    return int(stream.stream_base.cuda_stream)
