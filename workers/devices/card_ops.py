"""CUDA's rows for the card of a rank: built by nvcc, where there is one, when they are first needed.

Called by `workers/runners/gpu.py` with `--ops cuda`. The library is kept for later starts, by what it was made of.
"""

from __future__ import annotations

import logging
import shutil
from typing import Any

from engine.checkpoint.files import user_cache
from ops.table import OpTable

_LOG = logging.getLogger(__name__)


def card_ops(others: OpTable) -> OpTable:
    """The rows' table; without a compiler for them `others`, which is said."""
    from ops.cuda.library import USUAL_NVCC, BuildError, Library, build, card_command  # with Paddle's table
    from ops.cuda.table import make_table

    nvcc = shutil.which("nvcc") or shutil.which(USUAL_NVCC)
    if nvcc is None:
        _LOG.warning(
            "--ops cuda: there is no nvcc (on PATH or %s), which builds these kernels; fused ops are taken", USUAL_NVCC
        )
        return others
    try:
        library = Library(build(card_command(nvcc), user_cache() / "cuda"))
    except BuildError as error:
        _LOG.warning("--ops cuda: the kernels cannot be built, fused ops are taken: %s", error)
        return others
    return make_table(library, current_stream)


def current_stream() -> int:
    """The address of that on which Paddle enqueues now."""
    import paddle

    stream: Any = paddle.device.current_stream()
    return int(stream.stream_base.cuda_stream)
