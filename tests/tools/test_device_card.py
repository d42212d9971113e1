"""`tools/device/card` on the emulated card: all of its parts with small shapes, and what it does when checks fail, tools are
missing or the time is up. `tools/device/pack`: what goes along.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ops.cuda.compiler import Compiler, Image, find_nvrtc
from ops.cuda.operands import ROWS
from shm.cuda_driver import CardInfo
from tests.devices.driver import emulated_driver
from tests.ops.cuda.card import emulated_library
from tests.paths import PICTURE_MODELS, REPOSITORY, TEXT_MODELS
from tests.waiting import WATCHDOG_S, wait_until
from tools.device import evidence
from tools.device.cases import WITHOUT_CASES
from tools.device.findings import Outcome
from tools.device.folder import files
from tools.device.kept_kernels import adopt
from tools.device.part import Plan

IMPORT = re.compile(r"^ *from ((?:tests|tools)\b[\w.]*) import (\w+)", re.MULTILINE)
HOPPER = CardInfo("H100", (9, 0), 132, 80 << 30, 13000)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return variables of a user's cache that has the emulated kernels."""
    kernels = tmp_path / "cache" / "tokamak" / "cuda"
    kernels.parent.mkdir(parents=True)
    kernels.symlink_to(emulated_library().parent)
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}


