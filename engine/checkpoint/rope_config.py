"""Rotary position embedding in config.json. Part of `ModelConfig`; the tables are made by `workers/weights/rotary.py`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from engine.checkpoint.families.family import Family, QueryScaling
from engine.checkpoint.json_fields import JsonOptions
from engine.checkpoint.mrope import pair_axes

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]

_ROPE_TYPES: dict[str, RopeType] = {name: name for name in get_args(RopeType)}


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary position embedding: which frequencies, and which elements of a head make a pair.

    `rotary_dim` elements at the start of each head are rotated. Pairs are (i, i + rotary_dim / 2), or (2i, 2i + 1) if
    `is_interleaved`. `max_position_embeddings` is the length that "dynamic" starts to stretch at. "longrope" divides
    frequencies by `long_factors` in engines that serve contexts beyond `original_max_position_embeddings`, else by
    `short_factors`. "proportional" rotates the first `num_rotated_pairs`, with frequencies of the whole head.
    """

    rope_type: RopeType
    theta: float
    rotary_dim: int
    is_interleaved: bool
    max_position_embeddings: int
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 0.0  # yarn, longrope; 0: from factor (and the mscales)
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn
    frequency_factors: tuple[float, ...] = ()  # divisors of the frequencies (GGUF files)
    short_factors: tuple[float, ...] = ()  # longrope
    long_factors: tuple[float, ...] = ()  # longrope
    num_rotated_pairs: int = 0  # proportional
    mrope_layout: str = ""  # a key of `mrope.LAYOUTS`; empty: positions are numbers, not (time, height, width)
    mrope_sections: tuple[int, ...] = ()  # pairs of each axis, in the order of the layout
    query_scaling: QueryScaling | None = None

    def pair_axes(self) -> tuple[int, ...]:
        """Return the position axis of each of the rotary_dim / 2 pairs: 0 time, 1 height, 2 width. Empty if positions are plain
        numbers."""
        return pair_axes(self.mrope_layout, self.mrope_sections)


class Ropes(msgspec.Struct, frozen=True):
    """`other` is for `other_layers`, `rope` for the rest."""

    rope: RopeConfig
    other: RopeConfig | None = None
    other_layers: tuple[int, ...] = ()


def read_ropes(
    options: JsonOptions, family: Family, head_dims: Sequence[int], max_positions: int, sliding_windows: Sequence[int]
) -> Ropes:
    """Read the rope parameters. Keys of `rope_parameters` (or the older `rope_scaling`) take precedence over those beside it,
    as in transformers. `head_dims`, `sliding_windows`: of each layer."""
    if not family.is_rotated(options):
        for name in ("rope_parameters", "rope_scaling", "rope_theta"):  # mean nothing
            options.values.get(name)
        return Ropes(_no_rope(family.rope_theta, max_positions))
    is_new = bool(options.values.get("rope_parameters"))
    rope_options = options.within("rope_parameters" if is_new else "rope_scaling")
    if not rope_options.values:
        rope_options = JsonOptions(family.default_rope, options.path)
    local_options = JsonOptions({}, options.path)
    if family.local_rope_theta and is_new:
        if not {"full_attention", "sliding_attention"} & set(rope_options.values):
            raise options.error("rope_parameters", "should have one entry each for 'full_attention' and 'sliding_attention'")
        rope_options.text("rope_type", "")  # transformers adds it beside the entries, where it means nothing
        rope_options, local_options = (rope_options.within(kind) for kind in ("full_attention", "sliding_attention"))
    sliding = tuple(index for index, window in enumerate(sliding_windows) if window)
    whole = next((dim for dim, window in zip(head_dims, sliding_windows, strict=True) if not window), head_dims[0])
    rope = _rope(options, rope_options, family, whole, max_positions)
    unrotated = family.unrotated_layers(options, len(sliding_windows))
    if unrotated:
        scaling = family.query_scaling(options, rope_options, is_rotated=False)
        return Ropes(rope, _no_rope(rope.theta, max_positions, scaling), unrotated)
    if not family.local_rope_theta:
        return Ropes(rope)
    theta = options.number("rope_local_base_freq", family.local_rope_theta, above=0)
    if local_options.values.get("rope_theta") is None:
        local_options = local_options.replaced({"rope_theta": theta})
    local = _rope(options, local_options, family, head_dims[sliding[0]] if sliding else whole, max_positions)
    return Ropes(rope, local, sliding) if sliding else Ropes(rope)


def _no_rope(theta: float, max_positions: int, scaling: QueryScaling | None = None) -> RopeConfig:
    return RopeConfig("default", theta, 0, False, max_positions, query_scaling=scaling)


