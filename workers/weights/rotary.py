"""Rotary position embedding tables: per position and rotated element, a cosine and a signed sine. Pure numpy.

Used by the loader, and for the rows of a step if positions are three numbers. Rope types, with the same numbers as in
transformers:

- default: Su et al. 2021, "RoFormer".
- linear: frequencies divided by `factor` (Chen et al. 2023, "Position Interpolation").
- dynamic: NTK-aware scaling with a base that grows with the length beyond `max_position_embeddings`. Implementations that take
  the base from the longest sequence of the batch give a token other keys when its neighbours change. Here position p always
  has the base of a sequence of p + 1 tokens: equal to token-by-token generation, and independent of chunks and recomputation.
- yarn: Peng et al. 2023, "YaRN": high frequencies kept, low ones interpolated, a ramp between, and attention scaled.
- llama3: the wavelength bands of Llama 3.1.
- proportional: Gemma 4: only the first pairs are rotated, with frequencies of the whole head, divided by `factor`.
- longrope: Ding et al. 2024, "LongRoPE": a divisor for each frequency, from one of two lists. Implementations that choose the
  list by the length of the moment give a token other keys once its sequence has grown; here the engine's context limit
  (`num_positions`) chooses it once.

GGUF files store the result of the latter as one factor per frequency, which combines with any type.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from engine.checkpoint.rope_config import RopeConfig

_VECTOR = 16  # numbers of the widest vector


def rotary_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return cosines and signed sines, float32 [num_positions, head_dim], and partners, int32 [head_dim]: the rotated x is `x *
    cosines + x[partners] * sines`. Angles are rounded to float32 like in the published code of the models."""
    if rope.rope_type == "longrope":
        is_long = num_positions > rope.original_max_position_embeddings
        rope = msgspec.structs.replace(rope, frequency_factors=rope.long_factors if is_long else rope.short_factors)
    partners = np.arange(head_dim, dtype=np.int32)
    if not rope.rotary_dim:
        cosines, sines = (np.broadcast_to(np.float32(value), (num_positions, head_dim)) for value in (1, 0))
        return cosines, sines, partners
    first, second = _pairs(rope)
    partners[first], partners[second] = second, first
    return *rotary_angles(rope, head_dim, np.arange(num_positions)[:, None]), partners


def rotary_angles(rope: RopeConfig, head_dim: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and signed sines, float32 [n, head_dim], of positions [n, 1], or [n, rotary_dim / 2] if pairs have
    separate positions. The bits of a row depend only on that row: rows are padded to whole vectors, because scalar code for a
    remainder may round differently."""
    count = len(positions)
    positions = np.pad(positions, ((0, -count % _VECTOR), (0, 0)))
    angles = (positions.astype(np.float32) * _frequencies(rope, positions)).astype(np.float64)
    first, second = _pairs(rope)
    cosines, sines = np.ones((count, head_dim)), np.zeros((count, head_dim))
    cosines[:, first] = cosines[:, second] = np.cos(angles)[:count] * attention_scale(rope)
    sines[:, second] = np.sin(angles)[:count] * attention_scale(rope)
    sines[:, first] = -sines[:, second]
    return cosines.astype(np.float32), sines.astype(np.float32)


def query_factors(rope: RopeConfig, num_positions: int) -> np.ndarray | None:
    """Return the factor of queries at each position, float32 [num_positions, 1]; None: they stay."""
    scaling = rope.query_scaling
    if scaling is None:
        return None
    intervals = np.floor((np.arange(num_positions)[:, None] + scaling.first) / scaling.interval)
    return (1 + scaling.beta * np.log1p(intervals)).astype(np.float32)


def _pairs(rope: RopeConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the second element of each pair."""
    half = rope.rotary_dim // 2
    first = np.arange(half) * 2 if rope.is_interleaved else np.arange(half)
    return first, first + (1 if rope.is_interleaved else half)


def attention_scale(rope: RopeConfig) -> float:
    """Return the factor of cosines and sines; not 1 only with yarn and longrope."""
    if rope.rope_type == "longrope":
        if rope.attention_factor:
            return rope.attention_factor
        growth = math.log(rope.factor) / math.log(rope.original_max_position_embeddings)
        return math.sqrt(1 + growth) if rope.factor > 1 else 1.0
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    return _yarn_mscale(rope.factor, 1.0)


def score_scale(rope: RopeConfig) -> float:
    """Return DeepSeek's factor of attention scores in addition to head_dim^-0.5, for any type of scaling."""
    return 1.0 if rope.rope_type == "default" else _yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _frequencies(rope: RopeConfig, positions: np.ndarray) -> np.ndarray:
    """Return frequencies: float32 [rotary_dim / 2], or [n, rotary_dim / 2] if they depend on the position."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    plain = 1.0 / rope.theta**exponents
    if rope.rope_type == "linear":
        plain = plain / rope.factor
    elif rope.rope_type == "dynamic":
        plain = _dynamic(rope, exponents, positions)
    elif rope.rope_type == "yarn":
        plain = _yarn(rope, plain)
    elif rope.rope_type == "llama3":
        plain = _llama3(rope, plain)
    elif rope.rope_type == "proportional":
        plain = np.where(np.arange(len(plain)) < rope.num_rotated_pairs, plain / rope.factor, 0.0)
    if rope.frequency_factors:
        plain = plain / np.array(rope.frequency_factors)
    return plain.astype(np.float32)


def _dynamic(rope: RopeConfig, exponents: np.ndarray, positions: np.ndarray) -> np.ndarray:
    lengths = np.maximum(positions + 1.0, rope.max_position_embeddings)
    growth = rope.factor * lengths / rope.max_position_embeddings - (rope.factor - 1)
    theta = rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2))
    frequencies: np.ndarray = 1.0 / theta**exponents
    return frequencies


def _yarn(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    def dimension_of(num_rotations: float) -> float:
        """Return the pair with this many rotations within the original length."""
        wavelength = rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    interpolated_share = np.clip((np.arange(rope.rotary_dim // 2) - low) / (high - low), 0, 1)
    frequencies: np.ndarray = plain / rope.factor * interpolated_share + plain * (1 - interpolated_share)
    return frequencies


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    length, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / plain
    if low == high:  # Llama 4 Scout
        return np.where(wavelengths > length / low, plain / rope.factor, plain)
    smooth = (length / wavelengths - low) / (high - low)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    long_or_between = np.where(wavelengths > length / low, plain / rope.factor, between)
    return np.where(wavelengths < length / high, plain, long_or_between)
