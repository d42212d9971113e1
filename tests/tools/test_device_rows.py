"""`tools/test --device gpu --rows` without a card: with a stand-in for the driver and emulated rows. This tests the script, not
the results of a card.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ops.cuda.operands import ROWS
from tests.native_program import build_program
from tests.paths import REPOSITORY
from tools.device import rows
from tools.device.cases import WITHOUT_CASES


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("driver")
    return str(build_program(directory, "tests/devices/libcuda.cpp", flags=("-shared", "-fPIC")))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    code = rows.main(["--small", *arguments])
    said = capsys.readouterr()
    return code, said.out.splitlines(), said.err


@pytest.mark.slow
def test_each_row_is_checked_and_timed(
    driver: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    code, lines, _ = run(capsys, "--driver", driver)
    assert code == 0
    checked = {line.split(": ", 1)[1].split(",")[0] for line in lines if line.startswith("right: ")}
    timed = [line.split(" | ") for line in lines if line.startswith("| ")][1:]
    assert checked == {fields[0][2:] for fields in timed} == set(ROWS) - WITHOUT_CASES
    assert all(float(fields[2]) > 0 and float(fields[-1].rstrip(" |")) >= 0 for fields in timed)
    assert any(line.startswith("no card at all: ") and line.endswith("TFLOP/s bfloat16") for line in lines)
    monkeypatch.setenv("LIBCUDA_WRONG", "1")
    code, lines, _ = run(capsys, "--driver", driver)
    assert code == 1
    assert not [line for line in lines if line.startswith("right: ")]
    assert any("Begin" in line and "whole numbers differ" in line for line in lines)
    assert any("Linear" in line and "of the largest number" in line for line in lines)


def test_no_card(driver: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, said = run(capsys, "--driver", str(tmp_path / "libcuda.so.1"))
    assert (code, said.count("\n")) == (2, 1)
    assert "no driver of NVIDIA's cards: " in said
    code, _, said = run(capsys, "--driver", driver, "--card", "2")
    assert (code, said.strip()) == (2, "tools/test --device gpu --rows: cuDeviceGet: CUDA_ERROR_NO_DEVICE")


def test_no_framework_is_needed(driver: str) -> None:
    """The script needs only its driver and the rows, not Paddle."""
    program = (
        "import sys; sys.modules['paddle'] = None; from tools.device import rows; raise SystemExit(rows.main(sys.argv[1:]))"
    )
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        program,
        "--driver",
        driver,
        "--card",
        "2",
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tools/test --device gpu --rows: cuDeviceGet: CUDA_ERROR_NO_DEVICE\n"


def test_no_compiler(driver: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert rows.main(["--driver", driver]) == 2
    said = capsys.readouterr().err
    assert "CUDA's rows need a C++ compiler for the host's part, and none was found; install g++" in said
