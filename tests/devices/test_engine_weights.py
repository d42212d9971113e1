"""Weights of an engine with `--device gpu` on an emulated card: packed once, read from disk by later starts, and found on the
card by a killed worker's successor. Files that are wrong, or change while they are in use, harm no answer.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.devices.card_engine import engine_on_card
from tests.devices.engines import BODIES, Expected, order, said
from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.e2e.workload import answers
from tests.engine.echo_engine import is_gone
from tests.waiting import wait_until

MODEL, OTHER = GOLDEN / "qwen3", GOLDEN / "qwen2"
FEW = [body | {"max_tokens": 6} for body in BODIES[:2]]


def engine_with(directory: Path, model: Path = MODEL) -> EngineProcess:
    return engine_on_card(model, "--plan", "eager", "--weight-cache-dir", str(directory))


def loads(engine: EngineProcess) -> tuple[int, ...]:
    """Return how often weights were found on the card, on disk, nowhere, and damaged on disk."""
    return tuple(int(engine.metric("weight_cache_loads_total", found=found)) for found in ("held", "hit", "miss", "damaged"))


def file_in(directory: Path) -> Path:
    (path,) = directory.glob("*.weights")
    return path


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[(2 << 20) + 100] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineProcess, Path, Expected]]:
    """An engine that has packed its weights into a directory, and its answers."""
    directory = tmp_path_factory.mktemp("weights")
    with engine_with(directory) as engine:
        expected = said(answers(engine, FEW))
        assert loads(engine) == (0, 0, 1, 0)
        yield engine, directory, expected


def test_second_start_reads_packed_weights(filled: tuple[EngineProcess, Path, Expected]) -> None:
    """When their supervisor is killed, no process is left that keeps them on the card."""
    _, directory, expected = filled
    with engine_with(directory) as engine:
        assert loads(engine) == (0, 1, 0, 0)
        assert said(answers(engine, FEW)) == expected
        processes = [int(actor["pid"]) for actor in engine.actors().values()]
        engine.stop(signal.SIGKILL)
        wait_until(lambda: all(map(is_gone, processes)), what="the children die with the supervisor")


def test_killed_worker_finds_its_weights(filled: tuple[EngineProcess, Path, Expected]) -> None:
    """Whatever has become of their file: no later life reads or packs them."""
    engine, directory, expected = filled
    path = file_in(directory)
    kept = path.read_bytes()
    held, *others = loads(engine)
    for number, harm in enumerate((overwrite, truncate, Path.unlink), 1):
        harm(path)
        assert said(answers(engine, FEW)) == expected, "weights on the card are no part of the file"
        engine.wait_for_restart("worker0", engine.kill("worker0"))
        assert said(answers(engine, FEW)) == expected
        assert loads(engine) == (held + number, *others)
    assert engine.actors()["worker0"]["restarts"] == 3
    path.write_bytes(kept)


def test_wrong_files_are_replaced(filled: tuple[EngineProcess, Path, Expected], tmp_path: Path) -> None:
    """Weights leave the card for sleep, and are loaded again."""
    engine, directory, expected = filled
    with engine_with(tmp_path, OTHER):
        foreign = file_in(tmp_path)

    def replace(path: Path) -> None:
        shutil.copyfile(foreign, path)

    held, hit, miss, damaged = loads(engine)
    for number, harm in enumerate((damage, truncate, replace), 1):
        path = file_in(directory)
        right = path.read_bytes()
        order(engine, "sleep")
        harm(path)
        order(engine, "wake")
        assert said(answers(engine, FEW)) == expected
        assert loads(engine) == (held, hit, miss, damaged + number)
        assert path.read_bytes() == right
    assert "cannot be used" in engine.text
