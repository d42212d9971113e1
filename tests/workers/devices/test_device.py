"""Native ops need no Paddle: a step on them, and every actor's module, are imported and run without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import OptionError
from ops import _cpu
from tests.paths import REPOSITORY as ROOT
from tests.workers.checkpoints import TINY, write_checkpoint
from workers.devices.device import make_device

STEP = """
import sys
sys.modules["paddle"] = None  # importing it is an error
import workers.actor
from pathlib import Path
from engine.messages import SamplingParams
from tests.workers.serving import ServedSequence, Serving, make_runner
for plan in ("tape", "eager"):
    sequence = ServedSequence([3, 1, 4], SamplingParams(temperature=0.0), num_outputs=3)
    serving = Serving(make_runner(Path(sys.argv[1]), ops="native", plan=plan, max_model_len=64, num_kv_blocks=8))
    serving.place(sequence, 0)
    serving.run([sequence])
    print(*sequence.outputs)
"""

SIGNALS = """
import faulthandler, os, signal
faulthandler.enable()
signal.signal(signal.SIGTERM, lambda number, frame: print("asked to end", flush=True))
from workers.devices.device import make_device
make_device("cpu", "reference", 1)
os.kill(os.getpid(), signal.SIGTERM)
print("ends", flush=True)
os.abort()
"""


def test_native_step_does_not_import_paddle(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY)
    done = subprocess.run([sys.executable, "-c", STEP, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tape, eager = done.stdout.splitlines()
    assert tape == eager
    assert len(tape.split()) == 3


def test_device_unknown_to_paddle_is_refused() -> None:
    with pytest.raises(OptionError, match=r"--device xpu: rank 0 needs device 0, but Paddle .* finds cpu"):
        make_device("xpu", "reference", 1)


def test_missing_kernel_does_not_fall_back_to_cpu() -> None:
    import paddle

    name = "FLAGS_enable_api_kernel_fallback"
    with pytest.raises(OptionError):
        make_device("xpu", "reference", 1)
    assert paddle.get_flags([name]) == {name: False}
    make_device("cpu", "reference", 1)
    assert paddle.get_flags([name]) == {name: True}


@pytest.mark.slow
def test_paddle_installs_no_signal_handlers() -> None:
    """An actor ends on SIGTERM without a crash report by Paddle, and reports real crashes itself."""
    done = subprocess.run([sys.executable, "-c", SIGNALS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:2] == ["asked to end", "ends"], done.stderr
    assert "FatalError" not in done.stderr
    assert "Fatal Python error: Aborted" in done.stderr


def test_packing_rank_uses_threads_of_all_ranks() -> None:
    before, cores = _cpu.num_threads(), os.sched_getaffinity(0)
    device = make_device("cpu", "native", 2, place=1, num_beside=3)
    try:
        with device.threads_of(3):
            assert _cpu.num_threads() == 6
        assert _cpu.num_threads() == 2
        with device.threads_of(1):
            assert _cpu.num_threads() == 2
            assert os.sched_getaffinity(0) == cores, "threads that decode run on any core"
    finally:
        _cpu.set_num_threads(before)
