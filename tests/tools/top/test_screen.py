"""The screen of `tokamak top` fits its terminal with any content."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console

from engine.observation.figures import History, figures
from engine.observation.snapshot import AdapterLoad, EngineLoad, Snapshot
from tests.tools.engines import ACTORS, RINGS, busy, counter, histogram, snapshot
from tools import units
from tools.top.screen import render
from tools.top.work import RunTitle

TITLE = RunTitle("1a2b3c4d", "qwen3-demo", "http://127.0.0.1:8000", 1000.0, "avx512bf16; amx: int8, attention", "cpu")


def screen(now: Snapshot, width: int, height: int | None, footer: str = "q: quit") -> list[str]:
    history = History()
    for second in (1.0, 2.0):
        history.add(busy(second))
    console = Console(width=width, height=height or 100, color_system=None, force_terminal=True)
    rates = list(history.generation_rates) * 60
    with console.capture() as capture:
        derived = history.add(now)
        console.print(render(TITLE, now, derived, rates, width=width, height=height, now=1723.0, footer=footer))
    return capture.get().rstrip("\n").split("\n")


@pytest.mark.parametrize("height", [24, 30, 50, None])
@pytest.mark.parametrize("width", [80, 100, 160, 240])
def test_it_fits(width: int, height: int | None) -> None:
    lines = screen(busy(5.0), width, height)
    assert height is None or len(lines) <= height
    assert max(len(line) for line in lines) <= width
    text = "\n".join(lines)
    for wanted in (
        *ACTORS,
        "12 running",
        "3 waiting",
        "600/1000",
        "45% prefix hits",
        "100 generated",
        "device    cpu: no graphs, cache survives a restart of its rank, float32",
        "kernels   avx512bf16; amx: int8, attention",
        "error number 0",
        "q: quit",
    ):
        assert wanted in text
    for wanted in ("schedule", "dispatch", "run", "sample", "return", "80%", "TTFT", "TPOT", "ITL", "E2E", "ranks idle 10%"):
        assert wanted in text
    assert "normal  weights v2  up 12m03s" in lines[0]


KINDS = ("draft", "accepted")


def wide_snapshot() -> Snapshot:
    """Return a snapshot with everything that the screen can show, in long words."""
    whole = busy(5.0)
    actors = [msgspec.structs.replace(actor, pid=4194303, state="STARTING", restarts=12) for actor in whole.actors]
    rows = [
        *whole.rows,
        counter("requests_routed_total", "tokenizer0", 7_000_000, reason="prefix"),
        counter("spec_decode_num_draft_tokens_total", "scheduler", 4000),
        *(counter(f"spec_decode_num_{kind}_tokens_by_method_total", "scheduler", 4000, method="mtp") for kind in KINDS),
        *(
            counter(f"spec_decode_num_{kind}_tokens_per_pos_total", "scheduler", 9, position=place)
            for kind in KINDS
            for place in "0123"
        ),
    ]
    return msgspec.structs.replace(whole, actors=actors, rows=rows, errors=[])


def test_80_columns_cut_no_figure() -> None:
    text = "\n".join(screen(wide_snapshot(), 80, None))
    assert "\u2026" not in text
    for wanted in (
        "heartbeat",
        "restarts",
        "rss",
        "4194303",
        "STARTING",
        "samples",
        "full waits",
        "100% of mtp",
        "% by position",
        "q: quit",
        "qwen3-demo",
    ):
        assert wanted in text


@pytest.mark.parametrize(("width", "kept"), [(60, ("cpu", "4194303", "p90")), (40, ("heartbeat", "p50"))])
def test_narrow_tables_leave_out_whole_columns(width: int, kept: tuple[str, ...]) -> None:
    lines = screen(wide_snapshot(), width, None)
    assert max(map(len, lines)) <= width
    tables = [line for line in lines if line.startswith((*ACTORS, "actor", "ring", "step", "run "))]
    assert len(tables) > len(ACTORS)
    assert not any("\u2026" in line for line in tables)
    for wanted in (*ACTORS, *kept, "12 running", "600/1000", "prefix hits"):
        assert wanted in "\n".join(lines)


@pytest.mark.parametrize(("width", "height"), [(20, 5), (40, 12), (80, 10)])
def test_a_tiny_terminal_is_no_error(width: int, height: int) -> None:
    assert max(len(line) for line in screen(busy(5.0), width, height)) <= width


def test_all_rings_are_shown_if_they_fit() -> None:
    text = "\n".join(screen(busy(5.0), 80, None))
    assert all(f"{sender} > {receiver}" in text for receiver, sender in RINGS)


def test_only_the_fullest_rings_are_shown_otherwise() -> None:
    text = "\n".join(screen(busy(5.0), 80, 24))
    assert "scheduler > worker0" in text
    assert "supervisor > api0" not in text


def test_dead_engine_is_marked() -> None:
    now = snapshot(9.0, busy(5.0).rows, is_alive=False)
    lines = screen(now, 80, 24)
    assert "DEAD" in lines[0]
    assert "last state" in lines[0]
    assert sum("gone (RUNNING)" in line for line in lines) == len(ACTORS)


@pytest.mark.parametrize(("count", "num_shown"), [(1, 1), (5, 5), (64, 4)])
def test_adapters_have_lines_while_there_is_room(count: int, num_shown: int) -> None:
    """Adapters with the most sequences are shown."""
    adapters = [AdapterLoad(f"sql-{i}", 8 + i, 1000.0 + i, i == count - 1, 2 * i, i) for i in range(count)]
    lines = screen(msgspec.structs.replace(busy(5.0), adapters=adapters), 100, 40)
    assert len(lines) <= 40
    own = [line for line in lines if "s loaded" in line]
    assert (len(own), sum("more adapters" in line for line in lines)) == (num_shown, num_shown < count)
    last = count - 1
    assert own[-1].split() == [
        *(["adapters"] if count == 1 else []),
        *f"sql-{last} rank {8 + last} {2 * last} running {last} waiting".split(),
        *f"{units.seconds(723.0 - last)} loaded, leaving".split(),
    ]


def test_idle_engine_is_shown() -> None:
    now = snapshot(1.0)
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(render(TITLE, now, figures(now), width=80, height=24, now=1001.0))
    assert "0 running" in capture.get()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0us"),
        (0.00085, "850us"),
        (0.0009996, "1.00ms"),
        (0.01234, "12.3ms"),
        (0.9996, "1.00s"),
        (45.0, "45.0s"),
        (192.0, "3m12s"),
        (18420.0, "5h07m"),
        (1e6, "11d13h"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (7, "7"),
        (0.354, "0.35"),
        (812, "812"),
        (999.7, "1.00k"),
        (1234, "1.23k"),
        (45e6, "45.0M"),
        (3e12, "3T"),
    ],
)
def test_count(value: float | None, text: str) -> None:
    assert units.count(value) == text


def test_size() -> None:
    assert [units.size(value) for value in (None, 512, 1 << 20, 300 << 20, 5 << 40)] == ["-", "512B", "1.00M", "300M", "5.00T"]


def test_sparkline() -> None:
    assert units.sparkline([0, 1, 4, 8], 3) == "▁▄█"
    assert units.sparkline([0.0, 0.0], 5) == ""
    assert units.sparkline([1.0], 0) == ""


def test_too_many_actors_are_folded() -> None:
    """Actors with problems are not folded."""
    names = ("scheduler0", "scheduler1", "cache0", "cache1", *(f"worker{rank}" for rank in range(40)))
    whole = busy(5.0)
    actors = [msgspec.structs.replace(whole.actors[0], name=name) for name in names]
    actors[-1] = msgspec.structs.replace(actors[-1], state="DEAD", is_alive=False)
    rows = [*whole.rows, counter("requests_routed_total", "tokenizer0", 7, reason="prefix")]
    lines = screen(msgspec.structs.replace(whole, actors=actors, rows=rows), 80, 30)
    assert len(lines) <= 30
    text = "\n".join(lines)
    assert "worker39" in text
    assert "more actors" in text
    assert "worker38" not in text
    assert "routed    7 prefix" in text
    assert any(line.split()[:2] == ["scheduler1", "1"] for line in lines)
    assert any(line.split()[:2] == ["worker39", "1.19"] for line in lines)


def test_engines_of_a_router() -> None:
    """Those that are gone are shown before the others."""
    engines = [EngineLoad(f"10.0.0.{index}:9100", "ready", [index], index, 0, 0.25, 9, 0, "") for index in range(10)]
    engines += [EngineLoad("10.0.0.77:9100", "gone", [], 0, 0, None, 3, 2, "the connection is closed")]
    lines = screen(msgspec.structs.replace(busy(5.0), engines=engines), 80, None)
    text = "\n".join(lines)
    assert "engines   10.0.0.4:9100 ready  4 running  0 waiting  25% prefix hits  9 routed" in text
    assert "10.0.0.77:9100 gone" in text
    assert "2 resent" in text
    assert "10.0.0.1:9100" not in text
    assert "and 4 more engines" in text


def test_device_statistics() -> None:
    """The share of captured steps, copies of the last steps, and waits are shown beside its capabilities."""
    rows = [
        *busy(5.0).rows,
        counter("worker_steps_total", "worker0", 8),
        counter("captured_step_sizes", "worker0", 2),
        counter("device_copies_total", "worker0", 10, to="device"),
        counter("device_copies_total", "worker0", 6, to="host"),
        counter("device_wait_seconds_total", "worker0", 0.9),
        counter("device_memory_bytes", "worker0", 3 << 30),
        counter("op_fallbacks_total", "worker0", 1, op="rotary", candidate="fused"),
        histogram("captured_step_rows", "worker0", [4.0] * 3, (2.0, 8.0)),
        histogram("eager_step_rows", "worker0", [4.0], (2.0, 8.0)),
    ]
    text = "\n".join(screen(snapshot(5.0, rows), 240, 50))
    assert (
        "float32; 1 ops with fallback; 3.00G of tensors; 75% of steps captured; 2.0 copies per step; 25% of time spent waiting"
        in text
    )
