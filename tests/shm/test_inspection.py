"""Inspection of rings from outside."""

from __future__ import annotations

from shm.broadcast import BroadcastReader, BroadcastWriter
from shm.inspection import RingSnapshot, rings, segments
from shm.mailbox import Mailbox, MailboxSender
from shm.process import ProcessIdentity


def test_rings_show_fill_and_refusals_of_every_pair(run_id: str) -> None:
    Mailbox.create(run_id, "cache", ["supervisor", "scheduler"], 2048)
    sender = MailboxSender.attach(run_id, "cache", "scheduler", 1)
    while sender.try_send(b"x" * 100):
        pass
    BroadcastWriter.create(run_id, "scheduler", 3, 1024)
    writer = BroadcastWriter.attach(run_id, "scheduler", 1)
    readers = [BroadcastReader.attach(run_id, "scheduler", reader, 1) for reader in (0, 2)]
    writer.try_send(b"x" * 100)
    readers[0].receive()
    assert rings(run_id) == [
        RingSnapshot("worker0", "scheduler", 1024, 0, 1, 0),
        RingSnapshot("worker2", "scheduler", 1024, 128, 1, 0),
        RingSnapshot("cache", "supervisor", 2048, 0, 0, 0),
        RingSnapshot("cache", "scheduler", 2048, 2048, 16, 1),
    ]


def test_inspection_changes_nothing(run_id: str) -> None:
    Mailbox.create(run_id, "cache", ["supervisor"], 2048)
    mailbox = Mailbox.attach(run_id, "cache", 1)
    sender = MailboxSender.attach(run_id, "cache", "supervisor", 1)
    sender.try_send(b"a")
    before = bytes(mailbox.segment.buffer)
    rings(run_id)
    segments()
    assert bytes(mailbox.segment.buffer) == before
    assert mailbox.receive() == [("supervisor", b"a")]


def test_run_that_is_gone_has_no_rings(run_id: str) -> None:
    assert rings(run_id) == []


def test_segments_name_their_owner(run_id: str) -> None:
    Mailbox.create(run_id, "cache", ["supervisor"], 2048)
    (segment,) = [segment for segment in segments() if segment.run_id == run_id]
    assert (segment.kind, segment.owner) == ("mailbox", ProcessIdentity.of())
