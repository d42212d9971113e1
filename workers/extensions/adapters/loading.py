"""An order to load an adapter, carried out in a thread beside the steps. Owned by the worker actor."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from engine.errors import CheckpointError
from engine.messages import LoadAdapter, Reply
from workers.extensions.adapters.arena import AdapterArena
from workers.extensions.adapters.reader import AdapterFiles

_LOG = logging.getLogger(__name__)


class AdapterLoading:
    """One order. `reply` is there when it is done, whatever came of it."""

    def __init__(self, command_id: str, order: LoadAdapter, arena: AdapterArena) -> None:
        self._command_id, self._order, self._arena = command_id, order, arena
        self.reply: Reply | None = None
        self._thread = threading.Thread(target=self._load, name="adapter", daemon=True)
        self._thread.start()

    def _load(self) -> None:
        """Checked as a whole before the slot, which no row uses, is written. Numbers are checked on their way there: no row
        will have a slot whose order failed."""
        try:
            files = AdapterFiles(Path(self._order.path), self._arena.layout)
            contents = self._arena.write(self._order.slot, files.linears())
        except CheckpointError as error:
            self.reply = Reply(self._command_id, 400, str(error))
        except Exception as error:  # whatever is wrong with it, the others are served on
            _LOG.exception("adapter %s", self._order.path)
            self.reply = Reply(self._command_id, 400, f"{self._order.path} cannot be loaded: {error!r}")
        else:
            rank = int(self._arena.ranks[self._order.slot].max())
            self.reply = Reply(self._command_id, 200, "", {"contents": contents, "rank": rank})
