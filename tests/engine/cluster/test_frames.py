"""Frames between a router and its engines: what a peer may send, and what ends its session."""

from __future__ import annotations

import random

import msgspec
import pytest

from engine.cluster.frames import Beat, Forward, Load, Report, WrongFrameError, decode_frame, encode_frame, from_wire, to_wire
from engine.messages import Request, SamplingParams, SequencePart, SharedPart, TextOptions, TokenizedPrompt
from engine.metric_labels import REPLICA_GAUGES

MILLISECOND = 1_000_000


def request(deadline_ns: int = 0) -> Request:
    shared = SharedPart("key", "api0", 1, SamplingParams(), TextOptions(), 0, 500 * MILLISECOND, deadline_ns)
    return Request("tokenizer0", shared, [TokenizedPrompt(bytes(400), 16)], [SequencePart("a-0"), SequencePart("a-1")])


def test_frames_arrive_as_they_were_sent() -> None:
    for body in (Beat(), Forward(3, request()), Report(7, 5, 2, [])):
        assert decode_frame(encode_frame(8, body), 7) == body


def test_load_has_the_gauges_of_a_place() -> None:
    assert Load.__struct_fields__ == ("is_ready", "epoch", *REPLICA_GAUGES)


@pytest.mark.parametrize("seq", [0, 1, 3])
def test_frames_follow_each_other(seq: int) -> None:
    with pytest.raises(WrongFrameError, match=f"frame {seq} came after frame 1"):
        decode_frame(encode_frame(seq, Beat()), 1)


def test_damaged_frames_are_named() -> None:
    """Cut, changed in one byte, or announcing gigabytes: a WrongFrameError or another frame, and nothing else."""
    whole, rng = encode_frame(1, Forward(0, request())), random.Random(5)
    damaged = [whole[:size] for size in range(len(whole))]
    damaged += [b"\x92\x01\xc6\xff\xff\xff\xff", b"\x92\x01\xdd\xff\xff\xff\xff", b"\xc1", b"\x91" * 100_000]
    for _ in range(3000):
        changed = bytearray(whole)
        changed[rng.randrange(len(changed))] = rng.randrange(256)
        damaged.append(bytes(changed))
    num_refused = 0
    for data in damaged:
        try:
            decode_frame(data, 0)
        except WrongFrameError:
            num_refused += 1
    assert num_refused > len(whole)


@pytest.mark.parametrize(("deadline_ms", "left_ms"), [(0, 0), (900, 200), (600, -1)])
def test_times_travel_as_durations(deadline_ms: int, left_ms: int) -> None:
    """Sent at 700 ms of one clock, received at 70,000 ms of another. A deadline that has passed is still one."""
    sent = to_wire(request(deadline_ms * MILLISECOND), 700 * MILLISECOND)
    assert (sent.shared.arrival_ns, sent.shared.deadline_ns) == (
        200 * MILLISECOND,
        max(left_ms * MILLISECOND, min(1, -left_ms)),
    )
    received = from_wire(sent, 70_000 * MILLISECOND)
    assert received.shared.arrival_ns == 69_800 * MILLISECOND
    assert received.shared.deadline_ns == (0 if not deadline_ms else 70_000 * MILLISECOND + sent.shared.deadline_ns)
    same = msgspec.structs.replace(received.shared, arrival_ns=0, deadline_ns=0)
    assert same == msgspec.structs.replace(request().shared, arrival_ns=0, deadline_ns=0)
