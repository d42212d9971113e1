"""`tokamak bench compare` with real engines: results of both, a ratio, errors that name the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import REPOSITORY
from tests.waiting import WATCHDOG_S, wait_until
from tools.bench.compare import READY, Workload, table
from tools.bench.processes import Others, processor_s, pss_bytes

ENGINE = f"{sys.executable} -m tools.cli serve --port {{port}} --max-model-len 1024"


def compare(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.cli", "bench", "compare", "--logs", str(tmp_path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=REPOSITORY, check=False)


@pytest.mark.slow
def test_two_engines(tmp_path: Path) -> None:
    workloads = ["decode:16:300:2:2", "prefill:64:1:1:1", "load:16:4:2:2", "prefix:36:4:1:1"]
    arguments = [part for workload in workloads for part in ("--workload", workload)]
    done = compare(tmp_path, f"one={ENGINE}", f"two={ENGINE} --threads 1", "--rounds", "1", *arguments)
    assert done.returncode == 0, done.stderr
    rows = {line.split("|")[1].strip(): line.split("|")[2:] for line in done.stdout.splitlines()}
    assert [*rows][2:] == [
        "ready s",
        "decode c=2 tok/s",
        "prefill 64 tok/s",
        "load 16+4 c=2 out tok/s",
        "prefix 36+4 c=1 out tok/s",
        "peak PSS MiB",
    ]
    for cells in [*rows.values()][2:]:
        assert all(float(cell) > 0 for cell in cells[:3])


@pytest.mark.slow
def test_missing_measurement_fails(tmp_path: Path) -> None:
    done = compare(tmp_path, f"one={ENGINE}", "--rounds", "1", "--workload", "decode:16:1:2:2", "--workload", "load:16:4:1:1")
    assert done.returncode == 1
    assert "the first stream ended before the last one started" in done.stderr
    assert "load 16+4" in done.stdout


def test_a_server_that_does_not_start_is_named(tmp_path: Path) -> None:
    done = compare(tmp_path, f"broken={sys.executable} -c 'raise SystemExit(7)' {{port}}", "--rounds", "1")
    assert done.returncode == 1
    assert "broken ended with exit code 7 before it was ready" in done.stderr.replace("\n", " ")


def test_servers_end_with_the_comparison(tmp_path: Path) -> None:
    server = f"import os, time; print(os.getpid(), flush=True); time.sleep({WATCHDOG_S})"
    command = [sys.executable, "-m", "tools.cli", "bench", "compare", "--logs", str(tmp_path)]
    command += [f"silent={sys.executable} -c '{server}' {{port}}", "--rounds", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=REPOSITORY) as process:
        log = tmp_path / "silent.log"
        pid = int(wait_until(lambda: log.exists() and log.read_text().strip(), what="the server runs"))
        process.terminate()
        assert process.wait(WATCHDOG_S) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{pid}").exists()


def test_workloads_of_pictures() -> None:
    one, many = (Workload.parse(text) for text in ("picture:448:1:1:3", "pictures:672:1:8:16"))
    assert (one.title, many.title) == ("448x448 c=1 TTFT s", "672x672 c=8 pictures/s")
    assert many.prompt[-1] == "672x672"
    result = {"num_failed": 0, "num_requests": 16, "num_succeeded": 16, "wall_s": 8.0, "ttft_ms": {"p50": 250.0}}
    assert (one.figure(result), many.figure(result)) == (0.25, 2.0)
    figures = {(one.title, "a"): [1.0], (one.title, "b"): [2.0], (many.title, "a"): [1.0], (many.title, "b"): [2.0]}
    assert [line.split("|")[-2].strip() for line in table(figures, ["a", "b"]).splitlines()[2:]] == ["2.00", "0.50"]


def test_cpu_time_of_a_tree_counts_ended_children() -> None:
    before = processor_s(os.getpid())
    code = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"], check=True
    )
    assert processor_s(os.getpid()) - before >= 0.28  # counted in ticks


def test_cpu_use_of_others_is_a_share() -> None:
    others = Others()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    assert 0 <= others.share() <= 1


@pytest.mark.parametrize(
    "arguments",
    [["no-command"], ["a=x {port}", "a=y {port}"], ["a=x {port}", "--workload", "load:1"], ["a=x {port}", "--set", "no"]],
)
def test_wrong_arguments(tmp_path: Path, arguments: list[str]) -> None:
    assert compare(tmp_path, *arguments).returncode == 2


def test_table_compares_the_first_with_the_best() -> None:
    load = Workload("decode", 128, 128, 4, 4).title
    figures = {(READY, "a"): [2.0], (READY, "b"): [1.0, 3.0, 4.0], (READY, "c"): [9.0]}
    figures |= {(load, "a"): [30.0], (load, "b"): [20.0], (load, "c"): [10.0]}
    assert table(figures, ["a", "b", "c"]).splitlines()[2:] == [
        "| ready s | 2 | 3 | 9 | 1.50 |",
        "| decode c=4 tok/s | 30 | 20 | 10 | 1.50 |",
    ]


def test_memory_counts_children_too() -> None:
    size = 64 << 20
    code = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', 'x = bytearray({size}); print(flush=True); input()'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    assert pss_bytes(process.pid) > size
    process.communicate(b"\n", timeout=WATCHDOG_S)