def run(environment: dict[str, str], out: Path, *arguments: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    command = [sys.executable, "-m", "tools.device.evidence", "--small", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.stderr == ""
    parts: dict[str, list[dict[str, Any]]] = json.loads((out / "card.json").read_text())["parts"]
    lines = (out / "card.md").read_text().splitlines()
    assert len(lines) == 4 + sum(map(len, parts.values()))
    return done.returncode, parts


@pytest.mark.slow
def test_all_parts_run_on_the_emulated_card(environment: dict[str, str], tmp_path: Path) -> None:
    code, parts = run(environment, tmp_path / "out", "--driver", emulated_driver())
    found = {finding["what"]: finding for findings in parts.values() for finding in findings}
    log = (tmp_path / "out" / "card.log").read_text()
    assert [finding for finding in found.values() if finding["outcome"] == "missed"] == [], log
    assert code == 0
    left_out = {what for what, finding in found.items() if finding["outcome"] == "not run"}
    assert {what for what in left_out if not what.startswith("power")} == {"kernels that came along", "memcheck", "racecheck"}
    checked = set(ROWS) - WITHOUT_CASES
    for prefix in ("equal: ", "replayed: "):
        assert {what.removeprefix(prefix).split(",")[0] for what in found if what.startswith(prefix)} == checked
    assert sum(what.startswith("invariant: ") for what in found) > 12
    for what in ("the same bytes with layers that draft", f"--ops cuda: golden {PICTURE_MODELS[0]}"):
        assert found[what]["outcome"] == "held"
    assert found["small: decode, 2 streams"]["values"]["tokens_per_s"] > 0


def test_failing_part_does_not_stop_the_others(tmp_path: Path) -> None:
    missing = tmp_path / "libcuda.so.1"
    code, parts = run({**os.environ}, tmp_path / "out", "--driver", str(missing), "--only", "machine,served")
    assert code == 1
    machine = {finding["what"]: finding for finding in parts["machine"]}
    assert machine["card"]["outcome"] == machine["arena of a killed process"]["outcome"] == "missed"
    assert f"no driver of NVIDIA's cards: {missing}" in machine["card"]["text"]
    assert [finding["what"] for finding in parts["served"]] == ["served"]
    assert "CardError" in (tmp_path / "out" / "card.log").read_text()
    assert parts["speed"][0]["text"] == "it was not asked for (--only)"


@pytest.mark.slow
def test_wrong_results_are_missed(environment: dict[str, str], tmp_path: Path) -> None:
    """The emulated driver changes a bit of whatever is fetched: no check of results may pass, and each is run."""
    wrong = {**environment, "LIBCUDA_WRONG": "1"}
    code, parts = run(wrong, tmp_path / "out", "--only", "operators,served")
    assert code == 1
    found = {finding["what"]: finding for finding in parts["operators"]}
    checks = {what: each["outcome"] for what, each in found.items() if what.startswith(("equal: ", "invariant: "))}
    assert len(checks) > 30
    assert {what for what, outcome in checks.items() if outcome == "held"} == set()
    assert found["measured rates"]["outcome"] == "held"
    served = parts["served"][0]
    assert (served["outcome"], "rows of a prompt are off by" in served["text"]) == ("missed", True), served


@pytest.mark.slow
def test_lost_context_ends_one_check(environment: dict[str, str], tmp_path: Path) -> None:
    """A kernel that fails takes its process with it, and the next check runs in another one."""
    lost = {**environment, "LIBCUDA_FAILS": "cuLaunchKernel:20"}
    code, parts = run(lost, tmp_path / "out", "--only", "graphs")
    outcomes = [finding["outcome"] for finding in parts["graphs"] if finding["what"].startswith("replayed: ")]
    assert code == 1
    assert len(outcomes) == len(set(ROWS) - WITHOUT_CASES)
    assert "missed" in outcomes


def parts_of(process: int) -> list[int]:
    """Return the processes that run a part for `process`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_text()
            if "tools.device.part" in command and f'"parent":{process},' in command:  # actors of engines have a parent, too
                found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_command_leaves_results_and_no_process(number: int, environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.device.evidence", "--small", "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(3)]
        process.send_signal(number)
        process.wait(WATCHDOG_S)
        wait_until(lambda: not parts_of(process.pid), what="the part ends with its command")
    parts = json.loads((tmp_path / "out" / "card.json").read_text())["parts"]
    assert [finding["what"] for finding in parts["machine"]][:3] == [line.split(": ")[1] for line in lines]
    assert len((tmp_path / "out" / "card.md").read_text().splitlines()) >= 4 + 3


@pytest.mark.slow
def test_hanging_check_ends_and_the_next_runs(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(evidence._ITEM_S, "machine", 2)
    plan = Plan(os.getpid(), emulated_driver(), True, time.monotonic() + WATCHDOG_S)
    with (tmp_path / "card.log").open("wb") as log:
        findings = evidence.run_part("machine", plan, environment, log)
        assert next(findings).what == "card"
        for process in parts_of(os.getpid()):
            os.kill(process, signal.SIGSTOP)
        left = list(findings)
    missed = [finding for finding in left if finding.outcome is Outcome.MISSED]
    assert [finding.text for finding in missed] == ["no result within 10 s"]
    assert left[-1].what == "host part of the kernels"
    assert left[-1].outcome is Outcome.HELD


def test_checks_after_the_deadline_are_not_run(tmp_path: Path) -> None:
    code, parts = run({**os.environ}, tmp_path, "--driver", "libcuda.so.1", "--minutes", "0")
    assert code == 1
    assert {finding["text"] for findings in parts.values() for finding in findings} == {"the time was up"}


def test_kernels_that_came_along_are_not_compiled(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    with zipfile.ZipFile(tmp_path / "kernels" / "sm_90.zip", "w") as archive:
        archive.writestr("0.kernel", b"begin\n_Z5begin\ncode\nof a kernel")
    assert adopt(tmp_path / "kernels", tmp_path / "cache", HOPPER).num == 1
    compiler = Compiler(find_nvrtc(HOPPER.driver_version), HOPPER.capability, tmp_path / "cache")
    assert compiler.image("begin") == Image(b"code\nof a kernel", "_Z5begin")
    assert adopt(tmp_path / "none", tmp_path / "cache", HOPPER).num == 0


def test_folder_has_what_the_command_needs() -> None:
    found = set(files("3.11"))
    assert {"tools/device/card", "engine/config.py", "tests/devices/engines.py", "ops/cuda/linear.cu"} <= found
    assert {file.split("/")[2] for file in found if file.startswith("tests/golden/")} == {*TEXT_MODELS, *PICTURE_MODELS}
    assert any(file.startswith("shm/_native.cpython-311-") for file in found)
    assert not [file for file in found if file.startswith(("tools/demo/model/", ".github/"))]
    assert imported_by({file for file in found if file.startswith("tools/device/") and file.endswith(".py")}) <= found


def imported_by(files: set[str]) -> set[str]:
    """Return `files` and all files of tests/ and tools/ that they import."""
    waiting, seen = set(files), set()
    while waiting:
        seen.add(file := waiting.pop())
        for module, name in IMPORT.findall((REPOSITORY / file).read_text()):
            path = module.replace(".", "/")
            for each in (f"{path}.py", f"{path}/__init__.py", f"{path}/{name}.py"):
                if (REPOSITORY / each).exists():
                    waiting |= {each} - seen
    return seen
