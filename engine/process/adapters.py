"""LoRA adapters in service, from the supervisor's record. The record is read again when its version in the counters changes.

Used by api processes, which find adapters by model name, and by schedulers, which reject sequences with an unloaded adapter. An
actor first counts a sequence in the gauge of the adapter's slot and then reads the record; the supervisor first writes the
record and then reads the gauges (`engine/supervisor/adapters.py`). So either the sequence is rejected, or the adapter stays
until it ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import RequestError, TokamakError
from engine.messages import Adapter, AdaptersRecord, AdapterUse
from engine.process.context import ActorContext
from engine.process.topology import SUPERVISOR
from shm.counters import Cell


class AdapterRegistry:
    """LoRA adapters as known to one actor."""

    def __init__(self, context: ActorContext) -> None:
        self._run = context.run
        self._version = context.counters.counter("adapters_version", SUPERVISOR)
        self._seen = 0
        self._record = AdaptersRecord()

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """All adapters in the arena. Raises RequestError if they cannot be read just now."""
        version = int(self._version.value)
        if version != self._seen:
            try:
                self._record = self._run.adapters()
            except TokamakError as error:
                raise RequestError(f"the adapters cannot be read: {error}; try again in a moment", status=503) from error
            self._seen = version
        return self._record.adapters

    def served(self) -> list[Adapter]:
        """Return the adapters that take requests."""
        return [adapter for adapter in self.adapters if not adapter.is_leaving]

    def find(self, name: str) -> Adapter | None:
        """Return the adapter that is served as the model `name`."""
        return next((adapter for adapter in self.served() if adapter.name == name), None)

    def check_served(self, uses: Iterable[AdapterUse]) -> None:
        """Raise 404 if one of these adapters takes no more requests."""
        numbers = {adapter.number for adapter in self.served()}
        if any(use.number not in numbers for use in uses):
            raise _gone()

    def check_there(self, use: AdapterUse) -> None:
        """Raise 404 if the adapter is not in the arena."""
        if all(adapter.number != use.number for adapter in self.adapters):
            raise _gone()


class AdapterGauge:
    """Number of this actor's open sequences of each adapter, by slot."""

    def __init__(self, context: ActorContext, name: str) -> None:
        self._cells: list[Cell] = [context.counter(name, adapter_slot=str(slot)) for slot in range(context.config.max_loras)]
        self._counts = [0] * len(self._cells)
        for cell in self._cells:  # reset the counts of an earlier life, which died
            cell.set(0)

    def add(self, use: AdapterUse | None, count: int) -> None:
        if use is not None:
            self._counts[use.slot] += count
            self._cells[use.slot].set(self._counts[use.slot])

    def show(self, counts: list[int]) -> None:
        for slot, count in enumerate(counts):
            if count != self._counts[slot]:
                self._counts[slot] = count
                self._cells[slot].set(count)


def _gone() -> RequestError:
    return RequestError("the adapter has been unloaded", status=404, code="model_not_found", param="model")
