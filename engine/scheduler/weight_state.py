"""The weights in use and the engine's state about them: the one place where NORMAL, PAUSED, CLEARED and LOADING follow each
other.

Pure; used by the scheduler process (`engine/scheduler/weight_updates.py` carries the orders out). What counts is the run's
record, which outlives every actor. While an order is carried out the engine shows another state already, and whatever dies
meanwhile, or fails, the record is what it comes back to:

    order               in                        shows meanwhile   is written down when it is done
    pause               NORMAL                    PAUSED            PAUSED
    clear the weights   NORMAL, PAUSED            PAUSED            CLEARED
    resume              PAUSED, CLEARED           LOADING           NORMAL; at once after PAUSED
    load weights        NORMAL, PAUSED, CLEARED   LOADING           PAUSED after PAUSED, else NORMAL; path, version
    go back             NORMAL, PAUSED, CLEARED   LOADING           what was before an order that another replica did not do
    repair              NORMAL, PAUSED, CLEARED   LOADING, CLEARED  nothing: ranks are made to hold what the record says
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from engine.errors import RequestError
from engine.messages import WeightsState
from engine.process.run_directory import WeightsRecord

_NORMAL, _PAUSED, _CLEARED, _LOADING = WeightsState

_LEGAL_IN = {
    "pause": (_NORMAL,),
    "clear the weights": (_NORMAL, _PAUSED),
    "resume": (_PAUSED, _CLEARED),
    "load weights": (_NORMAL, _PAUSED, _CLEARED),
    "go back": (_NORMAL, _PAUSED, _CLEARED),
    "repair": (_NORMAL, _PAUSED, _CLEARED),
}


_MEANWHILE = {
    "pause": _PAUSED,
    "clear the weights": _PAUSED,
    "resume": _LOADING,
    "load weights": _LOADING,
    "go back": _LOADING,
    "repair": _LOADING,
}


def conflict(message: str) -> RequestError:
    """An order that does not fit the engine's state."""
    return RequestError(message, status=409, code="engine_state")


class WeightState:
    """The record that counts, and the state that is shown."""

    def __init__(self, record: WeightsRecord) -> None:
        self.record = record
        self.state = record.state

    @property
    def path(self) -> str:
        """Path of the weights in use; while cleared, of those to load again."""
        return self.record.path

    @property
    def version(self) -> int:
        return self.record.version

    def check(self, order: str) -> None:
        """409 where the order does not fit."""
        if self.state not in _LEGAL_IN[order]:
            raise conflict(f"cannot {order}: the engine is {self.state.name}")

    def begin(self, order: str) -> None:
        """The order is being carried out from now on; one that takes no time is written down at once instead."""
        self.check(order)
        if order != "repair" or self.state is not _CLEARED:
            self.state = _MEANWHILE[order]

    def settle(self, record: WeightsRecord) -> None:
        """Take `record`, which is written down already, as the outcome of the change that was in progress."""
        self.record = record
        self.state = record.state

    # ------------------------------------------------------------------------------- what would be written down

    def in_state(self, state: WeightsState) -> WeightsRecord:
        return replace(self.record, state=state)

    def with_next_version(self, version: int = 0) -> WeightsRecord:
        """The next number, or `version`, is taken, whatever becomes of it."""
        return replace(self.record, last_version=version or self.record.last_version + 1)

    def loaded(self, path: str, ranks: Sequence[int], contents: str = "") -> WeightsRecord:
        """Return the record in which these ranks hold the weights of `path`, with these `contents` if given, under the version
        taken last."""
        version = self.record.last_version
        state = _PAUSED if self.record.state is _PAUSED else _NORMAL
        weights = tuple((path, version) if rank in ranks else held for rank, held in enumerate(self.record.ranks))
        known = self.record.contents | ({version: contents} if contents else {})
        return replace(self.record, path=path, version=version, state=state, ranks=weights, contents=known)
