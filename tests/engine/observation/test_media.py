"""Pictures and video in the derived metrics and on the screen of `tokamak top`."""

from __future__ import annotations

import msgspec
import pytest

from engine.observation.figures import figures
from engine.observation.media import MediaFigures
from engine.observation.snapshot import Histogram, Row, Snapshot
from tests.tools.engines import busy, counter
from tests.tools.top.test_screen import screen


def times(name: str, actor: str, seconds: float) -> Row:
    return msgspec.structs.replace(counter(name, actor, 0), kind="histogram", histogram=Histogram((1.0,), (2, 0), seconds))


def seeing() -> Snapshot:
    base = busy(8.0)
    of_scheduler = {"encoder_calls": 3, "encoder_units": 7, "encoder_evictions": 2, "mm_cache_queries": 10, "mm_cache_hits": 3}
    seconds = [("fetch", "api0", 0.5), ("fetch", "api1", 0.25), ("prepare", "media0", 0.125), ("decode", "media0", 2.0)]
    rows = [
        *(counter(f"{name}_total", "scheduler", value) for name, value in of_scheduler.items()),
        *(counter("encoder_seconds_total", worker, value) for worker, value in (("worker0", 4.0), ("worker1", 1.5))),
        *(times(f"media_{stage}_seconds", actor, value) for stage, actor, value in seconds),
    ]
    return msgspec.structs.replace(base, rows=[*base.rows, *rows])


def test_units_and_seconds_of_each_station() -> None:
    assert figures(seeing()).media == MediaFigures(3, 7, 0.3, 2, 0.75, 0.125, 2.0, 5.5)
    assert figures(busy(8.0)).media is None


@pytest.mark.parametrize("width", [80, 160])
def test_the_line(width: int) -> None:
    (line,) = [line for line in screen(seeing(), width, 40) if line.startswith("media")]
    assert " ".join(line.split()[1:]) == "7 units encoded 30% hits 750ms fetch 2.12s decode 5.50s encode"
    assert not any(line.startswith("media") for line in screen(busy(8.0), width, 40))
