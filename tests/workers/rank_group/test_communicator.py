"""Collectives between real processes: their results, and their end when a peer is dead, silent or in another call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ops import _cpu
from ops.cpu.array import Array, address_of, array_of
from ops.cpu.executors import Immediate, Recording, barrier_arguments
from ops.cpu.table import make_table
from shm.rank_group import WINDOW_BYTES
from tests.waiting import wait_until
from tests.workers.rank_group.calls import last_call
from tests.workers.rank_group.rank_groups import rank_group_of
from workers.rank_group.communicator import Communicator

SIZES = (1, 1000, WINDOW_BYTES // 4 + 7, 3 * WINDOW_BYTES // 4)  # floats: within a window, and in rounds


def of_rank(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng([rank, size]).standard_normal(size, np.float32) * np.float32(10.0) ** rank


def in_order(parts: list[np.ndarray]) -> np.ndarray:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def all_collectives(communicator: Communicator) -> None:
    """Run each with any size and compare it with numpy's result."""
    me, count = communicator.place, communicator.count
    for size in SIZES:
        all_x = [of_rank(rank, size) for rank in range(count)]
        np.testing.assert_array_equal(communicator.all_gather(all_x[me]), all_x)
        np.testing.assert_array_equal(communicator.all_reduce(all_x[me]), in_order(all_x))
        np.testing.assert_array_equal(communicator.all_reduce(all_x[me].copy(), in_place=True), in_order(all_x))
        parts = [of_rank(rank, count * size).reshape(count, size) for rank in range(count)]
        np.testing.assert_array_equal(communicator.reduce_scatter(parts[me]), in_order(parts)[me])
        root = size % count
        np.testing.assert_array_equal(communicator.broadcast(all_x[me], root), all_x[root])
        communicator.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_collectives_agree_with_numpy(num_ranks: int) -> None:
    with rank_group_of(num_ranks) as rank_group:
        assert rank_group.run(all_collectives) == [None] * num_ranks


def sends(sender: int, to: int) -> np.ndarray:
    """Return an array of a size of its own: none, little, or several windows."""
    size = (0, 5, WINDOW_BYTES + 77)[(sender + 2 * to) % 3]
    return np.random.default_rng([sender, to]).integers(0, 256, size, np.uint8)


def context(communicator: Communicator, most: int) -> None:
    me, count = communicator.place, communicator.count
    found = communicator.all_to_all([sends(me, to) for to in range(count)], most)
    for sender, part in enumerate(found):
        np.testing.assert_array_equal(part, sends(sender, me))


def alternate(communicator: Communicator, num_rounds: int) -> int:
    """Run a rank of two groups in turn; return how often it received wrong numbers. A sender continues when the others have
    arrived, before they have read."""
    groups = communicator, Communicator(communicator.memory.data, communicator.rank, 0, 2, timeout_s=60.0, shares_experts=True)
    assert groups[1].join()
    num_wrong = 0
    for number in range(num_rounds):
        for place, group in enumerate(groups):
            found = group.broadcast(np.full(64, 2 * number + place))
            num_wrong += bool((found != 2 * number + place).any())
    return num_wrong


@pytest.mark.slow
def test_groups_have_separate_buffers() -> None:
    with rank_group_of(2) as rank_group:
        assert rank_group.run(alternate, 4_000) == [0, 0]


def test_all_to_all_takes_any_sizes() -> None:
    with rank_group_of(3) as rank_group:
        assert rank_group.run(context, 4 * WINDOW_BYTES) == [None] * 3


def test_oversized_all_to_all_fails_on_its_receiver() -> None:
    with rank_group_of(3) as rank_group:
        answers = rank_group.run(context, WINDOW_BYTES)
    assert [answer[0] for answer in answers] == ["ValueError"] * 3  # each is sent one that is too long
    assert f"is sent {WINDOW_BYTES + 77 + 5} bytes and has room for {WINDOW_BYTES}" in answers[0][1]


def on_a_tape(communicator: Communicator) -> Any:
    """Return the results of ops of a tape for rows in changing numbers; without rows no rank waits."""
    rows, width, me = np.zeros(1, np.int32), 5, communicator.place
    counter = rows.ctypes.data
    x = np.arange(8 * width, dtype=np.float32).reshape(8, width) + 100 * me
    total = np.zeros_like(x)
    kind = _cpu.COMM_KINDS.index("all_reduce")
    rank_group = communicator.rank_group()
    whole = rank_group.half(0, 8 * 2 * width * 4).reshape(8, 2 * width)
    to, of = address_of(total), address_of(x)
    sent, received, swapped = np.array([4, 12], np.int64), np.zeros(2, np.int64), np.zeros(6, np.float32)
    exchange_kind = _cpu.COMM_KINDS.index("all_to_all")
    numbers = (exchange_kind, 4, 0, address_of(received), address_of(sent), counter, 6)
    tape = _cpu.Tape(
        [
            _cpu.collective(*(0 if value is None else value for value in barrier_arguments(rank_group)), counter, 8),
            _cpu.collective(to, of, rank_group.comm.address, kind, 4 * width, 0, 0, 0, counter, 8),
            _cpu.collective(address_of(swapped), of, rank_group.comm.address, *numbers),
            _cpu.gather(address_of(whole), of, rank_group.comm.address, 2 * width, width, me * width, 0, width, counter, 8),
        ],
        [],
    )
    tape.replay()
    before = communicator.native.num_calls
    rows[0] = 6
    tape.replay()
    return before, total.copy(), np.array(whole), swapped


