"""Operators' commands in the link of a router: which engine is asked next, and what the next life of the link must know.

The supervisor of the router gives a command to the link, as it gives one to schedulers elsewhere. While weights or adapters
change, the command is kept in the run's directory: a link that dies is followed by one that takes it back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import msgspec

from engine.cluster.frames import Ask
from engine.cluster.remote_engine import RemoteEngine
from engine.cluster.rolling_order import KeptOrder, RollingOrder, must_be_equal
from engine.messages import Command, DropWeights, LoadAdapter, ReloadWeights, Reply, RouterOrder
from engine.process.context import ActorContext

_NAME = "order.json"  # in the run's directory


class RouterOrders:
    """The orders in progress. `send(engine, ask)` sends a frame."""

    def __init__(self, context: ActorContext, send: Callable[[RemoteEngine, Ask], None]) -> None:
        self._context = context
        self._send = send
        self._num_open = context.counter("orders_in_progress")
        self._path = context.run.directory / _NAME
        self._open: list[RollingOrder] = []
        if self._path.exists():
            kept = msgspec.json.decode(self._path.read_bytes(), type=KeptOrder)
            self._open.append(RollingOrder.interrupted(kept, self._replaced(kept.command)))

    @property
    def are_weights_changing(self) -> bool:
        """Whether engines may have different weights just now."""
        return any(isinstance(order.command.order, (ReloadWeights, DropWeights)) for order in self._open)

    def begin(self, command: Command, engines: Collection[RemoteEngine]) -> Reply | None:
        """Begin a command. Return a reply if it is refused."""
        order = command.order
        if not isinstance(order, RouterOrder):
            text = f"a router does not pass {type(order).__name__} on; send it to an engine"
            return Reply(command.command_id, 400, text)
        if isinstance(order, ReloadWeights) and order.ranks:
            return Reply(command.command_id, 400, "engines of a router are reloaded whole; leave out the ranks")
        there = [engine for engine in engines if not engine.is_leaving_ns]
        connected = [str(engine.address) for engine in there if engine.is_welcome]
        if must_be_equal(order):
            others = [each for each in self._open if must_be_equal(each.command.order)]
            away = [str(engine.address) for engine in there if not engine.is_welcome]
            if others:
                text = f"{type(others[0].command.order).__name__} is in progress; try again when it has finished"
                return Reply(command.command_id, 409, text)
            if away:
                text = (
                    f"engine {away[0]} is not connected and would differ from the others; wait for it, or take it off the list"
                )
                return Reply(command.command_id, 503, text)
        if not connected:
            return Reply(command.command_id, 503, "no engine is connected; try again when one is")
        self._open.append(RollingOrder(command, connected, self._replaced(command)))
        return None

    def take(self, engine: RemoteEngine, reply: Reply) -> None:
        """Take an engine's answer."""
        for order in self._open:
            order.take(str(engine.address), reply, time.monotonic_ns())
        if engine.session is not None:
            engine.session.orders.discard(reply.command_id)

    def advance(self, engines: Collection[RemoteEngine], now_ns: int) -> list[RollingOrder]:
        """Ask the next engines. Return the orders that are over, which are answered."""
        self._num_open.set(len(self._open))
        if not self._open:
            return []
        there = {str(engine.address): engine for engine in engines if engine.is_welcome}
        for order in self._open:
            order.watch(there, lambda name, order_id: _knows(there[name], order_id), now_ns)
            name = order.next()
            if name in there:
                asked = order.ask(name, now_ns, _contents(order, there))
                if asked is not None:
                    self._keep(order)
                    self._send(there[name], Ask(*asked))  # type: ignore[arg-type]
        over = [order for order in self._open if order.is_over]
        for order in over:
            self._open.remove(order)
            if must_be_equal(order.command.order):
                self._path.unlink(missing_ok=True)
            self._context.events.send(order.answer())
        return over

    def _keep(self, order: RollingOrder) -> None:
        if must_be_equal(order.command.order):
            unfinished = self._path.with_suffix(".new")
            unfinished.write_bytes(msgspec.json.encode(order.kept))
            unfinished.replace(self._path)

    def _replaced(self, command: Command) -> str:
        """Return the path of the adapter that a command replaces; empty: none."""
        order = command.order
        if not isinstance(order, LoadAdapter) or not self._context.config.max_loras:
            return ""
        adapters = self._context.run.adapters().adapters
        return next((each.path for each in adapters if each.name == order.name and not each.is_leaving), "")


def _knows(engine: RemoteEngine, order_id: str) -> bool:
    return engine.session is not None and order_id in engine.session.orders


def _contents(order: RollingOrder, there: dict[str, RemoteEngine]) -> str:
    """Return the contents of weights that an engine has loaded for the order; empty: none has."""
    return next((there[name].contents for name in order.done if name in there), "")
