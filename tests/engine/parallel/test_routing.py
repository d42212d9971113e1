"""Routing of a prompt: to the lowest cost, ties to the longest prefix and then by hash, and never to a replica that cannot take
it.
"""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from engine.block_keys import ROOT, hash_block
from engine.parallel.routing import OPEN_SEQUENCE_TOKENS, REASONS, ReplicaLoad, route

BLOCK_SIZE = 16
PROMPT = 800
KEY = hash_block(ROOT, b"first")


def routed(*loads: ReplicaLoad, policy: str = "prefix", key: bytes = KEY, turn: int = 0) -> tuple[int, str]:
    return route(policy, loads, PROMPT, BLOCK_SIZE, key, turn)


def test_the_least_to_do_wins() -> None:
    assert routed(ReplicaLoad(num_tokens=1), ReplicaLoad()) == (1, "load")
    assert routed(ReplicaLoad(), ReplicaLoad(num_open=1)) == (0, "load")
    assert routed(ReplicaLoad(num_open=1), ReplicaLoad(num_tokens=OPEN_SEQUENCE_TOKENS + 1)) == (0, "load")


@pytest.mark.parametrize(("behind", "expected"), [(767, (1, "prefix")), (769, (0, "load"))])
def test_cached_prefix_is_only_a_discount(behind: int, expected: tuple[int, str]) -> None:
    assert routed(ReplicaLoad(), ReplicaLoad(num_tokens=behind, num_cached_tokens=768)) == expected


def test_equal_costs_go_to_the_longest_prefix() -> None:
    loads = (ReplicaLoad(), ReplicaLoad(num_tokens=768, num_cached_tokens=768))
    assert routed(*loads) == (1, "prefix")
    assert routed(*loads[::-1]) == (0, "prefix")


def test_equal_prefixes_share_a_replica() -> None:
    """Independent of the turn; when a replica is added, only prompts that it gets move."""
    keys = [hash_block(ROOT, bytes([index])) for index in range(200)]
    places = {key: routed(ReplicaLoad(), ReplicaLoad(), key=key)[0] for key in keys}
    assert all(routed(ReplicaLoad(), ReplicaLoad(), key=key, turn=7) == (places[key], "hash") for key in keys)
    assert min(Counter(places.values()).values()) > 60
    of_three = {key: routed(*[ReplicaLoad()] * 3, key=key)[0] for key in keys}
    assert all(of_three[key] in (places[key], 2) for key in keys)


def test_missing_resources_add_cost() -> None:
    assert routed(ReplicaLoad(num_free_blocks=49), ReplicaLoad(num_free_blocks=50)) == (1, "load")
    assert routed(ReplicaLoad(num_free_slots=0), ReplicaLoad(num_free_slots=1)) == (1, "load")
    cached = ReplicaLoad(num_free_blocks=2, num_cached_tokens=768)  # which it need not allocate again
    assert routed(cached, ReplicaLoad(num_free_blocks=50)) == (0, "prefix")


@pytest.mark.parametrize("policy", ["prefix", "load", "round-robin"])
def test_unavailable_replica_gets_nothing(policy: str) -> None:
    """Nor does a full one while another is not; if none is ready, the prompt waits at one of them."""
    best = ReplicaLoad(num_cached_tokens=768)
    busy = ReplicaLoad(num_tokens=10_000)
    for hindered in (replace(best, is_ready=False), replace(best, is_full=True)):
        assert {routed(hindered, busy, policy=policy, turn=turn)[0] for turn in range(4)} == {1}
        assert {routed(busy, hindered, policy=policy, turn=turn)[0] for turn in range(4)} == {0}
    empty = replace(best, has_weights=False)
    assert {routed(empty, busy, policy=policy, turn=turn)[0] for turn in range(4)} == {1}
    assert routed(empty, replace(busy, is_ready=False), policy=policy)[0] == 0
    unready = replace(best, is_ready=False, is_full=True)
    assert routed(unready, replace(busy, is_ready=False), policy=policy)[1] in REASONS
    assert routed(unready, replace(busy, is_full=True), policy=policy)[0] == 1


def test_other_policies() -> None:
    cached, empty = ReplicaLoad(num_tokens=100, num_cached_tokens=768), ReplicaLoad()
    assert routed(cached, empty, policy="load") == (1, "load")
    assert [routed(cached, empty, policy="round-robin", turn=turn)[0] for turn in (1, 2)] == [1, 0]
