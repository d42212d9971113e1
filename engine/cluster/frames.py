"""Frames between the link of a router and the link of an engine, over one ZeroMQ connection.

    router  --DEALER-->  engine's ROUTER      Greeting; then Forward, Piece, Drop, Leave, Ask, Beat, Goodbye
    engine  ------->     router               Welcome or Goodbye; then Results, Refusal, Want, Prefixes, Report, Answer, Goodbye

A connection is one session: it begins with a Greeting, whose `session` only grows within a router's run. Frames are numbered
from 1 in each direction; a gap, a repetition or anything that is not a frame ends the session, and what it had open continues
elsewhere. Monotonic clocks of two machines have nothing in common, so times travel as durations: in a Forward, `arrival_ns` is
the age of the request and `deadline_ns` the time that is left.

Pure. Lengths are checked before memory is taken: ZeroMQ refuses a message longer than the limits below, and msgspec allocates
nothing for a length that the message does not have.
"""

from __future__ import annotations

import msgspec

from engine.messages import Abort, Adapter, Output, Rejected, Reply, Request, RouterOrder, WeightsRecord

PROTOCOL = 2
MAX_REQUEST_BYTES = 16 << 20  # of a frame that an engine takes: a request fits a ring's record
MAX_WELCOME_BYTES = 256 << 20  # of a frame that a router takes: a Welcome carries the tokenizer
MAX_PIECE_BYTES = 256 << 10  # of a file in a frame
MAX_NAME_CHARACTERS = 200  # of ids that a peer chooses


class WrongFrameError(Exception):
    """A peer sent something that is no frame, or not the next one."""


class FarewellError(WrongFrameError):
    """A peer said goodbye."""


class NotReadyError(WrongFrameError):
    """A session cannot begin yet."""


# ------------------------------------------------------------------------------------------------------ router -> engine


class Greeting(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Begin a session."""

    protocol: int
    run: str  # of the router: prefix of its request ids on the engine
    session: int
    wants_model: bool = False  # the Welcome carries configuration and model


class Forward(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Compute the sequences of a request on a replica of the engine."""

    replica: int
    request: Request  # with durations instead of times


class Drop(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Forget a sequence."""

    replica: int
    abort: Abort


class Leave(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Forget all sequences of a tokenizer of the router, which has died."""

    tokenizer: str


class Piece(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Bytes of a file that the engine wants. Pieces of a file come in order; without data: the file is gone."""

    key: bytes  # hash of its first unit
    part: int
    offset: int
    data: bytes


class Ask(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Carry out an operator's command, and answer it once."""

    command_id: str
    order: RouterOrder


class Beat(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The router lives."""


# ------------------------------------------------------------------------------------------------------ engine -> router


class Welcome(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The session has begun."""

    protocol: int
    run: str  # of the engine
    namespace: str
    namespace_without_kernels: str
    facts: str  # what the namespace is made of, as text
    records: list[WeightsRecord]  # of the weights of each replica
    adapters: list[Adapter]  # that take requests
    orders: list[str]  # ids of this router's orders that are in progress, or whose answer follows
    config: bytes = b""  # the engine's configuration without secrets, as JSON, if it was wanted
    model: bytes = b""  # its `model.msgpack`, if it was wanted


class Results(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Outputs of a step for sequences of a tokenizer of the router."""

    tokenizer: str
    outputs: list[Output]


class Want(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Send a file of an image or a video that a request names."""

    key: bytes


class Refusal(msgspec.Struct, tag=True, array_like=True, gc=False):
    tokenizer: str
    rejected: Rejected


class Load(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A replica as its gauges show it, under the names of `engine/metrics.py`."""

    is_ready: bool
    epoch: int  # of its scheduler: a new one has forgotten every sequence
    engine_state: int
    num_requests_running: int
    num_requests_waiting: int
    num_tokens_to_compute: int
    num_free_slots: int
    num_kv_blocks: int
    num_free_kv_blocks: int
    num_cached_kv_blocks: int
    prefix_cache_queries_total: int
    prefix_cache_hits_total: int


class Report(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The engine lives, and this is its load."""

    received: int  # number of the last frame that the link has read
    taken: int  # number of the last frame whose requests the schedulers have taken
    num_open: int  # sequences of this router
    loads: list[Load]  # of each replica


class Prefixes(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Changes of a replica's cached blocks, as fingerprints of 8 bytes."""

    replica: int
    is_whole: bool  # `added` is all that is cached
    added: bytes = b""
    removed: bytes = b""


class Answer(msgspec.Struct, tag=True, array_like=True, gc=False):
    """An `Ask` was carried out, or why not."""

    reply: Reply


class Goodbye(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The session has ended, or none was begun. Either side may say so."""

    reason: str


Body = (
    Greeting
    | Forward
    | Piece
    | Drop
    | Leave
    | Ask
    | Beat
    | Welcome
    | Results
    | Refusal
    | Want
    | Report
    | Prefixes
    | Answer
    | Goodbye
)


class Frame(msgspec.Struct, array_like=True, gc=False):
    seq: int
    body: Body


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frame(seq: int, body: Body) -> bytes:
    """Return frame number `seq` of a session as bytes."""
    return _encoder.encode(Frame(seq, body))


def decode_frame(data: bytes, seq: int) -> Body:
    """Return the body of the frame that follows number `seq`. Raises WrongFrameError if `data` is not that frame."""
    try:
        frame = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WrongFrameError(f"{len(data)} bytes that are no frame: {error}") from None
    if frame.seq != seq + 1:
        raise WrongFrameError(f"frame {frame.seq} came after frame {seq}")
    return frame.body


def to_wire(request: Request, now_ns: int) -> Request:
    """Return a request with durations instead of times of this machine's monotonic clock."""
    shared = request.shared
    left_ns = max(1, shared.deadline_ns - now_ns) if shared.deadline_ns else 0
    shared = msgspec.structs.replace(shared, arrival_ns=max(0, now_ns - shared.arrival_ns), deadline_ns=left_ns)
    return msgspec.structs.replace(request, shared=shared)


def from_wire(request: Request, now_ns: int) -> Request:
    """Return a request with times of this machine's monotonic clock instead of durations."""
    shared = request.shared
    deadline_ns = now_ns + shared.deadline_ns if shared.deadline_ns else 0
    shared = msgspec.structs.replace(shared, arrival_ns=now_ns - shared.arrival_ns, deadline_ns=deadline_ns)
    return msgspec.structs.replace(request, shared=shared)
