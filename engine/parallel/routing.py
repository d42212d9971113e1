"""Choice of the replica for a prompt: by its cached prefix there and by load. Pure; called by the tokenizer.

Everything is counted in prompt tokens. The cost of a replica is the tokens that it still has to compute (including this prompt
without its cached part), OPEN_SEQUENCE_TOKENS for each open sequence, and the blocks that it lacks. The lowest cost wins, so a
cached prefix is a discount, not a priority: if its replica is behind by more than the prefix is worth, another one computes it
too. Ties go to the longest cached prefix, then by rendezvous hashing of the prompt's first block, so that equal beginnings go
to the same replica before anything is cached, with any number of replicas. A router adds its run to what is hashed, so that
several routers do not pick the same idle engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from shm.blake2 import blake2b

Policy = Literal["prefix", "load", "round-robin"]
REASONS = ("prefix", "load", "hash", "round-robin", "group", "pinned")

# Cost of an open sequence for a new request: a row of a decode step takes 1.1 to 1.4 times as long as a prompt's token
# (Qwen3-0.6B's shape in bfloat16 and int4, Zen: (141 - 37) / 15 ms beside 3.2 s / 512; (81 - 14) / 15 ms beside 1.6 s / 512),
# and about 50 steps are shared.
OPEN_SEQUENCE_TOKENS = 64


class ReplicaLoad(msgspec.Struct, frozen=True):
    """Load of a replica, including requests that were sent but not taken yet."""

    is_ready: bool = True
    is_full: bool = False  # it rejects new requests
    num_tokens: int = 0  # prompt tokens left to compute
    num_open: int = 0  # sequences, running or waiting
    num_free_slots: int = 1
    num_free_blocks: int = 1 << 30
    num_cached_tokens: int = 0  # of the prompt to be routed
    has_weights: bool = True  # otherwise new requests wait until an operator loads weights


def route(
    policy: str, loads: Sequence[ReplicaLoad], num_tokens: int, block_size: int, first_key: bytes, turn: int
) -> tuple[int, str]:
    """Return the replica for a prompt of `num_tokens`, and the reason, one of REASONS. `first_key`: of its first block. `turn`:
    number of prompts routed before. A replica that is not ready, or full, gets nothing while another one is available."""
    replicas = _candidates(loads)
    if policy == "round-robin":
        return replicas[turn % len(replicas)], "round-robin"
    has_prefixes = policy == "prefix"
    costs = {
        replica: _cost(loads[replica], num_tokens, block_size, loads[replica].num_cached_tokens if has_prefixes else 0)
        for replica in replicas
    }
    cheapest = [replica for replica in replicas if costs[replica] == min(costs.values())]
    if has_prefixes:
        longest = max(loads[replica].num_cached_tokens for replica in cheapest)
        cheapest = [replica for replica in cheapest if loads[replica].num_cached_tokens == longest]
        shortest = min(load.num_cached_tokens for load in loads)
        if len(cheapest) == 1 and longest > shortest:
            return cheapest[0], "prefix"
    if len(cheapest) == 1:
        return cheapest[0], "load"
    return max(cheapest, key=lambda replica: _weight(first_key, replica)), "hash"


def _candidates(loads: Sequence[ReplicaLoad]) -> list[int]:
    """Return the replicas that may get work; if none is ready, all, since the prompt then waits for one."""
    ready = [replica for replica, load in enumerate(loads) if load.is_ready] or list(range(len(loads)))
    ready = [replica for replica in ready if loads[replica].has_weights] or ready
    return [replica for replica in ready if not loads[replica].is_full] or ready


def _cost(load: ReplicaLoad, num_tokens: int, block_size: int, num_cached_tokens: int) -> int:
    num_own_tokens = num_tokens - num_cached_tokens
    num_lacking_blocks = max(0, -(-num_own_tokens // block_size) - load.num_free_blocks)
    num_sequences = load.num_open + (0 if load.num_free_slots > 0 else 1)  # without a slot one more must end first
    return load.num_tokens + num_own_tokens + OPEN_SEQUENCE_TOKENS * num_sequences + block_size * num_lacking_blocks


def _weight(key: bytes, replica: int) -> bytes:
    """Return the weight of a replica; the highest wins (rendezvous hashing: Thaler and Ravishankar, 1998)."""
    return blake2b(key, digest_size=8, salt=replica.to_bytes(16, "little")).digest()
