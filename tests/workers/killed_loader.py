"""Loads weights on the emulated card and is killed: run by `test_card_weights.py`, as one life of a worker.

Arguments: checkpoint, directory of packed weights, sockets of the shelf, and when: "loading", "loaded", or "asleep".
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.workers.serving import make_runner
from tests.workers.shelf_options import shelf_options


def main(path: str, directory: str, inlet: str, outlet: str, when: str) -> None:
    runner = make_runner(Path(path), load=False, **shelf_options(Path(directory), (int(inlet), int(outlet))))

    before = runner.device.memory_bytes()

    def on_progress(num_done: int, num_bytes: int) -> None:
        has_room = runner.device.memory_bytes() > before + num_bytes // 2  # that of all weights
        if when == "loading" and has_room and 2 * num_done > num_bytes:
            os.kill(os.getpid(), signal.SIGKILL)

    runner.load(path, 1, on_progress)
    if when == "asleep":
        runner.clear()
    print(runner.weights.cache, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
