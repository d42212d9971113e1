"""The runner of every device that works while the host does something else. Put together by `gpu.py` and `xpu.py`.

             tokens that the device draws                 tokens that the host draws
start n      enqueue n                                    enqueue n
start n + 1  enqueue n + 1, which reads what n will draw  wait for n and draw its tokens, which n + 1 reads; enqueue n + 1
finish       wait for n                                   the result of n, at once
             The result of n is sent while the device works on n + 1.
"""

from __future__ import annotations

from collections import deque

from engine.messages import Step, StepResult
from workers.engine.runner import ModelRunner
from workers.engine.step_run import StepRun
from workers.weights.packing import Progress


class Ahead:
    """A `Runner` whose steps are one ahead: the next is enqueued before the result of the last is taken."""

    def __init__(self, core: ModelRunner) -> None:
        self.core = core
        self._begun: deque[StepRun] = deque()
        self._results: deque[StepResult] = deque()

    @property
    def depth(self) -> int:
        return 2 if self.core.can_run_ahead else 1

    def start(self, step: Step) -> None:
        assert len(self._begun) + len(self._results) < self.depth, "the host's memory is that of two steps"
        if self._begun and not self._begun[-1].is_sampled_on_device:
            self._end()
        self._begun.append(self.core.begin(step))

    def finish(self) -> StepResult:
        if not self._results:
            self._end()
        return self._results.popleft()

    def load(self, path: str, version: int, on_progress: Progress, contents: str = "") -> None:
        self.core.load(path, version, on_progress, contents)

    def clear(self) -> None:
        self.core.clear()

    def _end(self) -> None:
        """What was begun first."""
        self._results.append(self.core.end(self._begun.popleft()))
