"""Actors of an engine and the channels between them: pure data, read by the supervisor, every actor and the tests.

Names are the role with an index (`api0`, `worker0`); a role with one actor per replica has no index if there is one replica
(`scheduler`, `cache`). Ranks are numbered replica by replica: `worker<r>` is replica r // TP, tensor rank r % TP. A mailbox has
one ring per sender; the supervisor's ring, the control ring, is always the first.

A router (`tokamak router`) has no replicas of its own. Each replica of its engines has a place there: `scheduler<k>` is a row
of the actor table without a process. The link stands behind all of them: its mailbox has a ring, a lane, from each tokenizer to
each place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

import msgspec

from engine.config import EngineConfig
from shm.actor_table import role_of as role_of

SUPERVISOR = "supervisor"
SCHEDULER = "scheduler"
CACHE = "cache"
MEDIA = "media"  # vision models only
LINK = "link"  # between a router and its engines: on an engine with --cluster-listen, and on a router
ROLES = (SUPERVISOR, "api", MEDIA, "tokenizer", SCHEDULER, CACHE, "worker")  # of an engine by itself

STOP_ORDER = (
    "api",
    "tokenizer",
    LINK,
    SCHEDULER,
    "worker",
    MEDIA,
    CACHE,
)  # in the order in which a request travels, so that none of them loses what it waits for

TARGETS = {
    "api": "api.server:ApiActor",
    MEDIA: "engine.media.actor:MediaActor",
    "tokenizer": "engine.tokenizer.actor:TokenizerActor",
    SCHEDULER: "engine.scheduler.actor:SchedulerActor",
    CACHE: "engine.cache.actor:CacheActor",
    "worker": "workers.actor:WorkerActor",
    LINK: "engine.cluster.engine_link:EngineLink",
}
ROUTER_LINK = "engine.cluster.router_link:RouterLink"

_OF_A_REPLICA = (SCHEDULER, CACHE, "worker")  # these send to each other only within their replica

# receiver's role -> roles that send to it, besides the supervisor
_SENDERS = {
    "api": ("tokenizer", MEDIA),
    MEDIA: ("api", LINK, SCHEDULER),
    "tokenizer": ("api", SCHEDULER),
    SCHEDULER: ("tokenizer", LINK, "worker", CACHE, MEDIA),
    LINK: (SCHEDULER, MEDIA),
    CACHE: (SCHEDULER,),
    "worker": (),
}

_MEDIA_BYTES = 128 << 10  # of the media facts in a request's record
_MEDIA_RING_BYTES = 4 * _MEDIA_BYTES  # for messages to media processes, which carry no prompts

# bytes of each ring of a receiver's mailbox, before they are adapted to the longest request and the budget
_RING_BYTES = {
    "api": 1 << 20,
    MEDIA: _MEDIA_RING_BYTES,
    "tokenizer": 2 << 20,
    LINK: 512 << 10,
    SCHEDULER: 2 << 20,
    CACHE: 512 << 10,
    "worker": 64 << 10,
}
_BROADCAST_BYTES = 8 << 20
_MIN_BROADCAST_BYTES = 256 << 10
_MIN_RING_BYTES = 64 << 10
_RECORDS_PER_RING = 4  # a ring holds at least this many records of the largest size
SHARED_BUDGET_BYTES = 48 << 20  # of all rings, so that a container's 64 MB /dev/shm is enough


class ActorPlan(msgspec.Struct, frozen=True):
    """One child process: its name and its actor class, as `module:class`."""

    name: str
    target: str


class ActorLife(msgspec.Struct, frozen=True):
    """Parameters of a child process. The descriptors are inherited."""

    run_dir: str
    actor: str
    epoch: int
    parent: int  # pid of its supervisor
    segments: dict[str, int] = {}  # name -> descriptor
    arena_fd: int = -1
    device_arena_fd: int = -1
    weight_shelf_fds: tuple[int, int] = (-1, -1)  # sockets
    comm_fd: int = -1
    media_fds: dict[str, int] = {}  # media memory by name
    events_fd: int = -1
    listener_fd: int = -1  # a listening socket, for api processes


class RingSizes(msgspec.Struct, frozen=True):
    """Bytes of each ring in a receiver's mailbox, and of each replica's broadcast ring."""

    mailbox: dict[str, int]
    broadcast: int


def index_of(name: str) -> int:
    """Return the index in a name: 0 for `worker0` and for a name without one."""
    return int(name[len(role_of(name)) :] or 0)


def names_of(role: str, count: int) -> tuple[str, ...]:
    """Return the names of the actors of a role."""
    return (role,) if count == 1 and role in (SCHEDULER, CACHE) else tuple(f"{role}{index}" for index in range(count))


def actors_of(role: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of `names` that have this role."""
    return tuple(name for name in names if role_of(name) == role)


