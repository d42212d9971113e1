"""Who sends to whom, and how large the rings are."""

from __future__ import annotations

import pytest

from engine.errors import StartError
from engine.process.segments import require_room, required_bytes
from engine.process.topology import SHARED_BUDGET_BYTES, index_of, ring_sizes, role_of, senders_of

NAMES = ("api0", "api1", "tokenizer0", "tokenizer1", "scheduler", "cache", "worker0")


@pytest.mark.parametrize(
    ("name", "role", "index"), [("api12", "api", 12), ("scheduler", "scheduler", 0), ("worker0", "worker", 0)]
)
def test_names(name: str, role: str, index: int) -> None:
    assert (role_of(name), index_of(name)) == (role, index)


@pytest.mark.parametrize(
    ("receiver", "senders"),
    [
        ("api1", ("tokenizer0", "tokenizer1")),
        ("tokenizer0", ("api0", "api1", "scheduler")),
        ("scheduler", ("tokenizer0", "tokenizer1", "cache", "worker0")),
        ("cache", ("scheduler",)),
        ("worker0", ()),
    ],
)
def test_the_control_ring_is_first(receiver: str, senders: tuple[str, ...]) -> None:
    assert senders_of(receiver, NAMES) == ("supervisor", *senders)


def test_the_default_engine_leaves_room_for_a_second_one_in_64_mb() -> None:
    names = ("api0", "tokenizer0", "scheduler", "cache", "worker0")
    assert 2 * required_bytes(names, ring_sizes(names, 4096)) <= 64 << 20


@pytest.mark.parametrize(("num_apis", "num_tokenizers"), [(1, 1), (4, 2), (8, 4)])
def test_many_processes_share_the_budget(num_apis: int, num_tokenizers: int) -> None:
    names = [f"api{i}" for i in range(num_apis)] + [f"tokenizer{i}" for i in range(num_tokenizers)] + list(NAMES[4:])
    sizes = ring_sizes(names, 4096)
    assert required_bytes(names, sizes) <= SHARED_BUDGET_BYTES + (4 << 20)
    assert all(size & (size - 1) == 0 for size in (*sizes.mailbox.values(), sizes.broadcast))


@pytest.mark.parametrize("max_model_len", [64, 4096, 131072, 1 << 20])
def test_the_longest_request_fits(max_model_len: int) -> None:
    sizes = ring_sizes(NAMES, max_model_len)
    longest = 8 * max_model_len
    assert all(sizes.mailbox[name] >= 4 * longest for name in ("api0", "tokenizer0", "scheduler"))
    assert sizes.broadcast >= 4 * longest


def test_too_little_shared_memory_is_said_with_numbers_and_remedies() -> None:
    require_room(10 << 20, 10 << 20)
    with pytest.raises(StartError, match=r"need 10\.0 MiB of shared memory, /dev/shm has 1\.0 MiB free; enlarge it"):
        require_room(10 << 20, 1 << 20)
