"""LoRA adapters in the supervisor: the loaded ones, their slots in the arena, and the commands to load and unload them.

Owned by `SupervisorCommands`; the supervisor lives as long as the arena. States of an adapter:

    load      gets a free slot and a number; the first rank checks the files and writes the slot, while steps continue. After
              that the adapter is in the record (adapters.json), and api processes find it. If the rank dies or refuses, nothing
              has changed
    leaving   api processes take no new requests for it. Open ones continue, even if processes die: they are submitted again
    gone      when no actor counts a sequence of it: schedulers reject it too (an api process that died may have sent one)
    free      when still no actor counts one: the slot may be written

An actor counts a sequence first and then reads the record; here it is the other way round (`engine/process/adapters.py`).
Adapters of the command line are loaded when all actors are ready, before the engine is ready.

A router has no arena. Its link takes the place of the rank: it has all engines load an adapter, and unload it when no api
process counts one of its sequences any more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from engine.config import EngineConfig
from engine.errors import RequestError
from engine.messages import Adapter, AdaptersRecord, Command, Details, LoadAdapter, Reply, UnloadAdapter
from engine.process.run_directory import Run
from engine.process.topology import LINK, SCHEDULER, SUPERVISOR, actors_of
from shm.counters import Cell, Counters

MAX_WAITING = 64  # waiting load commands
QUIET_NS = 250_000_000  # how long no actor must have counted a sequence: several turns of every actor's loop
_AT_START = "start/"
_GAUGES = {"api": ("adapter_open_requests",), SCHEDULER: ("adapter_requests_running", "adapter_requests_waiting")}


class _Leaving(msgspec.Struct):
    """A slot that is being freed; `adapter` has left the record if `is_gone`."""

    adapter: Adapter
    command_id: str  # is answered when the slot is free; empty: none waits
    quiet_since_ns: int = 0  # 0: some actor counts sequences
    is_gone: bool = False


class AdapterCommands:
    """`tell` puts a command on an actor's control ring; it returns why that failed, or an empty string."""

    def __init__(
        self,
        run: Run,
        config: EngineConfig,
        counters: Counters,
        names: Sequence[str],
        tell: Callable[[str, Command], str],
        answer: Callable[[Reply], None],
    ) -> None:
        self._run, self._config, self._tell, self._answer = run, config, tell, answer
        self._record = run.adapters() if config.max_loras else AdaptersRecord()  # a router begins with those of its engines
        self._loader = LINK if config.is_router else next(iter(actors_of("worker", names)), "")
        self._loads: deque[Command] = deque()  # the first one is in progress, once it has a slot
        self._starts = deque(config.lora_modules)
        self._leaving: list[_Leaving] = []
        self._unloading: dict[str, Adapter] = {}  # by id of the command: from the engines of a router
        self._last = "", "", ""  # id of the last load, its name, and the path of the adapter that it replaced
        self.failure = ""  # of the adapters named at start
        self.is_mistake = False  # of the user
        if config.max_loras:
            self._version = counters.counter("adapters_version", SUPERVISOR)
            self._num_adapters = counters.counter("num_adapters", SUPERVISOR)
            if self._record.adapters:
                self._show()
            self._cells: list[list[Cell]] = [
                [
                    counters.counter(gauge, actor, adapter_slot=str(slot))
                    for role, gauges in _GAUGES.items()
                    for actor in actors_of(role, names)
                    for gauge in gauges
                ]
                for slot in range(config.max_loras)
            ]

    @property
    def is_started(self) -> bool:
        """Whether all adapters named at start are loaded."""
        return not self._starts

    def begin(self, command: Command) -> None:
        """Carry out a command, or reply why not."""
        try:
            if not self._config.max_loras:
                raise RequestError("LoRA adapters are disabled; start the engine with --enable-lora", code="order_refused")
            if isinstance(command.order, LoadAdapter):
                self._begin_load(command, command.order)
            elif isinstance(command.order, UnloadAdapter):
                self._begin_unload(command, command.order.name)
        except RequestError as error:
            self._answer(Reply(command.command_id, error.status, error.message))

    def take(self, reply: Reply) -> bool:
        """Handle a rank's reply, or that of a router's link. Return False if it is for another command."""
        if reply.command_id in self._unloading:
            del self._unloading[reply.command_id]
            self._answer(reply)
            return True
        if not self._loads or reply.command_id != self._loads[0].command_id:
            return False
        command = self._loads.popleft()
        if reply.status >= 400:
            self._end_load(command, reply)
        else:
            self._loaded(command, reply.details)
        self._tell_next()
        return True

    def actor_died(self, name: str, cause: str) -> None:
        if name == self._loader and self._loads and self._is_told(self._loads[0]):
            command = self._loads.popleft()
            if not command.command_id.startswith(_AT_START):
                text = f"the adapter was not loaded: {cause}; try again"
                self._answer(Reply(command.command_id, 503, text))
            self._tell_next()
        for command_id, adapter in list(self._unloading.items() if name == self._loader else ()):
            del self._unloading[command_id]
            self._answer(Reply(command_id, 503, f"engines may still hold the adapter {adapter.name!r}: {cause}"))

    def has_loaded(self, command_id: str) -> bool:
        """Return whether a command is the last load, or a load in progress."""
        return command_id == self._last[0] or any(command_id == command.command_id for command in self._loads)

    def undo(self, command: Command, command_id: str) -> None:
        """Take the last load back: unload its adapter, or load the one that it replaced."""
        _, name, path = self._last
        if command_id != self._last[0]:
            self._answer(Reply(command.command_id, 409, "the adapter is still being loaded; try again when it is"))
            return
        self._last = "", "", ""
        order: LoadAdapter | UnloadAdapter = LoadAdapter(name, path, replaces=True) if path else UnloadAdapter(name)
        self.begin(Command(command.command_id, order))

    def advance(self, now_ns: int) -> None:
        """Begin waiting loads, and check which adapters are free. Called every turn of the supervisor, also during the
        start."""
        if self._starts and not self._loads and not self.failure:
            module = self._starts[0]
            self._loads.append(Command(f"{_AT_START}{module.name}", LoadAdapter(module.name, module.path)))
        self._tell_next()
        for leaving in list(self._leaving):
            is_quiet = not any(cell.value for cell in self._cells[leaving.adapter.slot])
            leaving.quiet_since_ns = (leaving.quiet_since_ns or now_ns) if is_quiet else 0
            if is_quiet and now_ns - leaving.quiet_since_ns >= QUIET_NS:
                self._left(leaving)

    def refuse_open(self, cause: str) -> None:
        """Answer the open commands with 503: the engine is stopping."""
        waiting = [command.command_id for command in self._loads] + [leaving.command_id for leaving in self._leaving]
        for command_id in waiting:
            if command_id and not command_id.startswith(_AT_START):
                self._answer(Reply(command_id, 503, f"the engine is stopping: {cause}"))
        for command_id in self._unloading:
            self._answer(Reply(command_id, 503, f"the engine is stopping: {cause}"))
        self._loads.clear()
        self._leaving.clear()
        self._unloading.clear()
        self._starts.clear()

    # -------------------------------------------------------------------------------------------------------- inside

    def _begin_load(self, command: Command, order: LoadAdapter) -> None:
        self._check_load(order)
        if len(self._loads) >= MAX_WAITING:
            raise RequestError(f"too many adapters are being loaded: {MAX_WAITING}, the limit; try again later", status=503)
        command.order = replace(order, slot=-1)
        self._loads.append(command)
        self._tell_next()

    def _check_load(self, order: LoadAdapter) -> None:
        """Raise RequestError if that name, or another adapter, is not possible."""
        if not order.name.isprintable() or not order.name or " " in order.name or "," in order.name:
            raise RequestError("expected a name of printable characters without spaces or commas", param="lora_name")
        if order.name in self._config.served_model_name:
            raise RequestError(
                f"{order.name!r} is already a name of the model; choose another name for the adapter", param="lora_name"
            )
        if self._served(order.name) is not None and not order.replaces:
            raise RequestError(
                f"the adapter {order.name!r} is already loaded; unload it, or replace it with load_inplace (--replace of "
                "`tokamak ctl load-adapter`)",
                param="lora_name",
            )
        if self._config.is_router and any(leaving.adapter.name == order.name for leaving in self._leaving):
            raise RequestError(f"the adapter {order.name!r} is still being unloaded; try again in a moment", status=409)
        if not self._free_slots():
            leaving = [leaving.adapter.name for leaving in self._leaving]
            waits = f" ({', '.join(leaving)} wait for open requests)" if leaving else ""
            raise RequestError(
                (
                    f"all {self._config.max_loras} adapter slots are in use{waits}; unload an adapter, or start with a "
                    "larger --max-loras"
                ),
                status=409 if leaving else 400,
            )

    def _tell_next(self) -> None:
        """Give the first waiting load a slot and send it to the rank, if the rank is there."""
        while self._loads and not self._is_told(self._loads[0]):
            command = self._loads[0]
            assert isinstance(command.order, LoadAdapter)
            try:
                self._check_load(command.order)  # commands before it may have changed that
            except RequestError as error:
                self._end_load(self._loads.popleft(), Reply(command.command_id, error.status, error.message))
                continue
            slot, *others = self._free_slots()
            placed = replace(command.order, slot=slot, other_free_slots=tuple(others))
            trouble = self._tell(self._loader, Command(command.command_id, placed))
            if not trouble:
                command.order = placed
            elif not command.command_id.startswith(_AT_START):
                self._end_load(self._loads.popleft(), Reply(command.command_id, 503, trouble))
                continue
            return

    def _is_told(self, command: Command) -> bool:
        return isinstance(command.order, LoadAdapter) and command.order.slot >= 0

    def _loaded(self, command: Command, found: Details) -> None:
        order, contents, rank = command.order, str(found["contents"]), found["rank"]
        assert isinstance(order, LoadAdapter)
        assert isinstance(rank, int)
        number = self._record.last_number + 1
        before = self._served(order.name)
        adapters = tuple(replace(each, is_leaving=True) if each is before else each for each in self._record.adapters)
        added = Adapter(order.name, order.path, number, order.slot, contents, rank, time.time())
        trouble = self._write(AdaptersRecord(number, (*adapters, added)))
        if trouble:
            self._end_load(command, Reply(command.command_id, 503, trouble))
            return
        if before is not None:
            self._leaving.append(_Leaving(replace(before, is_leaving=True), ""))
        self._last = command.command_id, order.name, "" if before is None else before.path
        details: Details = {"name": order.name, "path": order.path, "contents": contents, "rank": rank}
        self._end_load(command, Reply(command.command_id, 200, f"loaded adapter {order.name!r}", details))

    def _end_load(self, command: Command, reply: Reply) -> None:
        if not command.command_id.startswith(_AT_START):
            self._answer(reply)
        elif reply.status < 400:
            self._starts.popleft()
        else:
            self.failure = f"--lora-modules {self._starts[0].name}: {reply.message}"
            self.is_mistake = reply.status < 500

    def _begin_unload(self, command: Command, name: str) -> None:
        adapter = self._served(name)
        if adapter is None:
            is_leaving = any(leaving.adapter.name == name for leaving in self._leaving)
            text = f"the adapter {name!r} {'is being unloaded already' if is_leaving else 'is not loaded'}"
            raise RequestError(text, status=409 if is_leaving else 404, param="lora_name")
        left = replace(adapter, is_leaving=True)
        adapters = tuple(left if each is adapter else each for each in self._record.adapters)
        trouble = self._write(replace(self._record, adapters=adapters))
        if trouble:
            raise RequestError(trouble, status=503)
        self._leaving.append(_Leaving(left, command.command_id))

    def _left(self, leaving: _Leaving) -> None:
        """Advance an adapter that no actor counts: first out of the record, so that api processes and schedulers take it no
        more; the next time its slot is free."""
        number = leaving.adapter.number
        leaving.quiet_since_ns = 0
        if not leaving.is_gone:
            adapters = tuple(each for each in self._record.adapters if each.number != number)
            leaving.is_gone = not self._write(replace(self._record, adapters=adapters))  # otherwise retried
            return
        if self._config.is_router and leaving.command_id:  # one that was replaced is so on the engines
            if self._tell(LINK, Command(leaving.command_id, UnloadAdapter(leaving.adapter.name))):
                return  # retried
            self._unloading[leaving.command_id] = leaving.adapter
        self._leaving.remove(leaving)
        if leaving.command_id and not self._config.is_router:
            self._answer(Reply(leaving.command_id, 200, f"unloaded adapter {leaving.adapter.name!r}"))

    def _write(self, record: AdaptersRecord) -> str:
        """Write the record, which is valid from here on. Return why it cannot be written, or an empty string."""
        try:
            self._run.write_adapters(record)
        except OSError as error:
            path = self._run.adapters_path
            return f"the command cannot be recorded in {path}: {error.strerror}; fix that directory and try again"
        self._record = record
        self._show()
        return ""

    def _show(self) -> None:
        """Have actors read the record."""
        self._version.add(1)
        self._num_adapters.set(len(self._record.adapters))

    def _served(self, name: str) -> Adapter | None:
        return next((each for each in self._record.adapters if each.name == name and not each.is_leaving), None)

    def _free_slots(self) -> list[int]:
        taken = {each.slot for each in self._record.adapters} | {leaving.adapter.slot for leaving in self._leaving}
        return [slot for slot in range(self._config.max_loras) if slot not in taken]
