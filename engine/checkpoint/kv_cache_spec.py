"""Layout of a model's keys and values in memory.

Used by the launcher (number of blocks, size of the arena, groups of layers) and by the workers (tensors in it). The arena
consists of pages: keys and values of `block_size` positions in `layers_per_page` layers. Layers with the same reach are a group
(`engine/kv_groups.py`), with a block table for every `layers_per_page` of them. A layer may read the keys and values of an
earlier one; it has none of its own then.

    6 layers, every third sees all keys (F), the others a window (W)      layers_per_page = 2
    layer    W0  W1  F2  W3  W4  F5
    table     1   1   0   2   2   0
    index     0   1   0   0   1   1       of the layer in a page

Layers without attention have no keys and values; their place is never used. A model without any attention has pages of a few
bytes, so that its blocks are counted, indexed and found like those of other models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from engine.checkpoint.model_config import ModelConfig
from engine.kv_groups import KvGroup

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_SCALE_BYTES = {"float32": 0, "bfloat16": 0, "int8": 4}  # bytes of scales per position and head, for keys and for values
_NUM_LATENT_HEADS = 1  # latent attention keeps one rotated key and, as value, one latent for all heads
_UNUSED_PLACE = (0, 0)  # of layers without attention
_LEAST_DIM = 2  # of keys and values in a model without attention
_MAX_UNUSED_SHARE = 0.1  # of a page's layers, in groups with a window; there are more tables instead


class LayerPlace(msgspec.Struct, frozen=True):
    """Place of a layer's keys and values: pages of a block table, and the index of the layer there."""

    table: int
    index: int
    first_head: int = 0  # of the layer in a block, if smaller layers share it
    num_heads: int = 0  # heads of the layer's size that a block has room for; 0: those of the layer