def partner_of(name: str, role: str, names: Sequence[str]) -> str:
    """Return the scheduler or cache actor (`role`) of the replica of `name`; ranks are numbered replica by replica. `names` are
    all actors; if none is a partner (in a test), return the one of a single replica."""
    partners, peers = actors_of(role, names) or (role,), actors_of(role_of(name), names)
    return partners[index_of(name) * len(partners) // len(peers)]


def media_of(request: str, names: Sequence[str]) -> str:
    """Return the media process, of `names`, that works for a request: always the same one, so that its decoded files are at
    hand when pixels are needed, and so that one request does not keep all of them busy."""
    return names[crc32(request.encode()) % len(names)]


def default_plan(config: EngineConfig) -> tuple[ActorPlan, ...]:
    """Return the children of an engine or a router, in the order in which a request passes them."""
    links = (ActorPlan(LINK, ROUTER_LINK if config.is_router else TARGETS[LINK]),) if config.has_link else ()
    counts = {
        "api": config.api_processes,
        MEDIA: config.media_processes,
        "tokenizer": config.tokenizer_processes,
        SCHEDULER: config.data_parallel_size,
        CACHE: config.data_parallel_size,
        "worker": config.num_ranks,
    }
    if config.is_router:
        counts = {role: counts[role] for role in ("api", MEDIA, "tokenizer")}
    return (*(ActorPlan(name, TARGETS[role]) for role, count in counts.items() for name in names_of(role, count)), *links)


def places_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the schedulers among `names` that are places of a router, without a process; none in an engine."""
    names = tuple(names)
    return () if actors_of(CACHE, names) or LINK not in names else actors_of(SCHEDULER, names)


def ring_of(sender: str, receiver: str, names: Sequence[str]) -> tuple[str, str]:
    """Return the mailbox in which `sender`'s messages to `receiver` go, and the name of the ring there."""
    return (LINK, lane_of(sender, receiver)) if receiver in places_of(names) else (receiver, sender)


def lane_of(tokenizer: str, place: str) -> str:
    """Return the name of the ring from a tokenizer to a place."""
    return f"{tokenizer}.{index_of(place)}"


def ends_of(lane: str) -> tuple[str, int]:
    """Return the tokenizer and the index of the place of a lane."""
    tokenizer, _, place = lane.rpartition(".")
    return tokenizer, int(place)


def senders_of(receiver: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the senders of `receiver`'s mailbox, in ring order. `names` are all actors; an actor with a role of its own (in a
    test) receives from all."""
    places = places_of(names)
    if receiver == LINK and places:
        return (SUPERVISOR, *(lane_of(tokenizer, place) for place in places for tokenizer in actors_of("tokenizer", names)))
    roles = _SENDERS.get(role_of(receiver))
    if places:
        roles = tuple(LINK if role == SCHEDULER else role for role in roles or ROLES)
        names = [name for name in names if name not in places]
    heard = [name for name in names if name not in (receiver, SUPERVISOR) and (roles is None or role_of(name) in roles)]
    if role_of(receiver) in _OF_A_REPLICA:
        heard = [name for name in heard if role_of(name) not in _OF_A_REPLICA or _are_partners(name, receiver, names)]
    return (SUPERVISOR, *heard)


def readers_of(scheduler: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the ranks that read a scheduler's broadcast ring, tensor rank 0 first."""
    names = tuple(names)
    return tuple(name for name in actors_of("worker", names) if _are_partners(name, scheduler, names))


def _are_partners(name: str, other: str, names: Sequence[str]) -> bool:
    """Return whether both belong to the same replica."""
    return partner_of(name, SCHEDULER, names) == partner_of(other, SCHEDULER, names)


def ring_sizes(names: Sequence[str], max_model_len: int) -> RingSizes:
    """Return ring sizes (powers of two). The longest request fits; if possible, all rings stay within the budget, and the rings
    of a vision model within what the same text model would take."""
    plain = [name for name in names if role_of(name) != MEDIA]
    budget = SHARED_BUDGET_BYTES
    if len(plain) < len(names):
        budget = min(budget, rings_bytes(plain, ring_sizes(plain, max_model_len)))
    places = places_of(names)
    receivers = [name for name in names if name != SUPERVISOR and name not in places]
    longest_record = 8 * max_model_len + (16 << 10)  # prompt and resume tokens, int32, and the rest of a record
    longest_record += _MEDIA_BYTES if len(plain) < len(names) else 0
    least = max(_MIN_RING_BYTES, _power_of_two_from(_RECORDS_PER_RING * longest_record))
    sizes = RingSizes({name: _ring_bytes(name, least) for name in receivers}, max(_BROADCAST_BYTES, 2 * least))
    while rings_bytes(names, sizes) > budget:
        shrunk = {name: max(size // 2, min(size, least)) for name, size in sizes.mailbox.items()}
        if shrunk == sizes.mailbox:
            break
        sizes = RingSizes(shrunk, sizes.broadcast)
    while rings_bytes(names, sizes) > budget and sizes.broadcast > max(_MIN_BROADCAST_BYTES, 2 * least):
        sizes = RingSizes(sizes.mailbox, sizes.broadcast // 2)
    return sizes


def rings_bytes(names: Sequence[str], sizes: RingSizes) -> int:
    """Return the bytes of all rings together."""
    num_broadcasts = 0 if places_of(names) else max(1, len(actors_of(SCHEDULER, names)))
    return num_broadcasts * sizes.broadcast + sum(size * len(senders_of(name, names)) for name, size in sizes.mailbox.items())


def _ring_bytes(name: str, least: int) -> int:
    default = _RING_BYTES.get(role_of(name), _MIN_RING_BYTES)
    carries_tokens = role_of(name) in ("api", "tokenizer", LINK, SCHEDULER, CACHE)
    return max(default, least) if carries_tokens else default


def _power_of_two_from(size: int) -> int:
    return 1 << (size - 1).bit_length()
