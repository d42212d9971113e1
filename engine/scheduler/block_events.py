"""Changes of the prefix index on their way to the KV-event publisher: blocks and states stored, removed, all cleared.

Used by the scheduler process alone. The publisher's view may lag but never misses a change: events that do not fit its ring
wait here. If too many wait, or if either side was restarted, the view is rebuilt from the index.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from engine.block_keys import KEY_BYTES
from engine.messages import BlocksCleared, BlocksRemoved, BlocksStored, StatesRemoved, StatesStored
from engine.process.outbox import BackloggedOutbox, Outbox
from engine.scheduler.block_pool import BlockPool
from engine.scheduler.prefix_cache import CachedBlock

MIN_BACKLOG = 1024


class BlockEvents:
    """The changes of the index, in order, on their way to the cache actor."""

    def __init__(self, outbox: Outbox, pool: BlockPool, block_size: int) -> None:
        self._outbox = BackloggedOutbox(outbox.send_bytes)
        self._pool = pool
        self._block_size = block_size
        self._max_bytes = outbox.max_record_bytes - 256  # limit for the blocks in one message
        self._block_bytes = 4 * block_size + KEY_BYTES + 16  # and the rest of the key
        self._max_blocks = max(1, self._max_bytes // self._block_bytes)
        self._outbox.post(BlocksCleared())

    def stored(self, entries: list[CachedBlock]) -> None:
        """Queue blocks that entered the index."""
        self._take_evictions()
        self._outbox.post(*self._chains(entries))

    def cleared(self) -> None:
        """Drop the queued changes: the index was emptied."""
        self._pool.prefix_cache.evicted_keys.clear()
        self._outbox.clear()
        self._outbox.post(BlocksCleared())

    def draw_anew(self) -> None:
        """Make the publisher forget everything, then send it the whole index."""
        self.cleared()
        self.stored(list(self._pool.prefix_cache))
        if self._pool.states is not None:
            self._pool.states.changed = dict.fromkeys(self._pool.states.kept_keys, True)

    def flush(self) -> int:
        """Send as much as fits; return the number of messages sent."""
        self._take_evictions()
        self._take_states()
        num_sent = self._outbox.flush()
        if len(self._outbox) > MIN_BACKLOG + self._pool.num_pages:
            self.draw_anew()
        return num_sent

    def _take_evictions(self) -> None:
        """Send evictions before anything is stored again under the same key."""
        keys = self._pool.prefix_cache.evicted_keys
        for start in range(0, len(keys), self._max_blocks):
            self._outbox.post(BlocksRemoved(keys[start : start + self._max_blocks]))
        keys.clear()

    def _take_states(self) -> None:
        """Send changes of the kept states, after those of their blocks."""
        if self._pool.states is None or not self._pool.states.changed:
            return
        changed, self._pool.states.changed = self._pool.states.changed, {}
        for kind, is_there in ((StatesRemoved, False), (StatesStored, True)):
            keys = [key for key, is_stored in changed.items() if is_stored is is_there]
            for start in range(0, len(keys), self._max_blocks):
                self._outbox.post(kind(keys[start : start + self._max_blocks]))

    def _chains(self, entries: list[CachedBlock]) -> Iterator[BlocksStored]:
        """Split `entries` where one is not the parent of the next, and where a message would be too long."""
        start = num_bytes = 0
        for end in range(1, len(entries) + 1):
            num_bytes += self._num_bytes(entries[end - 1])
            is_chained = end < len(entries) and entries[end].parent == entries[end - 1].key
            if not is_chained or num_bytes + self._num_bytes(entries[end]) > self._max_bytes:
                chain = entries[start:end]
                start, num_bytes = end, 0
                yield BlocksStored(
                    [entry.key for entry in chain],
                    chain[0].parent,
                    b"".join(entry.token_ids for entry in chain),
                    self._block_size,
                    [entry.block_ids[0] for entry in chain],
                    [entry.extra for entry in chain] if any(entry.extra for entry in chain) else [],
                )

    def _num_bytes(self, entry: CachedBlock) -> int:
        return self._block_bytes + (len(msgspec.msgpack.encode(entry.extra)) if entry.extra else 0)