class KVCacheSpec(msgspec.Struct, frozen=True):
    """Shape of a KV cache without its number of blocks."""

    layers_per_page: int
    groups: tuple[KvGroup, ...]  # the one that sees most first
    places: tuple[LayerPlace, ...]  # of each layer
    num_kv_heads: int
    key_dim: int  # per head
    value_dim: int
    block_size: int  # positions per block
    dtype: str  # "float32" | "bfloat16" | "int8"
    has_marks: bool = False  # a byte per position: whether draft layers have keys and values there

    @staticmethod
    def of(model: ModelConfig, block_size: int, dtype: str, has_drafts: bool = False) -> KVCacheSpec:
        """Return the spec of a model. `has_drafts`: draft layers have keys and values, too."""
        heads, key_dim, value_dim = model.num_kv_heads, model.head_dim, model.head_dim
        if model.latents is not None:
            heads, key_dim, value_dim = _NUM_LATENT_HEADS, model.latents.rotary_dim, model.latents.latent_dim
        windows, has_marks = model.sliding_windows, False
        if model.attention_layers is not None:
            return _of_some_layers(model, model.attention_layers, block_size, dtype, has_drafts=has_drafts)
        if model.layer_shapes:
            return _of_shapes(model, block_size, dtype)
        sources: tuple[int, ...] = ()
        if model.is_bidirectional:  # data of a layer is not needed later: all layers share the memory
            windows = sources = (0,) * model.num_layers
        elif has_drafts:  # draft layers look for their entries in all blocks before a row (marks)
            windows, has_marks = windows if 0 in windows else (0,) * len(windows), True
            windows += (0,) * model.num_draft_layers
        return KVCacheSpec(*place_layers(windows, sources), heads, key_dim, value_dim, block_size, dtype, has_marks)

    @property
    def num_tables(self) -> int:
        """Block tables of a sequence."""
        return sum(group.num_tables for group in self.groups)

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys of a block in one layer."""
        return self._bytes_of(self.key_dim)

    @property
    def value_bytes(self) -> int:
        return self._bytes_of(self.value_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: keys and values of its layers, and marks."""
        return self.layers_per_page * (self.key_bytes + self.value_bytes) + (self.block_size if self.has_marks else 0)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block in all layers."""
        return self.num_tables * self.page_bytes

    def _bytes_of(self, dim: int) -> int:
        return self.block_size * self.num_kv_heads * (dim * _DTYPE_BYTES[self.dtype] + _SCALE_BYTES[self.dtype])

    def num_pages(self, num_blocks: int) -> int:
        """Return the pages of `num_blocks` blocks in all layers, without page 0, the dummy that padded rows write to."""
        return num_blocks * self.num_tables

    def arena_bytes(self, num_blocks: int) -> int:
        """Return the bytes of the pages of `num_blocks` blocks, and of page 0."""
        return (self.num_pages(num_blocks) + 1) * self.page_bytes


def _of_some_layers(
    model: ModelConfig, attention_layers: Sequence[int], block_size: int, dtype: str, *, has_drafts: bool
) -> KVCacheSpec:
    """Return the spec of a model in which only `attention_layers` have keys and values."""
    num_drafts = model.num_draft_layers if has_drafts else 0
    attending = [*attention_layers, *range(model.num_layers, model.num_layers + num_drafts)]
    found = msgspec.structs.replace(
        model,
        attention_layers=None,
        sliding_windows=tuple(model.sliding_windows[layer] for layer in attention_layers) if attending else (0,),
        num_kv_heads=model.num_kv_heads if attending else 1,
        head_dim=model.head_dim if attending else _LEAST_DIM,
    )
    spec = KVCacheSpec.of(found, block_size, dtype, has_drafts)
    place_of = dict(zip(attending, spec.places, strict=False))
    num_layers = model.num_layers + num_drafts
    places = tuple(place_of.get(layer, LayerPlace(*_UNUSED_PLACE)) for layer in range(num_layers))
    return msgspec.structs.replace(spec, places=places)


def _of_shapes(model: ModelConfig, block_size: int, dtype: str) -> KVCacheSpec:
    """Return the spec of a model with heads of several sizes: a block has room for the keys of the largest layer, and smaller
    layers of a group share one."""
    shapes = model.layer_shapes
    step, widest = math.lcm(*(shape.head_dim for shape in shapes)), max(shape.num_kv_heads * shape.head_dim for shape in shapes)
    width = -(-widest // step) * step
    room = [width // shape.head_dim // shape.num_kv_heads for shape in shapes]  # layers like this one in a block
    sources = [shape.source for shape in shapes]
    count, groups, places = place_layers(model.sliding_windows, sources, room)
    sized = [
        LayerPlace(place.table, place.index, place.first_head * shape.num_kv_heads, width // shape.head_dim)
        for place, shape in zip(places, shapes, strict=True)
    ]
    dim = min(shape.head_dim for shape in shapes)  # with the most scales of int8
    return KVCacheSpec(count, groups, tuple(sized), width // dim, dim, dim, block_size, dtype)


def place_layers(
    windows: Sequence[int], sources: Sequence[int] = (), room: Sequence[int] = ()
) -> tuple[int, tuple[KvGroup, ...], tuple[LayerPlace, ...]]:
    """Return the layers of a page, the groups, and the place of each layer. `windows`: of each layer, 0 if it sees all keys;
    `sources`: the layer with the keys and values that each reads, itself by default. `room`: layers like each that fit in a
    block, one by default; `first_head` is then the number of the layer in its block."""
    sources = sources or range(len(windows))
    owners = sorted(set(sources))
    reaches = {owner: [window for window, source in zip(windows, sources, strict=True) if source == owner] for owner in owners}
    window_of = {owner: 0 if 0 in reach else max(reach) for owner, reach in reaches.items()}
    found = sorted(set(window_of.values()), key=lambda window: (window > 0, -window))
    members = [[owner for owner in owners if window_of[owner] == window] for window in found]
    rooms = [min((room[layer] for layer in each), default=1) if room else 1 for each in members]
    sizes = [-(-len(each) // fit) for each, fit in zip(members, rooms, strict=True)]  # blocks of a group's layers
    count = _layers_per_page(sizes)
    groups = tuple(KvGroup(window, -(-size // count)) for window, size in zip(found, sizes, strict=True))
    places: dict[int, LayerPlace] = {}
    first = 0
    for group, layers, fit in zip(groups, members, rooms, strict=True):
        places |= {
            layer: LayerPlace(first + index // fit // count, index // fit % count, index % fit)
            for index, layer in enumerate(layers)
        }
        first += group.num_tables
    return count, groups, tuple(places[source] for source in sources)


def _layers_per_page(counts: Sequence[int]) -> int:
    """Return the most layers per page with little unused memory: none in the first group, which is the largest part of a long
    sequence. `counts`: layers of each group."""
    return next(
        size
        for size in range(max(counts), 0, -1)
        if counts[0] % size == 0 and all(-count % size <= _MAX_UNUSED_SHARE * count for count in counts)
    )
