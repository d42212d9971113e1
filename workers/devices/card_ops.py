"""CUDA ops for the card of a rank: compiled when first needed, and used if they prove correct.

Called by `workers/runners.py` with `--ops cuda`. Compiled kernels are kept for later starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from engine.checkpoint.files import user_cache
from engine.errors import OptionError
from ops.table import OpTable
from shm.cuda_driver import CudaDriver
from workers.devices.card_kernels import card_library

_LOG = logging.getLogger(__name__)


class CardRows(msgspec.Struct, frozen=True):
    """CUDA ops not yet tried on this card. `needed_by`: the option that only they support, or empty."""

    make: Callable[[Any], OpTable]  # from a rank group (`Device.rank_group`); None: a single rank
    needed_by: str = ""


def leave_rows(cause: str, needed_by: str, remedy: str) -> None:
    """Fall back to other ops, with a warning. Raises OptionError if they do not support `needed_by`."""
    if needed_by:
        raise OptionError(f"--ops cuda: {cause}; {needed_by} needs CUDA ops; remove it{remedy}")
    _LOG.warning("--ops cuda: using fused ops instead: %s", cause)


def card_rows(driver: str, rank: int, needed_by: str = "") -> CardRows | None:
    """Return the ops on the card of a rank, by the library `driver`; None if they cannot be compiled. Raises OptionError if
    they are needed."""
    from ops.cuda.library import BuildError
    from ops.cuda.table import make_table  # needs Paddle's op table

    try:
        library = card_library(CudaDriver(driver, rank, BuildError), user_cache() / "cuda")
    except BuildError as error:
        leave_rows(str(error), needed_by, " or install what is missing")
        return None
    return CardRows(lambda rank_group: make_table(library, current_stream, rank_group), needed_by)


def current_stream() -> int:
    """Return the address of Paddle's current stream."""
    import paddle

    stream: Any = paddle.device.current_stream()
    return int(stream.stream_base.cuda_stream)
