"""Orders that routers pass on: an engine's link gives them to its supervisor, as `tokamak ctl` would, and returns the answers.

    router  Ask     ->  link  ->  Command    supervisor
    router  Answer  <-  link  <-  Reply      supervisor

Whoever has the cluster key may change weights and adapters, but only to what lies in the directories of --cluster-checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import zmq

from engine.cluster.frames import MAX_NAME_CHARACTERS, Ask, WrongFrameError
from engine.cluster.sockets import Socket
from engine.errors import RequestError
from engine.messages import AbortRequest, Command, LoadAdapter, ReloadWeights, Reply, Undo, decode_control, encode
from engine.process.run_directory import Run

MAX_OPEN_ORDERS = 256  # of all routers
MAX_PATH_CHARACTERS = 4096
KEEP_NS = 60_000_000_000  # a reply to a router that lost its session


class EngineOrders:
    """The orders in progress: `socket` is to be polled."""

    def __init__(self, context: zmq.Context[Socket], run: Run, checkpoints: Sequence[str]) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.connect(run.control_endpoint)
        self._checkpoints = [Path(directory) for directory in checkpoints]
        self._open: dict[str, tuple[str, str]] = {}  # by the id here: the router's run and its id
        self._answers: dict[str, tuple[int, list[Reply]]] = {}  # by the router's run, and when the last came

    def begin(self, run: str, ask: Ask) -> Reply | None:
        """Give an order of the router `run` to the supervisor. Return an answer if it is refused at once. Raises
        WrongFrameError for what no router sends."""
        order = ask.order
        names = ("name", "mode", "level", "contents")
        texts = [ask.command_id, *(getattr(order, name, "") for name in names)]
        texts += [order.command_id] if isinstance(order, Undo) else []
        if max(map(len, texts)) > MAX_NAME_CHARACTERS or len(getattr(order, "path", "")) > MAX_PATH_CHARACTERS:
            raise WrongFrameError("an order with a text that is too long")
        if len(self._open) >= MAX_OPEN_ORDERS:
            return Reply(ask.command_id, 429, f"{MAX_OPEN_ORDERS} orders are in progress, the limit; try again later")
        match order:
            case ReloadWeights(ranks=ranks, version=version) if ranks or version:
                raise WrongFrameError("a reload of single ranks")
            case LoadAdapter(slot=slot, other_free_slots=others) if slot != -1 or others:
                raise WrongFrameError("an adapter with a slot")
            case AbortRequest(request_id):
                order = AbortRequest(f"{run}.{request_id}")
            case Undo(command_id):
                order = Undo(f"{run}.{command_id}")
            case _:
                pass
        try:
            if isinstance(order, (ReloadWeights, LoadAdapter)) and order.path:
                self._check_path(order.path)
        except RequestError as error:
            return Reply(ask.command_id, error.status, error.message)
        command_id = f"{run}.{ask.command_id}"
        self._open[command_id] = run, ask.command_id
        self.socket.send(encode(Command(command_id, order)))
        return None

    def receive(self, now_ns: int) -> int:
        """Take the supervisor's replies; return how many."""
        num_done = 0
        while self.socket.poll(0):
            reply = decode_control(self.socket.recv())
            assert isinstance(reply, Reply), reply
            run, reply.command_id = self._open.pop(reply.command_id, ("", ""))
            if run:
                self._answers[run] = now_ns, [*self._answers.get(run, (0, []))[1], reply]
                num_done += 1
        return num_done

    def answers(self, run: str) -> list[Reply]:
        """Return the replies to a router that it was not sent yet."""
        return self._answers.pop(run, (0, []))[1]

    def of(self, run: str) -> list[str]:
        """Return the ids of a router's orders that it has no reply to."""
        open_ = [order_id for owner, order_id in self._open.values() if owner == run]
        return open_ + [reply.command_id for reply in self._answers.get(run, (0, []))[1]]

    def forget(self, now_ns: int) -> None:
        """Forget replies that no router came for."""
        self._answers = {run: kept for run, kept in self._answers.items() if now_ns - kept[0] < KEEP_NS}

    def close(self) -> None:
        self.socket.close()

    def _check_path(self, path: str) -> None:
        """Raise RequestError unless a path lies in one of the directories, links followed."""
        try:
            found = Path(path).resolve()
        except (OSError, ValueError, RuntimeError):
            found = Path()
        if not Path(path).is_absolute():
            raise RequestError(f"{path}: expected an absolute path on the machine of each engine", param="path")
        if not any(found.is_relative_to(directory.resolve()) for directory in self._checkpoints):
            named = ", ".join(map(str, self._checkpoints)) or "none"
            text = f"{path} is in no directory that routers may name ({named}); start the engine with --cluster-checkpoints"
            raise RequestError(text, status=403)
