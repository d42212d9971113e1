"""A router that has a session with an engine, and what it has open there."""

from __future__ import annotations

from collections import deque

import msgspec

from engine.messages import Request


class OpenSequence(msgspec.Struct):
    """Sequence of a router that is open here."""

    scheduler: int
    tokenizer: str  # of the router
    attempt: int
    num_bytes: int  # of its request
    files: tuple[bytes, ...] = ()  # that it uses


class ParkedRequest(msgspec.Struct):
    """Request of a router that waits for its files."""

    run: str
    replica: int
    request: Request
    keys: tuple[bytes, ...]


class Peer(msgspec.Struct):
    """A router with a session."""

    identity: bytes  # of its connection
    run: str
    session: int
    heard_ns: int
    seen: int = 0  # frames received
    sent: int = 0  # frames sent
    is_report_due: bool = False
    taken: int = 0  # frames whose requests the schedulers have taken
    kept: deque[bytes] = msgspec.field(default_factory=deque)  # frames that it has not read
    num_kept_bytes: int = 0
    open: dict[str, OpenSequence] = {}  # by the router's request id
    num_open_bytes: int = 0