def _rope(options: JsonOptions, rope: JsonOptions, family: Family, head_dim: int, max_positions: int) -> RopeConfig:
    kind = rope.text("rope_type", rope.text("type", "default"))
    kind = family.other_rope_types.get(kind, kind)
    if kind == "mrope" and family.mrope_layout:
        kind = "default"  # older files' name for positions of three numbers
    supported = [name for name in _ROPE_TYPES if name != "proportional" or family.has_proportional_rope]
    if kind not in supported:
        raise rope.error("rope_type", f"{kind!r} is not supported; expected one of {', '.join(supported)}")
    share = rope.number("partial_rotary_factor", family.rotary_share(options), above=0, most=1)
    rotary_dim, rotated = int(head_dim * share), 0
    if kind == "proportional":
        rotary_dim, rotated = head_dim, rotary_dim // 2
    is_gguf = "frequency_factors" in rope.values  # llama.cpp rotates the part that the file says, in any family
    is_ignored = kind == "default" and not family.has_partial_rotary and not is_gguf  # as in transformers
    if head_dim % 2 and (rotary_dim == head_dim or is_ignored):
        raise options.error("head_dim", f"{head_dim} is odd; rotary embeddings need pairs")
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise rope.error(
            "partial_rotary_factor",
            f"{share} of head_dim {head_dim} gives {rotary_dim} rotated elements, expected an even number",
        )
    if is_ignored:
        rotary_dim = head_dim
    original = rope.count("original_max_position_embeddings", max_positions)
    original = options.count("original_max_position_embeddings", 0) or original
    if kind in ("yarn", "longrope"):
        default_factor: float | None = max_positions / original
    else:
        default_factor = 1.0 if kind in ("default", "proportional") else None
    theta = rope.number("rope_theta", options.number("rope_theta", family.rope_theta), above=1 if kind == "yarn" else 0)
    alpha = rope.number("alpha", 0.0, least=0) if family.has_rope_alpha else 0.0
    if kind == "dynamic" and alpha:
        kind = "default"
        theta = _scaled_base(rope, theta, alpha, head_dim)
    low_freq_factor = rope.number("low_freq_factor", None if kind == "llama3" else 1.0, above=0)
    return RopeConfig(
        rope_type=_ROPE_TYPES[kind],
        theta=theta,
        rotary_dim=rotary_dim,
        is_interleaved=family.is_interleaved(options),
        max_position_embeddings=max_positions,
        factor=rope.number("factor", default_factor, above=0),
        original_max_position_embeddings=original,
        low_freq_factor=low_freq_factor,
        high_freq_factor=rope.number(
            "high_freq_factor", None if kind == "llama3" else 4.0, least=low_freq_factor if kind == "llama3" else None
        ),
        beta_fast=rope.number("beta_fast", 32.0, least=0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0, least=0) or 1.0,
        attention_factor=rope.number("attention_factor", 0.0),
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        truncate=rope.flag("truncate", True),
        frequency_factors=_factors(rope, "frequency_factors", rotary_dim),
        short_factors=_factors(rope, "short_factor", rotary_dim, is_needed=kind == "longrope"),
        long_factors=_factors(rope, "long_factor", rotary_dim, is_needed=kind == "longrope"),
        num_rotated_pairs=rotated,
        mrope_layout=family.mrope_layout,
        mrope_sections=_mrope_sections(options, rope, family, rotary_dim // 2),
        query_scaling=family.query_scaling(options, rope, is_rotated=True),
    )


def _scaled_base(rope: JsonOptions, theta: float, alpha: float, head_dim: int) -> float:
    """Return the base of rotations in a context that is `alpha` times as long (NTK-aware scaling)."""
    if head_dim <= 2:
        raise rope.error("alpha", f"{alpha} needs a head_dim above 2, not {head_dim}")
    scale = math.log(theta) + math.log(alpha) * head_dim / (head_dim - 2)
    if scale > math.log(sys.float_info.max):
        raise rope.error("alpha", f"{alpha} with rope_theta {theta:g} exceeds the range of numbers")
    return float(theta * alpha ** (head_dim / (head_dim - 2)))


def _mrope_sections(text: JsonOptions, rope: JsonOptions, family: Family, num_pairs: int) -> tuple[int, ...]:
    if not family.mrope_layout:
        return ()
    sections = family.mrope_sections(text, rope, num_pairs)
    try:
        pair_axes(family.mrope_layout, sections, num_pairs)
    except ValueError as error:
        raise rope.error("mrope_section", str(error)) from error
    is_interleaved = rope.flag("mrope_interleaved", family.mrope_layout == "interleaved")
    if is_interleaved != (family.mrope_layout == "interleaved"):
        raise rope.error(
            "mrope_interleaved", f"{is_interleaved} is not supported for {family.name}; expected {not is_interleaved}"
        )
    return sections


def _factors(rope: JsonOptions, name: str, rotary_dim: int, *, is_needed: bool = False) -> tuple[float, ...]:
    """Read divisors of the frequencies."""
    factors = rope.numbers(name)
    if (factors or is_needed) and (len(factors) != rotary_dim // 2 or min(factors) <= 0):
        raise rope.error(name, f"should be {rotary_dim // 2} positive numbers, one per rotary pair")
    return factors