def test_collectives_run_on_a_tape() -> None:
    with rank_group_of(2) as rank_group:
        answers = rank_group.run(on_a_tape)
    x = np.arange(40, dtype=np.float32).reshape(8, 5)
    for rank, (before, total, whole, swapped) in enumerate(answers):
        np.testing.assert_array_equal(swapped[: 2 if rank == 0 else 6], [0, 100] if rank == 0 else [1, 2, 3, 101, 102, 103])
        assert before == 0
        np.testing.assert_array_equal(total[:6], (2 * x + 100)[:6])
        assert not total[6:].any()
        np.testing.assert_array_equal(whole[:6], np.concatenate([x, x + 100], axis=1)[:6])


def gathered(communicator: Communicator, inner: int) -> Any:
    """Compute the activation of [8, 2 inner] twice; the second time its columns are read once more afterwards. Return whether
    they were written in place of the gathered array, and the results."""
    begin, end = (communicator.place * inner // 2, (communicator.place + 1) * inner // 2)
    recording = Recording(communicator.rank_group())
    k = make_table(recording)
    x = gate_and_up(inner)
    x.columns = ((begin, end), (inner + begin, inner + end))
    parts = [k.activate_and_multiply(x, "silu")]
    wholes = [k.all_gather(parts[0])]
    parts.append(k.activate_and_multiply(x, "silu"))
    wholes.append(k.all_gather(parts[1]))
    tape = recording.finish(k.activate(parts[1], "silu"))
    for _ in range(3):
        tape.replay()
    found = [np.array(whole.numpy()) for whole in wholes]
    communicator.barrier()
    return [part.address == whole.address for part, whole in zip(parts, wholes, strict=True)], found


def gate_and_up(inner: int) -> Array:
    return array_of(np.random.default_rng(inner).standard_normal((8, 2 * inner), np.float32))


def test_columns_are_written_into_the_gathered_buffer() -> None:
    """Unless ranks meet within a panel, or the rank's own columns are read afterwards."""
    for inner, is_there in ((64, True), (40, False)):
        whole = make_table(Immediate()).activate_and_multiply(gate_and_up(inner), "silu").numpy()
        with rank_group_of(2) as rank_group:
            answers = rank_group.run(gathered, inner)
        for are_there, found in answers:
            assert are_there == [is_there, False]
            np.testing.assert_array_equal(found, [whole, whole])


# ------------------------------------------------------------------------------------------------------------- trouble


def meet_often(communicator: Communicator) -> None:
    while True:
        communicator.all_reduce(np.ones(100_000, np.float32))


def meet_once(communicator: Communicator) -> None:
    communicator.barrier()


def test_killed_peer_ends_the_collective_at_once() -> None:
    """kill -9 in the middle of calls; the supervisor's new epoch wakes the waiting ranks."""
    with rank_group_of(3) as rank_group:
        ranks = [rank_group.start(rank, meet_often) for rank in range(3)]
        wait_until(lambda: min(last_call(rank_group.header, rank).sequence for rank in range(3)) > 20)
        ranks[1].kill()
        rank_group.header.set_member(1, False)
        epoch = rank_group.header.epoch
        for survivor in (ranks[0], ranks[2]):
            kind, text, rank, now = survivor.answer()
            assert (kind, rank, now) == ("RankGroupBroken", 1, epoch)
            assert f"rank 1, epoch {epoch}" in text


@pytest.mark.slow
def test_restored_rank_group_continues() -> None:
    with rank_group_of(2) as rank_group:
        rank_group.start(1, meet_often).kill()
        rank_group.header.set_member(1, False)
        rank_group.header.set_member(1, True)
        assert rank_group.run(all_collectives) == [None, None]


def test_silent_peer_is_named_after_the_timeout() -> None:
    with rank_group_of(2, timeout_s=0.2) as rank_group:
        kind, text = rank_group.start(0, meet_once).answer()
    assert kind == "RuntimeError"
    assert "rank 1 did not come to barrier 1 of 0 bytes in step 0, where rank 0 waited 200 ms" in text
    assert "--hang-timeout" in text


def in_step(communicator: Communicator, steps: list[int], sizes: list[int]) -> None:
    communicator.begin_step(steps[communicator.place])
    communicator.all_reduce(np.zeros(sizes[communicator.place], np.float32))


@pytest.mark.parametrize(
    ("steps", "sizes", "texts"),
    [
        ([7, 8], [4, 4], ("all_reduce 1 of 16 bytes in step 7", "all_reduce 1 of 16 bytes in step 8")),
        ([7, 7], [4, 5], ("all_reduce 1 of 16 bytes in step 7", "all_reduce 1 of 20 bytes in step 7")),
    ],
)
def test_mismatched_steps_are_reported(steps: list[int], sizes: list[int], texts: tuple[str, str]) -> None:
    with rank_group_of(2) as rank_group:
        for kind, text in rank_group.run(in_step, steps, sizes):
            assert kind == "RuntimeError"
            assert all(side in text for side in texts), text


def send_second_hello(communicator: Communicator) -> None:
    """Join again as after a restart of the scheduler: one rank before a call, the other after it."""
    for number in range(2):
        if communicator.place == number:
            assert communicator.join()
        communicator.barrier()


def test_second_hello_in_an_epoch_changes_nothing() -> None:
    with rank_group_of(2) as rank_group:
        assert rank_group.run(send_second_hello) == [None, None]


def different_calls(communicator: Communicator) -> None:
    if communicator.place:
        communicator.all_gather(np.zeros(4, np.float32))
    else:
        communicator.all_reduce(np.zeros(4, np.float32))


def test_mismatched_calls_are_reported() -> None:
    with rank_group_of(2) as rank_group:
        for kind, text in rank_group.run(different_calls):
            assert kind == "RuntimeError"
            assert "all_reduce 1 of 16 bytes" in text
            assert "all_gather 1 of 16 bytes" in text
