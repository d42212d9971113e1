"""Pictures for the simulation of a scheduler: prompts with units, what they count as in the arithmetic "model", a media process
and the encoder arena of a rank that checks what it reads.

The features of a unit are numbers drawn from its hash. A token in a unit counts as its feature, and one that sees others than
those before it also as all that it sees. So features of another unit, of another row, or none at all change the tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from engine.block_keys import forward_spans
from engine.messages import (
    EncoderCall,
    MediaItem,
    MediaSource,
    MediaUnit,
    Pixels,
    PixelsDone,
    PixelsFailed,
    Request,
    WantPixels,
    decode,
    encode,
)
from engine.scheduler.encoder_cost import EncoderCost
from shm.mailbox import Mailbox, MailboxSender
from shm.slab import SlabHandle

if TYPE_CHECKING:
    from tests.engine.scheduler.simulation import Simulation

PLACEHOLDER = 60


def digest(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def picture(name: str, num_tokens: int, num_units: int = 1) -> MediaItem:
    """Return a picture, or a video of `num_units` units, of `num_tokens` each."""
    source = MediaSource("api0", (SlabHandle(0, 0, 1, 1),), "image")
    hashes = tuple(blake2b(f"{name}-{num_tokens}-{index}".encode(), digest_size=32).digest() for index in range(num_units))
    return MediaItem(source, "image", (num_units, 2, 2 * num_tokens), hashes, num_tokens)


def prompt_of(*parts: list[int] | MediaItem) -> tuple[list[int], dict[str, Any]]:
    """Return the prompt with placeholders, and the fields of its Request."""
    prompt: list[int] = []
    media = [part for part in parts if isinstance(part, MediaItem)]
    units: list[MediaUnit] = []
    for part in parts:
        if not isinstance(part, MediaItem):
            prompt += part
            continue
        for index in range(len(part.unit_hashes)):
            number = media.index(part)
            units.append(MediaUnit(number, index, len(prompt), part.tokens_per_unit, 1, part.tokens_per_unit, 0, index > 0))
            prompt += [PLACEHOLDER] * part.tokens_per_unit
    return prompt, {"media": media, "units": tuple(units)}


def causal(num_tokens: int) -> list[int]:
    """Return the causal bounds, to be changed: first and last key of each token."""
    return [bound for position in range(num_tokens) for bound in (0, position)]


def values_of(
    token_ids: Sequence[int], units: Sequence[MediaUnit], hashes: Sequence[bytes], bounds: Sequence[int] = ()
) -> list[int]:
    """Return the value of each token of a prompt in the arithmetic model."""
    bases = list(token_ids)
    for unit, unit_hash in zip(units, hashes, strict=True):
        for row in range(unit.num_tokens):
            bases[unit.start + row] = digest(unit_hash, row)
    values = bases.copy()
    ends = {position: end for start, end in forward_spans(bounds) for position in range(start, end)}
    for position, (first, last) in enumerate(zip(bounds[::2], bounds[1::2], strict=True)):
        if (first, last) != (0, position):
            end = ends.get(position, position + 1)
            values[position] = digest(bases[position:end], tuple(bounds[2 * position : 2 * end]), first)
    return values


def expected_values(request: Request) -> list[int]:
    hashes = [request.shared.media[unit.item].unit_hashes[unit.index] for unit in request.prompt.units]
    return values_of(array("i", request.prompt.token_ids), request.prompt.units, hashes, array("i", request.shared.mask_bounds))


class EchoMedia:
    """Stand-in for media<index>: holds pixels until they are released. `failures`: its first answers by unit; `withheld`: units
    without an answer."""

    def __init__(self, simulation: Simulation, index: int, epoch: int = 1) -> None:
        run_id = simulation.config.run_id
        self.simulation = simulation
        self.name = f"media{index}"
        self.epoch = epoch
        self.held: dict[str, tuple[SlabHandle, bytes]] = {}
        self._scheduler_epoch = 1  # the scheduler that requested them
        self.failures: dict[bytes, list[tuple[int, str]]] = {}
        self.capacity = 1 << 30
        self.waits_for_room = False  # or says that there is none
        self._wanted: dict[str, bytes] = {}
        self.num_asked: dict[bytes, int] = {}
        self.requests: dict[bytes, str] = {}  # by unit, the request that it was asked for
        self.withheld: set[bytes] = set()
        self.is_silent = False
        self._num_made = epoch << 20
        self._mailbox = Mailbox.attach(run_id, self.name, epoch)
        self._sender = MailboxSender.attach(run_id, "scheduler", self.name, epoch)

    def turn(self) -> int:
        if self.is_silent:
            return 0
        if self.simulation.scheduler_epoch != self._scheduler_epoch:
            self._scheduler_epoch = self.simulation.scheduler_epoch
            self.held.clear()
            self._wanted.clear()
        records = self._mailbox.receive()
        for _, payload in records:
            message = decode(payload)
            match message:
                case WantPixels(call_id, _, _, item, index, request):
                    assert call_id not in self.held
                    self._wanted[call_id] = item.unit_hashes[index]
                    self.requests[item.unit_hashes[index]] = request
                case PixelsDone(call_id):
                    self.held.pop(call_id, None)
                    self._wanted.pop(call_id, None)
        num_done = len(records)
        for call_id in [call_id for call_id, wanted in self._wanted.items() if wanted not in self.withheld]:
            if not (self.waits_for_room and len(self.held) >= self.capacity):
                self._answer(call_id, self._wanted.pop(call_id))
                num_done += 1
        return num_done

    def read(self, handle: SlabHandle) -> bytes | None:
        """Return the hash of the unit with pixels there; None: none."""
        return next((unit_hash for held, unit_hash in self.held.values() if held == handle), None)

    def close(self) -> None:
        self._mailbox.close()
        self._sender.close()

    def _answer(self, call_id: str, unit_hash: bytes) -> None:
        self.num_asked[unit_hash] = self.num_asked.get(unit_hash, 0) + 1
        failures = self.failures.get(unit_hash)
        if failures:
            status, message = failures.pop(0)
            answer: Pixels | PixelsFailed = PixelsFailed(call_id, status, message, "image_parse_error")
        elif len(self.held) >= self.capacity:
            answer = PixelsFailed(call_id, 503, "no room")
        else:
            self._num_made += 1
            handle = SlabHandle(1, self._num_made % 64, self._num_made, 8)
            self.held[call_id] = handle, unit_hash
            answer = Pixels(call_id, self.name, handle)
        assert self._sender.try_send(encode(answer))


@dataclass
class FeatureArena:
    """Arena from row to unit, row in it, and version of the weights; outlives its ranks."""

    rows: dict[int, tuple[bytes, int, int]] = field(default_factory=dict)
    damaged: set[bytes] = field(default_factory=set)

    def damage(self, unit_hash: bytes) -> None:
        """Corrupt the header of a unit."""
        self.damaged.add(unit_hash)


@dataclass
class EchoEncoder:
    """Encoder of a rank; `calls` are those that it ran."""

    simulation: Simulation
    calls: list[EncoderCall] = field(default_factory=list)
    _under_way: tuple[int, int] = (0, 0)  # call and next part

    def run(self, call: EncoderCall, version: int) -> tuple[list[bytes], dict[bytes, str]]:
        """Return the complete units, and the missing ones."""
        config, arena = self.simulation.config, self.simulation.features
        cost = EncoderCost(config)
        parts = cost.parts_of([unit.num_rows for unit in call.units if not unit.is_features])
        assert len(parts) == call.num_parts
        is_one = call.last_part - call.first_part == 1
        assert is_one or sum(parts[call.first_part : call.last_part]) <= cost.max_cost, "a step keeps the budget of the encoder"
        assert len({unit.unit_hash for unit in call.units}) == len(call.units), "each unit once"
        if call.first_part:
            assert self._under_way == (call.call_id, call.first_part), "parts follow each other"
        else:
            lost = {
                unit.unit_hash: "its pixels are gone"
                for unit in call.units
                if self.simulation.media[int(unit.media[5:])].read(unit.handle) != unit.unit_hash
            }
            if lost:
                return [], lost
        self.calls.append(call)
        self._under_way = call.call_id, call.last_part
        if not call.is_last:
            return [], {}
        for unit in call.units:
            arena.damaged.discard(unit.unit_hash)
            for row in range(unit.num_rows):
                assert unit.first_row + row < config.encoder_cache_size
                arena.rows[unit.first_row + row] = unit.unit_hash, row, version
        return [unit.unit_hash for unit in call.units], {}

    def missing(self, unit_hash: bytes, first_row: int, num_rows: int, version: int) -> str:
        """Return why a unit cannot be read; empty: it can. Units that the test did not damage must be there."""
        if unit_hash in self.simulation.features.damaged:
            return "its header is damaged"
        found = [self.simulation.features.rows.get(first_row + row) for row in range(num_rows)]
        assert found == [(unit_hash, row, version) for row in range(num_rows)], "the rows are another's"
        return ""
