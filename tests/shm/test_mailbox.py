"""Properties of a mailbox beyond those of its rings: several senders, the control ring, one doorbell."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

import pytest

from shm import layout
from shm.errors import SharedMemoryError
from shm.mailbox import Mailbox, MailboxSender, ring_offsets
from tests.shm.links import MailboxLink
from tests.waiting import wait_until

SECOND = 1_000_000_000


def open_mailbox(run_id: str, *senders: str) -> tuple[Mailbox, dict[str, MailboxSender]]:
    Mailbox.create(run_id, "scheduler", senders, 4096)
    mailbox = Mailbox.attach(run_id, "scheduler", 1)
    return mailbox, {sender: MailboxSender.attach(run_id, "scheduler", sender, 1) for sender in senders}


def test_control_ring_is_read_first(run_id: str) -> None:
    mailbox, senders = open_mailbox(run_id, "supervisor", "api0", "api1", "api2")
    for number in range(3):
        for name in ("api0", "api1", "supervisor"):
            senders[name].try_send(b"%d" % number)
    received = mailbox.receive()
    assert received[:3] == [("supervisor", b"0"), ("supervisor", b"1"), ("supervisor", b"2")]
    assert sorted(received[3:5]) == [("api0", b"0"), ("api1", b"0")]
    assert sorted(received[5:7]) == [("api0", b"1"), ("api1", b"1")]
    assert sorted(received[7:]) == [("api0", b"2"), ("api1", b"2")]


def test_busy_sender_does_not_starve_another(run_id: str) -> None:
    mailbox, senders = open_mailbox(run_id, "supervisor", "api0", "api1")
    for _ in range(20):
        senders["api0"].try_send(b"many")
    senders["api1"].try_send(b"one")
    taken = [mailbox.receive(1)[0] for _ in range(3)]
    assert ("api1", b"one") in taken
    senders["supervisor"].try_send(b"order")
    assert mailbox.receive(1) == [("supervisor", b"order")]


def test_full_ring_does_not_block_other_senders(run_id: str) -> None:
    _, senders = open_mailbox(run_id, "supervisor", "api0", "api1")
    while senders["api0"].try_send(b"x" * 500):
        pass
    assert senders["api1"].try_send(b"fits")
    assert (senders["api0"].num_full_waits, senders["api1"].num_full_waits) == (1, 0)


def test_new_reader_continues_after_the_last_one(run_id: str) -> None:
    mailbox, senders = open_mailbox(run_id, "supervisor", "api0")
    for number in range(3):
        senders["api0"].try_send(b"%d" % number)
    assert mailbox.receive(1) == [("api0", b"0")]
    assert Mailbox.attach(run_id, "scheduler", 2).receive() == [("api0", b"1"), ("api0", b"2")]


def test_record_delivered_twice_is_dropped(run_id: str) -> None:
    """A reader died between noting the delivery and moving its head."""
    link = MailboxLink(run_id)
    link.writer.try_send(b"a")
    link.writer.try_send(b"b")
    reader = link.views()[2]
    before = reader.word("head")
    assert link.receive(1) == [b"a"]
    reader.set_word("head", before)
    link.open_reader(2)
    assert link.receive() == [b"b"]
    assert reader.word("num_dropped") == 1


def test_reader_killed_at_a_new_epoch_loses_nothing(run_id: str) -> None:
    """The head and the last delivered number have moved, but not yet the epoch of that number."""
    link = MailboxLink(run_id)
    for _ in range(10):
        link.writer.try_send(b"of epoch 1")
    link.receive()
    link.open_writer(2)
    for number in range(3):
        link.writer.try_send(b"%d" % number)
    assert link.receive(1) == [b"0"]
    link.views()[2].set_word("last_epoch", 1)
    link.open_reader(2)
    assert link.receive() == [b"1", b"2"]


def test_corrupt_ring_costs_no_record_of_the_others(run_id: str) -> None:
    mailbox, senders = open_mailbox(run_id, "supervisor", "api0", "api1")
    for name in senders:
        senders[name].try_send(b"fine")
    writer = layout.StructView("WriterLine", mailbox.segment.buffer, ring_offsets(mailbox.segment.buffer)[2])
    writer.set_word("tail", 1 << 50)
    assert mailbox.receive() == [("supervisor", b"fine"), ("api0", b"fine")]
    with pytest.raises(SharedMemoryError, match="corrupt ring"):
        mailbox.receive()


def test_unknown_sender_and_bad_names_are_refused(run_id: str) -> None:
    open_mailbox(run_id, "supervisor", "api0")
    with pytest.raises(SharedMemoryError, match="has no ring for api1, only for supervisor, api0"):
        MailboxSender.attach(run_id, "scheduler", "api1", 1)
    with pytest.raises(SharedMemoryError, match="must be distinct"):
        Mailbox.create(run_id, "cache", ["a", "a"], 4096)
    with pytest.raises(SharedMemoryError, match="must be distinct"):
        Mailbox.create(run_id, "cache", [], 4096)
    with pytest.raises(SharedMemoryError, match="ring of 4294967296 bytes is too large, the limit is 2147483648"):
        Mailbox.create(run_id, "cache", ["a"], 1 << 32)
    with pytest.raises(SharedMemoryError, match="the limit is 31; use a shorter name"):
        Mailbox.create(run_id, "cache", ["a" * 32], 4096)


def test_one_thread_may_wait_while_another_receives(run_id: str) -> None:
    """The api does this: a thread sleeps on the doorbell for the event loop."""
    mailbox, senders = open_mailbox(run_id, "supervisor", "api0")
    woken = threading.Semaphore(0)
    taken = threading.Semaphore(0)

    def sleep_on_the_doorbell() -> None:
        for _ in range(100):
            assert mailbox.wait(30 * SECOND)
            woken.release()
            assert taken.acquire(timeout=30)

    thread = threading.Thread(target=sleep_on_the_doorbell)
    thread.start()
    for number in range(100):
        senders["api0"].try_send(b"%d" % number)
        assert woken.acquire(timeout=30)
        assert mailbox.receive() == [("api0", b"%d" % number)]
        taken.release()
    thread.join(30)
    assert not thread.is_alive()


def test_signal_handler_runs_during_a_wait(run_id: str) -> None:
    mailbox, _ = open_mailbox(run_id, "supervisor")

    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    def wait_and_be_interrupted() -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        mailbox.wait(60 * SECOND)

    previous = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupted):
            wait_and_be_interrupted()
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_close_while_another_thread_waits_is_harmless(run_id: str) -> None:
    mailbox, senders = open_mailbox(run_id, "supervisor")
    done = threading.Event()
    reader = mailbox.wait

    def wait() -> None:
        reader(200_000_000)
        done.set()

    threading.Thread(target=wait).start()
    mailbox.close()
    senders["supervisor"].try_send(b"late")
    wait_until(done.is_set, what="the wait to end")


def test_rings_are_cache_line_apart(run_id: str) -> None:
    mailbox, _ = open_mailbox(run_id, "supervisor", "api0", "api1")
    assert all(offset % layout.LINE == 0 for offset in ring_offsets(mailbox.segment.buffer))


def test_held_ring_keeps_its_records(run_id: str) -> None:
    """It is neither received nor waited for, fills, and is received in order once it is released."""
    mailbox = Mailbox.create(run_id, "b0", ["supervisor", "a0", "a1"], 1024)
    held, other = (MailboxSender.attach(run_id, "b0", name, 1) for name in ("a0", "a1"))
    mailbox.hold("a0", True)
    num_sent = 0
    while held.try_send(b"%d" % num_sent):
        num_sent += 1
    assert num_sent > 3
    assert not mailbox.wait(1_000_000)
    assert other.try_send(b"free")
    assert mailbox.wait(1_000_000)
    assert mailbox.receive() == [("a1", b"free")]
    mailbox.hold("a0", False)
    assert mailbox.receive() == [("a0", b"%d" % number) for number in range(num_sent)]
