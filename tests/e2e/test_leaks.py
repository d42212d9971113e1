"""No processes, memory or files are left after any end, two engines run side by side, and a failed start reports its cause."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from shm.segment import segment_prefix
from tests.e2e.checkpoints import broken_truncated
from tests.e2e.engine_process import GOLDEN, EngineProcess, leftovers
from tests.e2e.workload import answers, mixed_bodies
from tests.engine.echo_engine import is_gone
from tests.paths import REPOSITORY
from tests.waiting import WATCHDOG_S, wait_until

MODEL = GOLDEN / "qwen3"
BODIES = mixed_bodies(4, seed=9, max_tokens=8, max_prompt=20)


def pids_of(engine: EngineProcess) -> list[int]:
    return [int(row["pid"]) for row in engine.actors().values()]


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    """Engine for tests that leave it unchanged and share it with others."""
    with EngineProcess(MODEL, "--max-model-len", "2000") as running:
        yield running


def test_asked_to_stop() -> None:
    """SIGINT ends an engine; all other engines of these tests end by SIGTERM."""
    engine = EngineProcess(MODEL).start()
    try:
        pids = pids_of(engine)
        answers(engine, BODIES)
        assert engine.stop(signal.SIGINT) == 0
        assert leftovers(pids) == []
    finally:
        engine.close()


def test_killed_supervisor_is_swept_by_the_next_start() -> None:
    """Ranks share a packed file in the run directory, and the comm arena."""
    first = EngineProcess(MODEL, "-tp", "2", "--threads", "1", "--no-weight-cache").start()
    try:
        pids = pids_of(first)
        os.kill(first.pid, signal.SIGKILL)
        first.wait_for_exit()
        wait_until(lambda: all(map(is_gone, pids)), what="the children die with the supervisor")
        with EngineProcess(MODEL) as second:
            answers(second, BODIES)
            mine = pids_of(second)
        assert leftovers(pids + mine) == []
    finally:
        first.close()


@pytest.mark.timeout(1800)
def test_many_rounds() -> None:
    """Engines are stopped at every stage of the start, by SIGTERM, SIGINT and SIGKILL in turn. A stage is a line of the
    progress, or a moment."""
    with ThreadPoolExecutor(5) as rounds:  # they mostly wait
        assert len(list(rounds.map(start_and_end, range(18)))) == 18
    with EngineProcess(MODEL) as last:
        pids = pids_of(last)
    assert leftovers(pids) == []


def start_and_end(index: int) -> None:
    number = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)[index % 3]
    engine = EngineProcess(MODEL)
    try:
        engine.launch()
        moment = time.monotonic() + 0.1 * index if index % 2 else float("inf")
        wait_until(lambda: time.monotonic() > moment or len(engine.output) >= index // 2 or engine.has_ended)
        if not engine.has_ended:
            os.kill(engine.pid, number)
        code = engine.wait_for_exit()
        if not is_before_our_code(engine.text):
            assert code in ((-number,) if number is signal.SIGKILL else (0, -signal.SIGTERM, -signal.SIGINT)), engine.text
    finally:
        engine.close()


def is_before_our_code(text: str) -> bool:
    """Return whether Python itself ended with exit code 1, because SIGINT came while it initialized."""
    return text.startswith(("Fatal Python error: init_", "Could not import runpy module"))


def test_two_engines_side_by_side(engine: EngineProcess) -> None:
    with EngineProcess(GOLDEN / "qwen2") as second:
        one, two = answers(engine, BODIES), answers(second, BODIES)
        assert one != two
        assert set(pids_of(engine)).isdisjoint(pids_of(second))
        pids = pids_of(second)
        assert second.stop() == 0
        assert leftovers(pids) == []
        assert answers(engine, BODIES) == one


OTHER_USER = 54321  # an account need not exist to run processes


def other_user_commands() -> list[tuple[str, ...]]:
    """Return commands that run something as another user; none where the suite does not run as root. The interpreter may be
    readable only by root: then the other user keeps root's right to read, and no other."""
    plain = ("setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups")
    reading = (*plain, "--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search")
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return []
    again = "import subprocess, sys, tokenizers, ops._cpu, shm.segment; subprocess.run([sys.executable, '-c', ''], check=True)"
    for command in (plain, reading):
        checked = subprocess.run([*command, sys.executable, "-c", again], cwd=REPOSITORY, capture_output=True, check=False)
        if checked.returncode == 0:
            return [command]
    return []


