"""The replicas in a tokenizer: channels to their schedulers, their load and cached prefixes, and the choice of a replica for a
sequence.

Used by the tokenizer's loop. `engine/parallel/routing.py` decides, based on data that is read here: the gauges of the
schedulers, sequences that were sent but not taken yet, and the fingerprints that the cache actors write.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec

from engine.block_keys import BlockExtras, hash_blocks
from engine.messages import Abort, SequencePart, WeightsState
from engine.parallel.routing import REASONS, ReplicaLoad, route
from engine.process.context import ActorContext
from engine.process.topology import CACHE, names_of, readers_of
from engine.tokenizer.ready import ReadySequence
from engine.tokenizer.scheduler_channel import SchedulerChannel
from shm.fingerprints import FingerprintSet, fingerprint_of, state_fingerprint_of

UNKNOWN = -1  # the replica of a sequence, or a requested one, is not known


class Replica:
    """One of several: its channel, its load and its cached prefixes."""

    def __init__(self, context: ActorContext, index: int, channel: SchedulerChannel) -> None:
        scheduler = context.schedulers[index]
        self._context = context
        self._actors = (scheduler, *readers_of(scheduler, (context.name, *context.peers())))
        self._channel = channel
        self._prefixes = FingerprintSet.attach(context.run.run_id, names_of(CACHE, len(context.schedulers))[index])
        cell = context.counters.counter
        self._num_tokens = cell("num_tokens_to_compute", scheduler)
        self._num_running = cell("num_requests_running", scheduler)
        self._num_waiting = cell("num_requests_waiting", scheduler)
        self._num_free_slots = cell("num_free_slots", scheduler)
        self._num_free_blocks = cell("num_free_kv_blocks", scheduler)
        self._state = cell("engine_state", scheduler)
        self._version = cell("engine_weight_version", scheduler)

    @property
    def weight_version(self) -> int:
        return int(self._version.value)

    @property
    def is_ready(self) -> bool:
        """Whether its scheduler and all its ranks accept work, and it is not loading weights."""
        return all(map(self._context.is_peer_ready, self._actors)) and self._state.value != WeightsState.LOADING

    def find(self, fingerprints: Iterable[int]) -> bytes:
        """Return a byte for each block or recurrent state: 1 if it is cached there, as far as known."""
        return self._prefixes.find_all(fingerprints)

    def load(self, num_cached_tokens: int) -> ReplicaLoad:
        num_sent_sequences, num_sent_tokens = self._channel.unacknowledged()
        num_waiting = int(self._num_waiting.value) + num_sent_sequences
        return ReplicaLoad(
            self.is_ready,
            num_waiting >= self._context.config.max_waiting,
            int(self._num_tokens.value) + num_sent_tokens,
            int(self._num_running.value) + num_waiting,
            int(self._num_free_slots.value) - num_sent_sequences,
            int(self._num_free_blocks.value),
            num_cached_tokens,
            has_weights=self._state.value != WeightsState.CLEARED,
        )

    def close(self) -> None:
        self._prefixes.close()


class Replicas:
    """All replicas; with a single one there is no choice."""

    def __init__(self, context: ActorContext) -> None:
        self._config = context.config
        self._channels = [SchedulerChannel(context.outbox(scheduler), context.name) for scheduler in context.schedulers]
        are_several = len(self._channels) > 1
        self._replicas = [Replica(context, index, channel) for index, channel in enumerate(self._channels) if are_several]
        self._num_routed = {
            reason: [
                context.counter("requests_routed_total", reason=reason, replica=str(replica))
                for replica in range(len(self._channels))
            ]
            for reason in REASONS
        }
        self._num_crossed = context.counter("streams_crossed_total")
        self._turn = 0
        self._groups: dict[str, tuple[int, int]] = {}  # replica and number of open sequences of each group

    @property
    def are_several(self) -> bool:
        return len(self._channels) > 1

    @property
    def is_waiting(self) -> bool:
        return any(channel.is_waiting for channel in self._channels)

    def num_waiting(self, source: str) -> tuple[int, int]:
        """Return the number of records that did not fit, of all sources and of one, for the scheduler that keeps up best."""
        return min(channel.num_waiting(source) for channel in self._channels)

    def choose(
        self, sequence: ReadySequence, pinned: int = UNKNOWN, refused_by: frozenset[int] = frozenset()
    ) -> tuple[int, int]:
        """Return the replica for a sequence, and how many tokens it must compute there. `refused_by`: full replicas."""
        num_tokens = sequence.num_prompt_tokens + len(sequence.own.resume_token_ids) // 4
        if not self.are_several:
            return 0, num_tokens
        first_key, num_cached = self._cached(sequence)
        replica, reason = pinned, "pinned"
        if pinned == UNKNOWN:
            replica, reason = self._choose(sequence, num_tokens, first_key, num_cached, refused_by)
        self._num_routed[reason][replica].add(1)
        self._num_crossed.add(self._crosses(replica, sequence.own))
        return replica, num_tokens - num_cached[replica]

    def send(self, replica: int, sequence: ReadySequence, num_tokens: int) -> None:
        """Send a sequence, with `num_tokens` to compute, with the next `flush`. Raises RequestError if it fits no ring
        record."""
        self._channels[replica].add(sequence, num_tokens)
        group_id = sequence.own.group_id
        if self.are_several and group_id:
            self._groups[group_id] = replica, self._groups.get(group_id, (replica, 0))[1] + 1

    def ended(self, group_id: str) -> None:
        """Note that a sequence of the group is no longer open."""
        if group_id in self._groups:
            replica, num_open = self._groups.pop(group_id)
            if num_open > 1:
                self._groups[group_id] = replica, num_open - 1

    def abort(self, replica: int, key: str, abort: Abort) -> None:
        """Send an abort after waiting messages of the same request; to every scheduler if it is not known which one has it."""
        for channel in self._channels if replica == UNKNOWN else [self._channels[replica]]:
            channel.abort(key, abort)

    def leave(self, replica: int, key: str, own: SequencePart) -> None:
        """Abort the previous attempt of a sequence that goes to `replica`, on every other replica where it may be."""
        for index, channel in enumerate(self._channels if own.attempt else []):
            if index != replica and own.replica in (UNKNOWN, index):
                channel.abort(key, Abort(own.request_id, own.attempt - 1))

    def is_any_left(self, refused_by: frozenset[int]) -> bool:
        """Return whether a replica that has not rejected it may take a sequence."""
        return any(
            replica.is_ready and not replica.load(0).is_full
            for index, replica in enumerate(self._replicas)
            if index not in refused_by
        )

    def flush(self) -> int:
        """Send as much as fits; return the number of records sent."""
        return sum(channel.flush() for channel in self._channels)

    def close(self) -> None:
        for replica in self._replicas:
            replica.close()

    def _choose(
        self, sequence: ReadySequence, num_tokens: int, first_key: bytes, num_cached: list[int], refused_by: frozenset[int]
    ) -> tuple[int, str]:
        group_replica = self._groups.get(sequence.own.group_id, (UNKNOWN, 0))[0]
        others = self._with_other_weights(sequence.own)
        if group_replica not in {UNKNOWN, *refused_by, *others} and self._replicas[group_replica].is_ready:
            return group_replica, "group"
        loads = [replica.load(cached) for replica, cached in zip(self._replicas, num_cached, strict=True)]
        if refused_by or others:
            loads = [
                msgspec.structs.replace(
                    load, is_ready=load.is_ready and index not in others, is_full=load.is_full or index in refused_by
                )
                for index, load in enumerate(loads)
            ]
        self._turn += 1
        key = first_key + self._config.run_id.encode() if self._config.is_router else first_key
        return route(self._config.data_parallel_routing, loads, num_tokens, self._config.block_size, key, self._turn)

    def _crosses(self, replica: int, own: SequencePart) -> bool:
        """Return whether a started sequence continues with other weights, as far as known."""
        return own.weight_version not in (0, self._replicas[replica].weight_version) and self._replicas[replica].is_ready

    def _with_other_weights(self, own: SequencePart) -> set[int]:
        """Return the replicas that a started sequence should not continue on: while any has the weights that computed its
        tokens, those that have others."""
        same = {index for index, replica in enumerate(self._replicas) if replica.weight_version == own.weight_version}
        if not own.weight_version or not any(self._replicas[index].is_ready for index in same):
            return set()
        return set(range(len(self._replicas))) - same

    def _cached(self, sequence: ReadySequence) -> tuple[bytes, list[int]]:
        """Return the key of the first block (or of all tokens of a shorter prompt), and how many tokens each replica need not
        compute: a model with recurrent layers continues only where a state is cached."""
        size = self._config.block_size
        shared, tokenized = sequence.request.shared, sequence.prompt.tokenized
        tokens = array("i", tokenized.token_ids + sequence.own.resume_token_ids)
        options = shared.options
        extras = BlockExtras.of(tokenized.units, shared.media, shared.mask_bounds, options.cache_salt, options.adapter)
        keys: list[bytes] = []
        hash_blocks(tokens, size, keys, size, extras)
        num_cached = [0] * len(self._replicas)
        has_prefixes = self._config.enable_prefix_caching and shared.sampling.num_prompt_logprobs < 0
        holders = list(range(len(self._replicas))) if has_prefixes else []
        hash_blocks(tokens, size, keys, size, extras)
        begin, num_blocks = 0, (len(tokens) - 1) // size  # at least the last token is left to compute
        while holders and begin < num_blocks:
            end = min(num_blocks, 4 * begin + 1)  # more at a time the more are found
            hash_blocks(tokens, size, keys, end * size, extras)
            blocks = [fingerprint_of(key) for key in keys[begin:end]]
            states = [state_fingerprint_of(key) for key in keys[begin:end]] if self._config.num_states else []
            nexts = []
            for index in holders:
                num_found = (self._replicas[index].find(blocks) + b"\0").index(0)
                if states:
                    num_usable = self._replicas[index].find(states[:num_found]).rfind(1) + 1
                else:
                    num_usable = num_found
                if num_usable:
                    num_cached[index] = (begin + num_usable) * size
                if num_found == len(blocks):
                    nexts.append(index)
            holders, begin = nexts, end
        return keys[0], num_cached
