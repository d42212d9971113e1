"""The weights in use and the engine's state about them: the one place where NORMAL, PAUSED, CLEARED and LOADING follow each
other.

Pure; used by the scheduler process (`engine/scheduler/weight_updates.py` carries the orders out).

    NORMAL  --pause-->   PAUSED  --clear-->  CLEARED
            <--resume--
    NORMAL, PAUSED, CLEARED  --load-->  LOADING  --loaded-->  PAUSED after PAUSED, else NORMAL
                                                 --failed-->  what it was, with the weights that it had
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import RequestError
from engine.messages import WeightsState

_NORMAL, _PAUSED, _CLEARED, _LOADING = WeightsState

_LEGAL_IN = {
    "pause": (_NORMAL,),
    "resume": (_PAUSED,),
    "clear the weights": (_PAUSED,),
    "load weights": (_NORMAL, _PAUSED, _CLEARED),
    "end the loading": (_LOADING,),
}


def conflict(message: str) -> RequestError:
    """An order that does not fit the engine's state."""
    return RequestError(message, status=409, code="engine_state")


@dataclass(slots=True)
class WeightState:
    """Path and version of the weights in use (while cleared: of those to come back to), and the state."""

    path: str
    version: int
    state: WeightsState = WeightsState.NORMAL
    _before_loading: WeightsState = WeightsState.NORMAL

    def go_on(self, state: WeightsState) -> None:
        """Take over from a scheduler that died in `state`: a pause outlasts it, a load that it began does not."""
        if state in (WeightsState.PAUSED, WeightsState.CLEARED):
            self.pause()
        if state is WeightsState.CLEARED:
            self.clear()

    def pause(self) -> None:
        self._go("pause", WeightsState.PAUSED)

    def resume(self) -> None:
        self._go("resume", WeightsState.NORMAL)

    def clear(self) -> None:
        """The ranks have dropped their weights."""
        self._go("clear the weights", WeightsState.CLEARED)

    def begin_load(self) -> None:
        before = self.state
        self._go("load weights", WeightsState.LOADING)
        self._before_loading = before

    def finish_load(self, path: str, version: int) -> None:
        """The ranks hold new weights; only a pause outlasts that."""
        self._go("end the loading", WeightsState.PAUSED if self._before_loading is WeightsState.PAUSED else WeightsState.NORMAL)
        self.path, self.version = path, version

    def fail_load(self) -> None:
        """The ranks hold what they held."""
        self._go("end the loading", self._before_loading)

    def _go(self, transition: str, target: WeightsState) -> None:
        if self.state not in _LEGAL_IN[transition]:
            raise conflict(f"cannot {transition}: the engine is {self.state.name}")
        self.state = target
