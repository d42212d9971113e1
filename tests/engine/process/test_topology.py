"""Senders and receivers, and the sizes of rings."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import StartError, TokamakError
from engine.process.context import ActorContext
from engine.process.run_directory import Run, new_run_id
from engine.process.segments import RunSegments, require_room, required_bytes, unlink_segments
from engine.process.topology import (
    SHARED_BUDGET_BYTES,
    default_plan,
    ends_of,
    index_of,
    partner_of,
    places_of,
    readers_of,
    ring_of,
    ring_sizes,
    rings_bytes,
    role_of,
    senders_of,
)
from shm.broadcast import BroadcastReader, BroadcastWriter
from shm.death_notes import DeathNotes
from tests.configurations import engine_config

CONFIG = {"model": "/none", "max_model_len": 64, "num_kv_blocks": 4, "run_id": new_run_id(), "run_dir": "/none"}

NAMES = ("api0", "api1", "tokenizer0", "tokenizer1", "scheduler", "cache", "worker0")
REPLICAS = tuple(plan.name for plan in default_plan(engine_config(**CONFIG, data_parallel_size=2, tensor_parallel_size=2)))


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
        ("media0", ("api0", "api1", "scheduler")),
    ],
)
def test_the_control_ring_is_first(receiver: str, senders: tuple[str, ...]) -> None:
    assert senders_of(receiver, NAMES) == ("supervisor", *senders)


@pytest.mark.parametrize(
    ("receiver", "senders"),
    [
        ("tokenizer0", ("api0", "scheduler0", "scheduler1")),
        ("scheduler0", ("tokenizer0", "cache0", "worker0", "worker1")),
        ("scheduler1", ("tokenizer0", "cache1", "worker2", "worker3")),
        ("cache1", ("scheduler1",)),
    ],
)
def test_replica_receives_only_its_own_messages(receiver: str, senders: tuple[str, ...]) -> None:
    assert senders_of(receiver, REPLICAS) == ("supervisor", *senders)


def test_ranks_are_numbered_replica_by_replica() -> None:
    assert readers_of("scheduler0", REPLICAS) == ("worker0", "worker1")
    assert readers_of("scheduler1", REPLICAS) == ("worker2", "worker3")
    assert readers_of("scheduler", NAMES) == ("worker0",)
    assert [partner_of(name, "cache", REPLICAS) for name in ("worker1", "worker2")] == ["cache0", "cache1"]


def test_replicas_have_separate_arenas_and_rings() -> None:
    config = engine_config(**CONFIG | {"kv_cache_bytes": 4096}, data_parallel_size=2, tensor_parallel_size=2)
    segments = RunSegments.of(config, REPLICAS)
    try:
        arenas = [segments.arena_of(name) for name in ("cache0", "worker0", "worker1", "cache1", "worker2", "worker3")]
        assert arenas == [segments.arenas[0]] * 3 + [segments.arenas[1]] * 3
        assert segments.arena_of("scheduler0") is None
        rings = {name: BroadcastWriter.attach(config.run_id, name, 1) for name in ("scheduler0", "scheduler1")}
        readers = [BroadcastReader.attach(config.run_id, "scheduler1", index, 1) for index in range(2)]
        assert (rings["scheduler0"].active_readers(), rings["scheduler1"].active_readers()) == ([], [0, 1])
        segments.evict("worker3")
        assert rings["scheduler1"].active_readers() == [0]
        for writer in rings.values():
            writer.close()
        for reader in readers:
            reader.close()
    finally:
        segments.close()
        unlink_segments(config.run_id)


def test_ranks_read_pixels_of_media_processes() -> None:
    config = engine_config(
        **CONFIG | {"run_id": new_run_id()},
        media_processes=2,
        media_memory=1 << 20,
        mm_processor_cache_gb=1 / 1024,
        encoder_cache_size=64,
        encoder_row_width=8,
        data_parallel_size=2,
    )
    names = tuple(plan.name for plan in default_plan(config))
    assert names[:3] == ("api0", "media0", "media1")
    assert senders_of("media1", names) == ("supervisor", "api0", "scheduler0", "scheduler1")
    assert {"media0", "media1"} <= {*senders_of("api0", names)} & {*senders_of("scheduler1", names)}
    segments = RunSegments.of(config, names)
    try:
        mapped = {name: set(segments.media_memory_of(name)) for name in names}
        assert mapped["api0"] == {"api0"}
        assert mapped["media1"] == {"media1", "api0"}
        assert mapped["worker0"] == {"media0", "media1", "encoder"}
        assert mapped["tokenizer0"] == mapped["scheduler0"] == mapped["cache1"] == set()
        arenas = [segments.media_memory_of(name)["encoder"].fd for name in ("worker0", "worker1")]
        assert arenas[0] != arenas[1]
        run = Run(config.run_id, Path("/none"))

        def context_of(name: str) -> ActorContext:
            passed = {source: memory.fd for source, memory in segments.media_memory_of(name).items()}
            return ActorContext(run, config, name, 1, media_fds=passed)

        contexts = {name: context_of(name) for name in ("api0", "media1", "worker1", "scheduler0")}
        fetched = contexts["api0"].own_slab().put(b"as fetched")
        pixels = contexts["media1"].own_slab().put(b"pixels")
        assert fetched is not None
        assert pixels is not None
        assert contexts["media1"].media_slab("api0").read(fetched) == b"as fetched"
        assert contexts["worker1"].pixel_slab("media1").read(pixels) == b"pixels"
        contexts["worker1"].encoder_arena().publish(3, b"h" * 32, 2, 1)
        assert contexts["worker1"].encoder_arena().is_valid(3, b"h" * 32, 2, 1)
        with pytest.raises(TokamakError, match="scheduler0 was started without the memory of media1"):
            contexts["scheduler0"].pixel_slab("media1")
        assert not any(map(segments.blame_file, names))
        DeathNotes.attach(config.run_id, "media1").open(b"f" * 32)
        assert [name for name in names if segments.blame_file(name)] == ["media1"]
        assert DeathNotes.attach(config.run_id, "media1").num_deaths(b"f" * 32) == 1
        for context in contexts.values():
            context.close()
    finally:
        segments.close()
        unlink_segments(config.run_id)


def test_two_default_engines_fit_64_mb() -> None:
    """Engines with and without a vision model."""
    text = ("api0", "tokenizer0", "scheduler", "cache", "worker0")
    for names in (text, ("media0", *text)):
        assert 2 * required_bytes(names, ring_sizes(names, 4096)) <= 64 << 20


@pytest.mark.parametrize("max_model_len", [4096, 32768, 131072])
def test_rings_of_vision_models_are_hardly_larger(max_model_len: int) -> None:
    """The difference is only the additional rings, even where the longest request leaves nothing to shrink."""
    text = ("api0", "tokenizer0", "scheduler", "cache", "worker0")
    seeing = ("media0", *text)
    plain = ring_sizes(text, max_model_len)
    besides = plain.mailbox["api0"] + plain.mailbox["scheduler"] + (2 << 20)
    assert rings_bytes(seeing, ring_sizes(seeing, max_model_len)) <= rings_bytes(text, plain) + besides
    assert ring_sizes(seeing, max_model_len).mailbox["media0"] == 512 << 10


@pytest.mark.parametrize(("num_apis", "num_tokenizers"), [(1, 1), (4, 2), (8, 4)])
def test_many_processes_share_the_budget(num_apis: int, num_tokenizers: int) -> None:
    names = [f"api{i}" for i in range(num_apis)] + [f"tokenizer{i}" for i in range(num_tokenizers)] + list(NAMES[4:])
    sizes = ring_sizes(names, 4096)
    assert required_bytes(names, sizes) <= SHARED_BUDGET_BYTES + (4 << 20)
    assert all(size & (size - 1) == 0 for size in (*sizes.mailbox.values(), sizes.broadcast))


@pytest.mark.slow
@pytest.mark.parametrize(("num_replicas", "max_model_len"), [(2, 4096), (16, 4096), (32, 1024)])
def test_many_replicas_share_the_budget(num_replicas: int, max_model_len: int) -> None:
    names = [plan.name for plan in default_plan(engine_config(**CONFIG, data_parallel_size=num_replicas))]
    assert required_bytes(names, ring_sizes(names, max_model_len)) <= SHARED_BUDGET_BYTES + (8 << 20)


@pytest.mark.parametrize("max_model_len", [64, 4096, 131072, 1 << 20])
def test_the_longest_request_fits(max_model_len: int) -> None:
    sizes = ring_sizes(NAMES, max_model_len)
    longest = 8 * max_model_len
    assert all(sizes.mailbox[name] >= 4 * longest for name in ("api0", "tokenizer0", "scheduler"))
    assert sizes.broadcast >= 4 * longest


def test_too_little_shared_memory_names_numbers_and_remedies() -> None:
    require_room(10 << 20, 10 << 20)
    with pytest.raises(StartError, match=r"need 10 MiB of shared memory, /dev/shm has 1 MiB free; enlarge it"):
        require_room(10 << 20, 1 << 20)


def test_places_of_a_router_have_lanes_to_its_link() -> None:
    """Their schedulers are rows without mailboxes: each tokenizer has a ring to each of them in the link's mailbox, and hears
    the link alone."""
    names = ("api0", "tokenizer0", "tokenizer1", "link", "scheduler0", "scheduler1")
    assert places_of(names) == ("scheduler0", "scheduler1")
    assert senders_of("link", names)[1:] == ("tokenizer0.0", "tokenizer1.0", "tokenizer0.1", "tokenizer1.1")
    assert senders_of("tokenizer1", names) == ("supervisor", "api0", "link")
    assert senders_of("api0", names) == ("supervisor", "tokenizer0", "tokenizer1")
    assert ring_of("tokenizer1", "scheduler0", names) == ("link", "tokenizer1.0")
    assert ends_of("tokenizer1.0") == ("tokenizer1", 0)
    assert set(ring_sizes(names, 64).mailbox) == {"api0", "tokenizer0", "tokenizer1", "link"}


def test_link_of_an_engine_is_one_more_tokenizer() -> None:
    names = (*NAMES, "link")
    assert places_of(names) == ()
    assert senders_of("link", names) == ("supervisor", "scheduler")
    assert "link" in senders_of("scheduler", names)
    assert "link" not in senders_of("tokenizer0", names)
    assert ring_of("tokenizer0", "scheduler", names) == ("scheduler", "tokenizer0")
