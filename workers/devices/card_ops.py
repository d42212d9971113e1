"""CUDA's rows for the card of a rank: built by nvcc, where there is one, when they are first needed; and taken where they are
right.

Called by `workers/runners.pygpu.py` with `--ops cuda`. The library is kept for later starts, by what it was made of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from engine.checkpoint.files import user_cache
from engine.errors import OptionError
from ops.table import OpTable

_LOG = logging.getLogger(__name__)


class CardRows(msgspec.Struct, frozen=True):
    """Rows that nobody has tried on this card yet. `needed_by`: the option that no other ops on a card have, or none."""

    make: Callable[[Any], OpTable]  # of a rank group (`Device.rank_group`); None: of one rank
    needed_by: str = ""


def leave_rows(cause: str, needed_by: str, remedy: str) -> None:
    """Other ops are taken, which is said. OptionError: these lack what was asked for."""
    if needed_by:
        raise OptionError(f"--ops cuda: {cause}; {needed_by} needs them, remove it{remedy}")
    _LOG.warning("--ops cuda: using fused ops instead: %s", cause)


def card_rows(needed_by: str = "") -> CardRows | None:
    """Those that nvcc builds; None: it does not. OptionError: and they are needed."""
    from ops.cuda.library import BuildError, Library, build, card_command, find_nvcc  # with Paddle's table
    from ops.cuda.table import make_table

    try:
        library = Library(build(card_command(find_nvcc()), user_cache() / "cuda"))
    except BuildError as error:
        leave_rows(str(error), needed_by, " or install nvcc")
        return None
    return CardRows(lambda rank_group: make_table(library, current_stream, rank_group), needed_by)


def current_stream() -> int:
    """The address of that on which Paddle enqueues now."""
    import paddle

    stream: Any = paddle.device.current_stream()
    return int(stream.stream_base.cuda_stream)