@pytest.mark.parametrize("command", other_user_commands(), ids=" ".join)
def test_engines_of_two_users_side_by_side(command: tuple[str, ...]) -> None:
    """Names do not collide, neither engine stops, sweeps or disturbs the other, and each sweeps its own dead."""
    with tempfile.TemporaryDirectory(prefix="tokamak-") as home, EngineProcess(MODEL) as mine:
        os.chown(home, OTHER_USER, OTHER_USER)
        before = answers(mine, BODIES)

        def engine_of_other() -> EngineProcess:
            engine = EngineProcess(
                GOLDEN / "qwen2", environment={"HOME": home, "XDG_RUNTIME_DIR": home, "XDG_CACHE_HOME": home}
            )
            engine.command = [*command, *engine.command]
            return engine

        killed = engine_of_other().start()
        try:
            pids = pids_of(killed)
            assert {os.stat(f"/proc/{pid}").st_uid for pid in pids} == {OTHER_USER}
            assert answers(killed, BODIES) != before
            os.kill(killed.pid, signal.SIGKILL)
            killed.wait_for_exit()
            wait_until(lambda: all(map(is_gone, pids)), what="the children die with the supervisor")
        finally:
            killed.close()
        with EngineProcess(MODEL):
            assert segments_of(OTHER_USER)
        with engine_of_other() as next_one:
            answers(next_one, BODIES)
        assert segments_of(OTHER_USER) == []
        assert answers(mine, BODIES) == before
        pids += pids_of(mine)
    assert leftovers(pids) == []


def segments_of(user: int) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"{segment_prefix()[1:]}*") if path.lstat().st_uid == user]


def test_busy_port_is_reported_at_once() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        engine = EngineProcess(MODEL)
        engine.command[engine.command.index("--port") + 1] = str(holder.getsockname()[1])
        engine.launch()
        assert engine.wait_for_exit() == 1
        assert str(holder.getsockname()[1]) in engine.text
        assert leftovers([]) == []


def test_second_engine_on_the_same_port_is_refused(engine: EngineProcess) -> None:
    second = EngineProcess(MODEL)
    second.command[second.command.index("--port") + 1] = str(engine.port)
    second.launch()
    assert second.wait_for_exit() == 1
    assert str(engine.port) in second.text
    answers(engine, BODIES)


def test_worker_that_fails_to_load_ends_the_start(tmp_path: Path) -> None:
    """Either of two ranks may report it first."""
    engine = EngineProcess(broken_truncated(MODEL, tmp_path / "broken"), "-tp", "2", "--threads", "1")
    engine.launch()
    assert engine.wait_for_exit() == 2
    assert "model.safetensors" in engine.text
    assert leftovers([]) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--port", "99999"), "99999"),
        (("--block-size", "17"), "17"),
        (("--dtype", "float13"), "float13"),
        (("--max-model-len", "1000000"), "1000000"),
        (("--kv-cache-memory", "lots"), "lots"),
        (("--no-such-option",), "--no-such-option"),
        (("--model", "/no/such/model"), "/no/such/model"),
        (("--num-kv-blocks", "1"), "num-kv-blocks"),
        (("--cpu-kernels", "sse9"), "available here: auto, "),
    ],
)
def test_bad_options_exit_with_2(options: tuple[str, ...], said: str) -> None:
    engine = EngineProcess(MODEL, *options)
    engine.launch()
    assert engine.wait_for_exit() == 2
    assert said in engine.text
    assert "Traceback" not in engine.text


def test_an_idle_engine_sleeps(engine: EngineProcess) -> None:
    """No process spins: idle processes take less than a tenth of the time in CPU time. A spinning one does so in every sample;
    a busy machine only in some."""
    answers(engine, BODIES)
    engine.wait_until_idle()
    pids = [engine.pid, *pids_of(engine)]
    assert any(busy_share(pids) < 0.1 for _ in range(6))


def busy_share(pids: list[int]) -> float:
    """Return the CPU time per time over a few seconds."""
    spent_s, start_s = processor_seconds(pids), time.monotonic()
    wait_until(lambda: time.monotonic() > start_s + 5)
    return (processor_seconds(pids) - spent_s) / (time.monotonic() - start_s)


def processor_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in set(pids):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_a_client_that_leaves_frees_its_blocks(engine: EngineProcess) -> None:
    """Five clients leave. Retried where one was so slow that its whole answer had been sent before."""
    before = engine.metric("http_disconnects_total")
    body = BODIES[0] | {"max_tokens": 1900, "stream": True}

    def num_left() -> float:
        with httpx.stream("POST", f"{engine.url}/v1/completions", json=body, timeout=WATCHDOG_S) as response:
            next(response.iter_lines())
        engine.wait_until_idle()
        return engine.metric("http_disconnects_total") - before

    assert any(num_left() == 5 for _ in range(30))
