"""The LoRA adapters that are served, as actors see them: what the supervisor wrote down, read again when it says that it did.

Used by api processes, which find adapters by the names of models, and by schedulers, which take no sample of one that is gone.
Who takes a sample counts it first, in the gauge of the adapter's slot, and looks here then; the supervisor writes first, and
looks at the gauges then (`engine/supervisor/adapters.py`). So either the sample is refused or the adapter stays until it has
ended."""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import RequestError, TokamakError
from engine.messages import Adapter, AdaptersRecord, AdapterUse
from engine.process.context import ActorContext
from engine.process.topology import SUPERVISOR
from shm.counters import Cell


class AdapterRegistry:
    """LoRA adapters as one actor knows them."""

    def __init__(self, context: ActorContext) -> None:
        self._run = context.run
        self._version = context.counters.counter("adapters_version", SUPERVISOR)
        self._seen = 0
        self._record = AdaptersRecord()

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """All that are in the arena. RequestError where that cannot be known just now."""
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
        """The one that is served as the model `name`."""
        return next((adapter for adapter in self.served() if adapter.name == name), None)

    def check_served(self, uses: Iterable[AdapterUse]) -> None:
        """404 where one of these takes no requests any more."""
        numbers = {adapter.number for adapter in self.served()}
        if any(use.number not in numbers for use in uses):
            raise _gone()

    def check_there(self, use: AdapterUse) -> None:
        """404 where it is not in the arena."""
        if all(adapter.number != use.number for adapter in self.adapters):
            raise _gone()


class AdapterGauge:
    """Number of open sequences of each adapter, by slots: a gauge of this actor."""

    def __init__(self, context: ActorContext, name: str) -> None:
        self._cells: list[Cell] = [context.counter(name, adapter_slot=str(slot)) for slot in range(context.config.max_loras)]
        self._counts = [0] * len(self._cells)
        for cell in self._cells:  # what an actor had that died is another's
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
