"""Events from actors to their supervisor."""

from __future__ import annotations

from engine.messages import Reply
from engine.process.events import MAX_ANSWER_CHARACTERS, EventChannel, EventSender


def test_long_answer_is_truncated() -> None:
    """An error may quote hundreds of kilobytes of a checkpoint; a socket takes less at once."""
    channel = EventChannel()
    sender = EventSender(channel.sender)
    sender.send(Reply("c1", 503, "x" * 1_000_000))
    sender.send(Reply("c2", 200, "y"))
    first, second = channel.received()
    assert first == Reply("c1", 503, "x" * MAX_ANSWER_CHARACTERS)
    assert second == Reply("c2", 200, "y")
    channel.close()
