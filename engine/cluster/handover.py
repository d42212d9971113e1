"""Handover of configuration, model record and namespace from an engine to a router that starts."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import msgspec
import zmq

from engine.checkpoint.record import ModelRecord
from engine.cluster.frames import PROTOCOL, Goodbye, Greeting, Welcome, WrongFrameError, decode_frame, encode_frame
from engine.cluster.key import CurveKeys
from engine.cluster.membership import Address, Membership
from engine.cluster.sockets import Socket, dealer
from engine.config import EngineConfig
from engine.errors import OptionError
from engine.messages import Adapter

_ATTEMPT_S = 2.0  # for one engine, before the next is asked
_PAUSE_S = 0.2
_NOTE_S = 5.0  # between notes that the router still waits


class Handover(msgspec.Struct, frozen=True):
    config: EngineConfig
    model: ModelRecord
    namespace: str
    namespace_without_kernels: str
    facts: str
    adapters: list[Adapter]


def ask_engines(engines: Membership, keys: CurveKeys | None, note: Callable[[str], None]) -> Handover:
    """Return what the first engine of the list that answers hands over; waits as long as none does, and says so. Raises
    OptionError if the list cannot be used at first; later the last one that could is kept."""
    addresses = engines.read()
    context: zmq.Context[Socket] = zmq.Context(io_threads=1)
    troubles: dict[Address, str] = {}
    next_note_s = time.monotonic() + _NOTE_S
    try:
        while True:
            for address in addresses:
                try:
                    return _ask(context, address, keys)
                except (WrongFrameError, msgspec.DecodeError) as error:
                    troubles[address] = str(error)
            with contextlib.suppress(OptionError):
                addresses = engines.read()
            if time.monotonic() >= next_note_s:
                next_note_s = time.monotonic() + 6 * _NOTE_S
                note("waiting for an engine: " + "; ".join(f"{address}: {why}" for address, why in troubles.items()))
            time.sleep(_PAUSE_S)
    finally:
        context.term()


def _ask(context: zmq.Context[Socket], address: Address, keys: CurveKeys | None) -> Handover:
    socket = dealer(context, keys)
    try:
        socket.connect(address.endpoint)
        socket.setsockopt(zmq.SNDTIMEO, int(_ATTEMPT_S * 1000))
        socket.setsockopt(zmq.RCVTIMEO, int(_ATTEMPT_S * 1000))
        run = os.urandom(4).hex()  # any: this session asks once and ends
        socket.send(encode_frame(1, Greeting(PROTOCOL, run, 1, wants_model=True)))
        body = decode_frame(socket.recv(), 0)
    except zmq.Again:
        raise WrongFrameError("no answer (it does not run, is out of reach, or has another cluster key)") from None
    finally:
        socket.close(0)
    if isinstance(body, Goodbye):
        raise WrongFrameError(body.reason)
    if not isinstance(body, Welcome) or body.protocol != PROTOCOL:
        raise WrongFrameError("it is no engine of this version")
    config = msgspec.json.decode(body.config, type=EngineConfig)
    model = msgspec.msgpack.decode(body.model, type=ModelRecord)
    return Handover(config, model, body.namespace, body.namespace_without_kernels, body.facts, body.adapters)
