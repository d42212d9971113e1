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
from engine.messages import Adapter, Command, DropWeights, LoadAdapter, ReloadWeights, Reply, RouterOrder
from engine.process.adapters import AdapterRegistry
from engine.process.context import ActorContext

LATE_RETRY_NS = 5_000_000_000  # until an engine is asked again to load an adapter
_LATE = "late-"  # begins ids of such orders


class RouterOrders:
    """The orders in progress. `send(engine, ask)` sends a frame, `report(engine, trouble)` says what an operator must do."""

    def __init__(
        self,
        context: ActorContext,
        send: Callable[[RemoteEngine, Ask], None],
        report: Callable[[RemoteEngine, str], None],
    ) -> None:
        self._context = context
        self._send = send
        self._report = report
        self._num_open = context.counter("orders_in_progress")
        self._path = context.run.order_path
        self._open: list[RollingOrder] = []
        self._adapters = AdapterRegistry(context) if context.config.max_loras else None
        self._num_loads = 0  # by engines that came late
        self._resume()

    def _resume(self) -> None:
        """Take an order back that an earlier life of the link began. A record that cannot be read stops nothing."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=KeptOrder)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            self._trouble(f"cannot read {self._path} ({error}), so its order is not taken back; give the order again")
            self._path.unlink(missing_ok=True)
            return
        self._open.append(RollingOrder.interrupted(kept))

    def _trouble(self, text: str) -> None:
        self._context.log.warning("%s", text)
        self._context.counters.errors.record(self._context.name, text)

    def met(self, engine: RemoteEngine, adapters: list[Adapter], now_ns: int) -> None:
        """Note which adapters an engine has whose session begins: it loads those that it lacks before it gets requests."""
        served = self._adapters.served() if self._adapters else []
        has = {(each.name, each.contents) for each in adapters}
        engine.lacking = [each for each in served if (each.name, each.contents) not in has]
        engine.next_load_ns = now_ns

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
        self._open.append(RollingOrder(command, connected))
        return None

    def take(self, engine: RemoteEngine, reply: Reply) -> None:
        """Take an engine's answer."""
        for order in self._open:
            order.take(str(engine.address), reply, time.monotonic_ns())
        if reply.command_id.startswith(_LATE) and engine.lacking:
            self._loaded_late(engine, reply)
        if engine.session is not None:
            engine.session.orders.discard(reply.command_id)

    def advance(self, engines: Collection[RemoteEngine], now_ns: int) -> list[RollingOrder]:
        """Ask the next engines. Return the orders that are over, which are answered."""
        self._num_open.set(len(self._open))
        for engine in engines:
            if engine.lacking and engine.is_welcome and 0 < engine.next_load_ns <= now_ns:
                engine.next_load_ns = 0
                self._num_loads += 1
                adapter = engine.lacking[0]
                self._send(engine, Ask(f"{_LATE}{self._num_loads}", LoadAdapter(adapter.name, adapter.path, replaces=True)))
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

    def _loaded_late(self, engine: RemoteEngine, reply: Reply) -> None:
        adapter, now_ns = engine.lacking[0], time.monotonic_ns()
        found = reply.details.get("contents")
        if reply.status < 400 and found == adapter.contents:
            engine.lacking = engine.lacking[1:]
            engine.next_load_ns = now_ns
            return
        trouble = reply.message
        if reply.status < 400:
            trouble = f"{adapter.path} has other contents there ({found}) than on the other engines ({adapter.contents})"
        engine.next_load_ns = now_ns + LATE_RETRY_NS
        self._report(engine, f"it gets nothing new, because it lacks the adapter {adapter.name!r}: {trouble}")

    def _keep(self, order: RollingOrder) -> None:
        if must_be_equal(order.command.order):
            try:
                self._context.run.write(self._path, msgspec.json.encode(order.kept))
            except OSError as error:
                self._trouble(f"cannot write {self._path}: {error.strerror}; if the link dies now, the order is not taken back")


def _knows(engine: RemoteEngine, order_id: str) -> bool:
    return engine.session is not None and order_id in engine.session.orders


def _contents(order: RollingOrder, there: dict[str, RemoteEngine]) -> str:
    """Return the contents of weights that an engine has loaded for the order; empty: none has."""
    return next((there[name].contents for name in order.done if name in there), "")
