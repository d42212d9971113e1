"""An engine of a router's list, and the connection to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from engine.cluster.frames import Load, Piece
from engine.cluster.membership import Address
from engine.cluster.place import Place
from engine.cluster.sockets import Socket
from engine.messages import Adapter, MediaSource


class Session(msgspec.Struct):
    """A connection to an engine."""

    socket: Socket
    monitor: Socket
    heard_ns: int
    seen: int = 0  # frames received
    sent: int = 0  # frames sent
    received: int = 0  # of these, as the engine reported last
    is_welcome: bool = False
    is_held: bool = False  # the lanes to its places keep their records, because `kept` has frames
    loads: list[Load] = []
    versions: dict[int, int] = {}  # the router's numbers of weights by the engine's; empty: they are the same
    orders: set[str] = set()  # ids of orders whose answer will come
    is_idle: bool = False  # none of this router's sequences is open there
    last_forward: int = 0  # number of the frame
    kept: deque[bytes] = msgspec.field(default_factory=deque)  # frames that do not fit the connection
    files: dict[bytes, MediaSource] = {}  # of requests that were sent, by key; those used last come last
    uploads: deque[Iterator[Piece]] = msgspec.field(default_factory=deque)  # files that the engine wants
    unseen: deque[tuple[int, int, int]] = msgspec.field(default_factory=deque)  # frame, replica and sequences of Forwards


class RemoteEngine(msgspec.Struct):
    """An engine of the list."""

    address: Address
    session: Session | None = None
    places: list[Place] = []
    next_attempt_ns: int = 0
    is_leaving_ns: int = 0  # since when it is no longer on the list; 0: it is
    contents: str = ""  # digest of the weights that it has loaded
    lacking: list[Adapter] = []  # adapters that it must load before it gets requests
    next_load_ns: int = 0  # of these; 0: one is being loaded
    is_away: bool = False  # it gets nothing new, because it is about to load other weights
    trouble: str = ""  # why there is no session, or nothing new for it, as reported last

    @property
    def is_welcome(self) -> bool:
        return self.session is not None and self.session.is_welcome
