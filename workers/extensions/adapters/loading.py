"""Loads adapters in a thread beside the steps, one at a time. Owned by the worker actor."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from engine.errors import CheckpointError
from engine.messages import LoadAdapter, Reply
from shm.memory import available_memory_bytes
from shm.sizes import size_text
from workers.extensions.adapters.arena import AdapterArena
from workers.extensions.adapters.reader import AdapterFiles

_LOG = logging.getLogger(__name__)


def require_memory(files: AdapterFiles, available_bytes: int) -> None:
    """Raise CheckpointError if experts of an adapter need more memory. That of other linears is taken at the start."""
    num_bytes = files.num_expert_bytes()
    if num_bytes > available_bytes:
        raise CheckpointError(
            f"{files.directory}: its experts need {size_text(num_bytes)} of memory, {size_text(available_bytes)} available; "
            "unload another adapter of experts, use one of a lower rank, or merge it into the model (merge_and_unload of PEFT)"
        )


class AdapterLoader:
    """Loads adapters into `arena` on command."""

    def __init__(self, arena: AdapterArena) -> None:
        self._arena = arena
        self._load: _Load | None = None

    def start(self, command_id: str, adapter: LoadAdapter) -> Reply | None:
        """Start loading. Return a refusal while another adapter is loading."""
        if self._load is not None:
            return Reply(command_id, 409, "another adapter is being loaded; try again when it has finished")
        self._load = _Load(command_id, adapter, self._arena)
        return None

    def take_reply(self) -> Reply | None:
        """Return the reply of the finished command, once."""
        if self._load is None or self._load.reply is None:
            return None
        reply, self._load = self._load.reply, None
        return reply


class _Load:
    """One command. `reply` is set when it has finished, successfully or not."""

    def __init__(self, command_id: str, adapter: LoadAdapter, arena: AdapterArena) -> None:
        self._command_id, self._adapter, self._arena = command_id, adapter, arena
        self.reply: Reply | None = None
        threading.Thread(target=self._load, name="adapter", daemon=True).start()

    def _load(self) -> None:
        """Check all files, then write the slot, which no row uses. Numbers are checked while they are written; no row gets a
        slot that was not loaded completely."""
        adapter = self._adapter
        try:
            for slot in (adapter.slot, *adapter.other_free_slots):
                self._arena.release(slot)
            files = AdapterFiles(Path(adapter.path), self._arena.layout, available_memory_bytes())
            require_memory(files, available_memory_bytes())
            contents = self._arena.write(adapter.slot, files.linears())
        except CheckpointError as error:
            self.reply = Reply(self._command_id, 400, str(error))
        except Exception as error:  # any error fails only this adapter
            _LOG.exception("adapter %s", adapter.path)
            self.reply = Reply(self._command_id, 400, f"{adapter.path} cannot be loaded: {error!r}")
        else:
            rank = int(self._arena.ranks[adapter.slot].max())
            self.reply = Reply(self._command_id, 200, "", {"contents": contents, "rank": rank})
