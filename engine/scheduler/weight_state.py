"""The weights in use and the engine's state about them: the one place that defines the transitions between NORMAL, PAUSED,
CLEARED and LOADING.

Pure; used by the scheduler process (`engine/scheduler/weight_updates.py` carries out the commands). The run's record survives
every actor. While a command is in progress the engine already shows another state; if something dies or fails meanwhile, it
returns to the record:

    command             allowed in                shows meanwhile   recorded when done
    pause               NORMAL                    PAUSED            PAUSED
    clear the weights   NORMAL, PAUSED            PAUSED            CLEARED
    resume              PAUSED, CLEARED           LOADING           NORMAL (at once after PAUSED)
    load weights        NORMAL, PAUSED, CLEARED   LOADING           NORMAL (PAUSED after PAUSED), path, version
    go back             NORMAL, PAUSED, CLEARED   LOADING           the state before a command that another replica did not do
    repair              NORMAL, PAUSED, CLEARED   LOADING, CLEARED  nothing: ranks are made to match the record
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
    """Return the error for a command that does not fit the engine's state."""
    return RequestError(message, status=409, code="engine_state")


class WeightState:
    """The record, and the state that is shown."""

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

    def check(self, name: str) -> None:
        """Raise 409 if the command does not fit the state."""
        if self.state not in _LEGAL_IN[name]:
            raise conflict(f"cannot {name}: the engine is {self.state.name}")

    def begin(self, name: str) -> None:
        """Show that the command is in progress; a command that takes no time is recorded at once instead."""
        self.check(name)
        if name != "repair" or self.state is not _CLEARED:
            self.state = _MEANWHILE[name]

    def settle(self, record: WeightsRecord) -> None:
        """Take `record`, which is already written, as the outcome of the change in progress."""
        self.record = record
        self.state = record.state

    # ---------------------------------------------------------------------------------------------------------- records

    def in_state(self, state: WeightsState) -> WeightsRecord:
        return replace(self.record, state=state)

    def with_next_version(self, version: int = 0) -> WeightsRecord:
        """Return the record in which the next version number, or `version`, is used, whether or not the load succeeds."""
        return replace(self.record, last_version=version or self.record.last_version + 1)

    def loaded(self, path: str, ranks: Sequence[int], contents: str = "") -> WeightsRecord:
        """Return the record in which these ranks hold the weights of `path`, with these `contents` if given, under the latest
        version."""
        version = self.record.last_version
        state = _PAUSED if self.record.state is _PAUSED else _NORMAL
        weights = tuple((path, version) if rank in ranks else held for rank, held in enumerate(self.record.ranks))
        known = self.record.contents | ({version: contents} if contents else {})
        return replace(self.record, path=path, version=version, state=state, ranks=weights, contents=known)
