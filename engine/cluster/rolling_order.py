"""An order of a router's operator: carried out by one engine after another, and taken back if one of them fails.

    ask the first engine, then the next, ...        all done: the answer
    one fails, or cannot be reached                 those that have done it, and it, take it back; then the answer

An engine takes weights and a loaded adapter back by `Undo`. Other orders change nothing that must be equal. Pure; the link
sends and receives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import msgspec

from engine.messages import (
    AbortRequest,
    Command,
    Details,
    DropWeights,
    LoadAdapter,
    Order,
    Pause,
    ReloadWeights,
    Reply,
    Resume,
    Undo,
    UnloadAdapter,
)

LOST_NS = 30_000_000_000  # an engine that is away for longer has failed
RETRY_NS = 300_000_000  # until an engine is asked again to take back what it is still doing
_CHANGES = (Pause, Resume, ReloadWeights, DropWeights)  # taken back by `Undo`


class KeptOrder(msgspec.Struct, frozen=True):
    """Order and engines that the next life of a link needs, to take the order back."""

    command: Command
    asked: list[str]  # engines


def must_be_equal(order: Order) -> bool:
    """Return whether engines that have carried the order out differ from those that have not."""
    return isinstance(order, (*_CHANGES, LoadAdapter, UnloadAdapter))


class RollingOrder:
    """The order of `command` in progress."""

    def __init__(self, command: Command, engines: Iterable[str]) -> None:
        self.command = command
        self.asked = ""  # the engine that works on it, or takes it back
        self.done: dict[str, Reply] = {}
        self._untold = list(engines)
        self._failed = ""  # the engine that failed
        self._failure: Reply | None = None
        self._undone: list[str] = []
        self._to_undo: list[str] = []
        self._num_undos = 0
        self._next_ns = 0
        self._since_ns = 0  # when the asked engine was lost, or became the next one
        self._notes: list[str] = []

    @classmethod
    def interrupted(cls, kept: KeptOrder) -> RollingOrder:
        """Return an order that an earlier life of the link began, to be taken back."""
        order = cls(kept.command, ())
        order._failure = Reply(kept.command.command_id, 503, "the link died")
        order._to_undo = list(kept.asked)
        return order

    @property
    def is_over(self) -> bool:
        return not self.asked and not self._to_undo and (not self._untold or self._failure is not None)

    @property
    def is_going_back(self) -> bool:
        return self._failure is not None

    @property
    def kept(self) -> KeptOrder:
        """Return the record for the next life of the link."""
        return KeptOrder(self.command, [*self.done, *([self.asked] if self.asked else []), *self._to_undo])

    def next(self) -> str:
        """Return the engine that is to be asked now, if it is there; empty: none."""
        if self.asked or self.is_over:
            return ""
        return self._to_undo[0] if self.is_going_back else self._untold[0]

    def ask(self, engine: str, now_ns: int, contents: str = "") -> tuple[str, Order] | None:
        """Return id and order for the engine that `next` names; None: not yet. `contents`: of the weights that the engines
        before have loaded."""
        if now_ns < self._next_ns:
            return None
        self.asked, self._since_ns = engine, 0
        if self.is_going_back:
            self._num_undos += 1
            self._to_undo.remove(engine)
            return f"{self.command.command_id}-{self._num_undos}", Undo(self.command.command_id)
        self._untold.remove(engine)
        order = self.command.order
        if isinstance(order, ReloadWeights):
            order = msgspec.structs.replace(order, contents=contents)
        elif isinstance(order, LoadAdapter):
            order = LoadAdapter(order.name, order.path, order.replaces)  # each engine chooses a slot of its own
        return self.command.command_id, order

    def take(self, engine: str, reply: Reply, now_ns: int) -> None:
        """Take an engine's reply."""
        if engine != self.asked or not reply.command_id.startswith(self.command.command_id):
            return
        self.asked = ""
        if self.is_going_back:
            self._taken_back(engine, reply, now_ns)
        elif reply.status < 400 or (reply.status == 404 and isinstance(self.command.order, (AbortRequest, UnloadAdapter))):
            self.done[engine] = reply
            self._compare(engine, reply)
        else:
            self._fail(engine, reply)

    def watch(self, connected: Collection[str], knows: Callable[[str, str], bool], now_ns: int) -> None:
        """Give an engine up that is away for too long, or has forgotten the order. `knows(engine, id)`: whether a connected
        engine will answer it."""
        engine = self.asked or self.next()
        if not engine:
            return
        command_id = f"{self.command.command_id}-{self._num_undos}" if self.is_going_back else self.command.command_id
        if engine in connected:
            self._since_ns = 0
            if not self.asked or knows(engine, command_id):
                return
            reason = "it was restarted meanwhile"
        else:
            self._since_ns = self._since_ns or now_ns
            if now_ns - self._since_ns < LOST_NS:
                return
            reason = f"it cannot be reached for {LOST_NS // 1_000_000_000} s"
        self._since_ns = 0
        if not self.is_going_back:
            self._untold = [name for name in self._untold if name != engine]
            self._fail(engine, Reply(self.command.command_id, 503, reason))
        elif self.asked and engine in connected:  # ask once more
            self._to_undo.insert(0, engine)
        else:
            self._to_undo = [name for name in self._to_undo if name != engine]
            self._notes.append(f"{engine} could not take it back: {reason}")
        self.asked = ""

    def answer(self) -> Reply:
        """Return the answer of an order that is over."""
        command_id, order = self.command.command_id, self.command.order
        if self._failure is not None:
            parts = [f"{self._failed}: {self._failure.message}" if self._failed else self._failure.message]
            if self._undone:
                parts.append(f"{', '.join(self._undone)} took it back")
            return Reply(command_id, self._failure.status, "; ".join([*parts, *self._notes]), self._failure.details)
        replies = list(self.done.values())
        engines = [{"engine": name, "status": reply.status, "message": reply.message} for name, reply in self.done.items()]
        details: Details = {key: value for key, value in replies[0].details.items() if _are_equal(key, replies)}
        details["engines"] = engines  # type: ignore[assignment]
        if isinstance(order, AbortRequest):
            counts = [reply.details.get("num_aborted", 0) for reply in replies]
            number = sum(count for count in counts if isinstance(count, int))
            details["num_aborted"] = number
            status = 200 if number else max(reply.status for reply in replies)
            return Reply(command_id, status, f"aborted {number} sequences" if number else replies[0].message, details)
        first = next((reply for reply in replies if reply.status < 400), replies[0])
        message = first.message if len(replies) == 1 else f"{len(replies)} engines: {first.message}"
        return Reply(command_id, first.status, message, details)

    def _compare(self, engine: str, reply: Reply) -> None:
        """Fail a load if an engine found other contents under the path of an adapter than the first one."""
        first, found = next(iter(self.done.values())).details.get("contents"), reply.details.get("contents")
        if isinstance(self.command.order, LoadAdapter) and first != found:
            text = f"the adapter there has other contents ({found}) than on {next(iter(self.done))} ({first})"
            self._fail(engine, Reply(self.command.command_id, 400, text))

    def _fail(self, engine: str, reply: Reply) -> None:
        self._failed, self._failure = engine, reply
        if isinstance(self.command.order, (*_CHANGES, LoadAdapter)):
            # the engine that failed may have done it all the same, if only its answer is lost
            self._to_undo = [*self.done, *([engine] if reply.status >= 500 else [])]

    def _taken_back(self, engine: str, reply: Reply, now_ns: int) -> None:
        if reply.status == 409:  # it is still doing it
            self._to_undo.insert(0, engine)
            self._next_ns = now_ns + RETRY_NS
        elif reply.status < 400:
            self._undone.append(engine)
        elif reply.status != 404:  # then it has not done it
            self._notes.append(f"{engine} could not take it back: {reply.message}")


def _are_equal(key: str, replies: list[Reply]) -> bool:
    return all(reply.details.get(key) == replies[0].details.get(key) for reply in replies)
