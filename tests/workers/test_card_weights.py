"""Weights of cards, on the emulated one: packed once and then read from disk, and found on the card by a killed worker's
successor.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from engine.messages import SamplingParams
from tests.paths import GOLDEN, REPOSITORY
from tests.workers.serving import ServedSequence, Serving, make_runner
from tests.workers.shelf_options import shelf_options
from workers.engine.runner import ModelRunner

MODEL = GOLDEN / "qwen3_moe"
Sockets = tuple[int, int]


def answer(runner: ModelRunner) -> tuple[object, ...]:
    serving, sequence = Serving(runner), ServedSequence([5, 9, 3, 30], SamplingParams(temperature=0.0, num_logprobs=2), 3)
    serving.place(sequence, 0)
    serving.run([sequence])
    return sequence.answer()


def load(runner: ModelRunner, version: int, path: Path = MODEL) -> str:
    """Load weights and return where they came from."""
    runner.load(str(path), version, lambda num_done, num_bytes: None)
    return runner.weights.cache


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """Sockets that the supervisor holds for a rank."""
    inlet, outlet = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with inlet, outlet:
        yield inlet.fileno(), outlet.fileno()


def num_kept(sockets: Sockets) -> int:
    """Return how many weights are on the shelf, and leave them there."""
    inlet, outlet = (socket.socket(fileno=os.dup(each)) for each in sockets)
    taken = []
    outlet.setblocking(False)
    with inlet, outlet:
        while True:
            try:
                content, descriptors, _, _ = socket.recv_fds(outlet, 4096, 2)
            except BlockingIOError:
                break
            taken.append((content, descriptors))
        for content, descriptors in taken:
            socket.send_fds(inlet, [content], descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
    return len(taken)


def killed(directory: Path, sockets: Sockets, when: str) -> str:
    """Run one life of a worker until it is killed; return where its weights came from."""
    command = [sys.executable, "-m", "tests.workers.killed_loader", str(MODEL), str(directory), *map(str, sockets), when]
    done = subprocess.run(command, cwd=REPOSITORY, pass_fds=sockets, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("gemma3_text", {"dtype": "bfloat16"}),
        ("qwen3_moe", {"quantization": "wint4"}),
        ("deepseek_v3", {}),
    ],
)
def test_second_start_reads_packed_weights(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = GOLDEN / name
    plain = make_runner(path, **shelf_options(tmp_path, weight_cache_dir="", **options))
    first, second = (make_runner(path, **shelf_options(tmp_path, **options)) for _ in range(2))
    assert [runner.weights.cache for runner in (plain, first, second)] == ["off", "miss", "hit"]
    assert answer(plain) == answer(first) == answer(second)
    (file,) = tmp_path.glob("*.weights")
    content = bytearray(file.read_bytes())
    content[(2 << 20) + 100] ^= 1
    file.write_bytes(content)
    again = make_runner(path, **shelf_options(tmp_path, **options))
    assert (again.weights.cache, answer(again)) == ("damaged", answer(plain))


@pytest.mark.slow
def test_full_disk_only_warns(tmp_path: Path) -> None:
    """Run in a process with a limit on file sizes, which must not apply to the writer of the test's report."""
    program = f"""
import logging, resource
from tests.workers.test_card_weights import MODEL, Path, answer, make_runner, shelf_options

logging.basicConfig(format="%(message)s")
plain = make_runner(MODEL, **shelf_options(Path("x"), weight_cache_dir=""))
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
runner = make_runner(MODEL, **shelf_options(Path({str(tmp_path)!r})))
print(runner.weights.cache, answer(runner) == answer(plain))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["miss", "True"], done.stderr
    assert done.stderr.count("cannot be stored") == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"checksums.json"}


@pytest.mark.slow
def test_killed_worker_finds_its_weights(tmp_path: Path, sockets: Sockets) -> None:
    """A worker that is killed while it loads leaves nothing; its successor reads the file."""
    expected = answer(make_runner(MODEL, **shelf_options(tmp_path)))
    killed(tmp_path, sockets, "loading")
    assert num_kept(sockets) == 0
    assert [killed(tmp_path, sockets, "loaded") for _ in range(2)] == ["hit", "held"]
    for file in tmp_path.glob("*.weights"):
        file.unlink()
    runner = make_runner(MODEL, **shelf_options(tmp_path, sockets))
    assert (runner.weights.cache, answer(runner)) == ("held", expected)
    assert runner.weights.num_bytes > 0


@pytest.mark.slow
def test_sleep_leaves_nothing_on_the_card(tmp_path: Path, sockets: Sockets) -> None:
    killed(tmp_path, sockets, "asleep")
    assert num_kept(sockets) == 0
    runner = make_runner(MODEL, **shelf_options(tmp_path, sockets))
    expected, used, of_weights = answer(runner), runner.device.memory_bytes(), runner.weights.num_bytes
    assert num_kept(sockets) == 1
    runner.clear()
    assert num_kept(sockets) == 0
    assert runner.device.memory_bytes() <= used - of_weights
    assert (load(runner, 2), answer(runner)) == ("hit", expected)


@pytest.mark.slow
def test_reload_keeps_the_weights_in_use(tmp_path: Path, sockets: Sockets) -> None:
    """The present weights stay on the shelf until the new ones are in use, also when these are the same."""
    other = tmp_path / "other"
    shutil.copytree(MODEL, other)
    tensors = load_file(MODEL / "model.safetensors")
    save_file({name: 1.5 * values for name, values in tensors.items()}, other / "model.safetensors")
    runner = make_runner(MODEL, **shelf_options(tmp_path, sockets))
    expected = answer(runner)
    with pytest.raises(RuntimeError, match="no more"):
        runner.load(str(other), 2, failing)
    assert (num_kept(sockets), answer(runner)) == (1, expected)
    runner.device.release_unused()
    used = runner.device.memory_bytes()
    for version, path, found in ((2, other, "miss"), (3, MODEL, "hit"), (4, MODEL, "held")):
        assert load(runner, version, path) == found
        assert (num_kept(sockets), answer(runner) == expected) == (1, path == MODEL)
        runner.device.release_unused()
        assert runner.device.memory_bytes() <= used


def failing(num_done: int, num_bytes: int) -> None:
    raise RuntimeError("no more")


@pytest.mark.slow
def test_weights_are_the_workers_own_without_shared_memory(
    tmp_path: Path, sockets: Sockets, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answer(make_runner(MODEL, **shelf_options(tmp_path)))
    monkeypatch.setenv("LIBCUDA_FAILS", "cuMemCreate")
    runner = make_runner(MODEL, **shelf_options(tmp_path, sockets))
    assert (runner.weights.cache, answer(runner), num_kept(sockets)) == ("hit", expected, 0)
    assert "weights on the card end with this worker" in caplog.text
