"""`tools/test --device` on the simulated device: all of its parts, with a stand-in for CUDA's driver. Its measurements mean
nothing here, so a missed speed bar is accepted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.devices.board import Board
from tests.devices.build import NAME, built_plugin, environment
from tests.native_program import build_program
from tests.paths import REPOSITORY
from tools.device.engines import WAYS, Target, same_bytes
from tools.device.findings import Finding, Outcome, least, summary
from tools.device.whole import main


def run(variables: dict[str, str], *arguments: str) -> tuple[int, list[str], str]:
    command = [sys.executable, "-W", "ignore", "-m", "tools.device.whole", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False, timeout=500)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.slow
def test_all_parts_run(tmp_path: Path) -> None:
    """All but golden models, which are in `test_device_card.py`: graphs on two ranks, with kills and reloads; `tests/devices`
    compares graphs with steps op by op, and those with transformers."""
    board = Board(tmp_path / "board")
    board.set(delay_seed=11)
    driver = build_program(tmp_path, "tests/devices/libcuda.cpp", flags=("-shared", "-fPIC"))
    few = ("--only", "arena,bytes,captured", "--ways", "captured-pair", "--driver", str(driver), "--small")
    code, lines, said = run(environment(built_plugin(), board), NAME, "--ops", "reference", *few)
    found = {line.split(": ", 1)[1].rpartition(": ")[0]: line.split(": ")[0] for line in lines[1 : lines.index("")]}
    of_speed = {line for line in found if "beside op by op" in line}
    assert len(of_speed) == 1, lines
    assert found.pop("golden") == "not run"
    assert {what for what, outcome in found.items() if outcome != "held"} <= of_speed, (lines, said)
    assert sum(what.startswith("--ops reference, captured on 2 ranks: ") for what in found) == 4, lines
    assert code == int("missed" in found.values())
    assert board.counts(device=1)["collectives"] > 100
    assert board.counts(device=1)["replays"] > 10


def test_missing_cards_are_named() -> None:
    pairs = [way for way in WAYS.values() if way.num_ranks == 2]
    for ops in ("fused", "cuda"):
        found = list(same_bytes(Target("gpu", 1), ops, pairs))
        assert [finding.outcome for finding in found] == [Outcome.NOT_RUN] * 2
        assert found[1].line == (
            f"not run: --ops {ops}, captured on 2 ranks: the same bytes: it needs 2 cards, and this machine has 1"
        )


def test_missed_bar_fails() -> None:
    """A run without any result fails as well."""
    held, missed = least("captured", 2.0, 2.0), least("captured", 1.999, 2.0)
    other = Finding("rows", Outcome.NOT_RUN, "no card")
    assert summary([held, other]) == (["1 held, 0 missed, 1 not run", "not run: rows: no card"], 0)
    lines, code = summary([held, missed, other])
    assert (lines[1], code) == ("missed: captured: 2 (bar: at least 2)", 1)
    assert summary([other])[1] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("gpu", "--device gpu needs NVIDIA's driver: no driver of NVIDIA's cards: "),
        ("cpu", "--device cpu: that is no card"),
        ("auto", "--device auto: that is no card"),
    ],
)
def test_no_card(device: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([device]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith(f"tools/test: {says}")


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("gpu", "this machine has no card for --device gpu: there is no /dev/nvidiactl and no /dev/dxg"),
        ("xpu", "this machine has no card for --device xpu: there is no /dev/xpu*"),
        ("cpu", "--device cpu: that is no card; give gpu, xpu or a custom device"),
        ("auto", "--device auto: that is no card"),
        ("--rows", "--device --rows: that is no card"),
        ("gpu:0", "--device gpu:0: that is no card"),
        ("", "--device needs a name: gpu, xpu or a custom device of Paddle's"),
    ],
)
def test_script_installs_nothing_without_a_card(device: str, says: str, tmp_path: Path) -> None:
    variables = {**os.environ, "TOKAMAK_VENV": str(tmp_path / "venv")}
    done = subprocess.run(
        [REPOSITORY / "tools" / "test", "--device", *([device] if device else [])],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"tokamak: error: {says}")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
