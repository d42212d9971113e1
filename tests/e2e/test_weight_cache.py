"""The weight cache of a whole engine: the first start fills it, later starts and restarted workers map it, damage is repaired,
and answers are the same in every case."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ops import _cpu
from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.workload import Answer, answers, mixed_bodies
from tests.waiting import wait_until

MODEL = GOLDEN / "qwen3"
BODIES = mixed_bodies(4, seed=5, max_tokens=24, max_prompt=40)


def engine_with(directory: Path, *options: str) -> EngineProcess:
    """Return an engine with the same kernels whatever the directory contains: not all give the same bits."""
    options = ("--cpu-kernels", _cpu.candidates()[-1], *options)
    return EngineProcess(MODEL, "--max-model-len", "400", "--weight-cache-dir", str(directory), *options)


def loads(engine: EngineProcess) -> dict[str, float]:
    return {found: engine.metric("weight_cache_loads_total", found=found) for found in ("hit", "miss", "damaged")}


def files(directory: Path) -> list[Path]:
    """Return the files of packed weights, without those of checksums and kernel choices."""
    return sorted(path for path in directory.iterdir() if path.suffix in (".weights", ".partial"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """Answers of an engine without a cache, which keeps nothing."""
    directory = tmp_path_factory.mktemp("none")
    with engine_with(directory, "--no-weight-cache") as engine:
        found = answers(engine, BODIES)
        assert loads(engine) == {"hit": 0, "miss": 0, "damaged": 0}
    assert files(directory) == []
    return found


def test_filled_mapped_and_repaired(tmp_path: Path, expected: list[Answer]) -> None:
    with engine_with(tmp_path) as engine:
        assert answers(engine, BODIES) == expected
        assert loads(engine) == {"hit": 0, "miss": 1, "damaged": 0}
        (path,) = files(tmp_path)
        assert engine.metric("weights_bytes") <= path.stat().st_size
        epoch = engine.kill("worker0")
        engine.wait_for_restart("worker0", epoch)
        assert answers(engine, BODIES) == expected
        assert loads(engine)["hit"] == 1
    content = bytearray(path.read_bytes())
    content[len(content.rstrip(b"\0")) - 1] ^= 8  # of the last array
    path.write_bytes(content)
    with engine_with(tmp_path) as engine:
        assert answers(engine, BODIES) == expected
        assert loads(engine) == {"hit": 0, "miss": 0, "damaged": 1}
        with engine_with(tmp_path) as second:
            assert answers(second, BODIES) == expected
            assert loads(second)["hit"] == 1
    assert files(tmp_path) == [path]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def overwrite(path: Path) -> None:
    """Overwrite in place, as `cp` does."""
    num_bytes = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\xff" * num_bytes)


HARMS = {1: (truncate, empty, overwrite, Path.unlink, truncate), 2: (overwrite, truncate)}  # by the number of ranks


@pytest.mark.parametrize("num_ranks", HARMS)
def test_cache_file_is_damaged_under_a_running_engine(tmp_path: Path, expected: list[Answer], num_ranks: int) -> None:
    """Answers stay the same, and the deaths do not count toward a limit of one."""
    with engine_with(tmp_path, "--restart-limit", "1", "--tensor-parallel-size", str(num_ranks)) as engine:
        for harm in HARMS[num_ranks]:
            assert answers(engine, BODIES) == expected
            for path in files(tmp_path):
                harm(path)
        assert answers(engine, BODIES) == expected
        assert wait_until(lambda: "was truncated while it was in use" in engine.text, what="the cause is told")


def test_killed_while_it_starts(tmp_path: Path, expected: list[Answer]) -> None:
    """The next start serves with whatever files a killed one left."""
    engine = engine_with(tmp_path)
    engine.launch()
    wait_until(lambda: bool(files(tmp_path)) or engine.is_ready, what="a file in the cache")
    engine.stop(signal.SIGKILL)
    with engine_with(tmp_path) as engine:
        assert answers(engine, BODIES) == expected
    assert [path.suffix for path in files(tmp_path)] == [".weights"]
