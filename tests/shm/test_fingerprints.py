"""A set of fingerprints compared with Python's own, and readers beside the writer."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from shm.fingerprints import KIND, FingerprintSet, FingerprintWriter, fingerprint_of, num_slots_for
from shm.segment import Segment, segment_name, unlink_segment

RUN_ID = "0f0f0f0f"
NUM_SLOTS = 64


@pytest.fixture
def reader() -> Iterator[FingerprintSet]:
    made = FingerprintSet.create(RUN_ID, "cache0", NUM_SLOTS)
    yield made
    made.close()
    unlink_segment(segment_name(RUN_ID, KIND, "cache0"))


def writer_of() -> FingerprintWriter:
    return FingerprintWriter(Segment.attach(segment_name(RUN_ID, KIND, "cache0")))


@pytest.mark.parametrize("spread", [1 << 64, 256, 8], ids=["spread", "crowded", "one-run"])
def test_as_a_set(reader: FingerprintSet, spread: int) -> None:
    """Includes fingerprints that share their first slots, and runs that wrap around."""
    rng = random.Random(3)
    writer = writer_of()
    model: set[int] = set()
    for _ in range(3000):
        fingerprint = (rng.randrange(1, spread) * NUM_SLOTS + rng.randrange(58, 70)) % (1 << 64) or 1
        if rng.random() < 0.5:
            assert writer.add(fingerprint) == (fingerprint not in model and len(model) < NUM_SLOTS // 8 * 7 - 7)
            if fingerprint in writer:
                model.add(fingerprint)
        else:
            writer.remove(fingerprint)
            model.discard(fingerprint)
        assert (fingerprint in reader) == (fingerprint in model)
    asked = [*model, *(fingerprint + 1 for fingerprint in model), 1 << 63]
    assert reader.find_all(asked) == bytes(fingerprint in model for fingerprint in asked)
    writer.close()


def test_new_writer_begins_with_an_empty_set(reader: FingerprintSet) -> None:
    first = writer_of()
    first.add_all([5, 6])
    assert 5 in reader
    first.remove_all([5])
    assert 5 not in reader
    assert 6 in reader
    writer_of().close()
    assert 6 not in reader
    first.close()


def test_sizes() -> None:
    assert num_slots_for(1, 1 << 20) == 64
    assert num_slots_for(1000, 1 << 20) == 2048
    assert num_slots_for(1 << 20, 1 << 20) == 1 << 17
    assert fingerprint_of(bytes(32)) == 1
    assert fingerprint_of(b"\x02" + bytes(31)) == 2
