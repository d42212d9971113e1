"""Fixtures of the op tests, which run Paddle as a worker does: the BLAS is set before it is loaded. `k` is each op table in
turn.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ops import _cpu
from workers.devices.blas import configure_blas

configure_blas(1)

from ops.table import OpTable  # noqa: E402
from tests.ops.tables import TABLES, table  # noqa: E402

# Without AVX2 there is no model of tiles.
collect_ignore = [] if "amxemulated" in _cpu.variants() else ["test_tile_model.py", "test_tiled_linears.py"]


@pytest.fixture(params=TABLES)
def k(request: pytest.FixtureRequest) -> Iterator[OpTable]:
    with table(request.param) as found:
        yield found
