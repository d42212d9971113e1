"""Linears over integers in numpy: the same integers, in the same blocks, summed in float64."""

from __future__ import annotations

import numpy as np

from ops.weight_format import DOUBLED_E2M1, QuantizedWeight, WeightFormat

MAX_BLOCK = 128  # inputs of a row that share an activation scale, where the weight has no scales of smaller groups

MULTIPLIERS = np.array([*range(-15, 0), *range(1, 17)], np.int8)


def random_weight(num_outputs: int, num_inputs: int, format: WeightFormat, seed: int = 1) -> QuantizedWeight:
    """Return all integers that the format has, with scales of both signs."""
    generator = np.random.default_rng(seed)
    groups = -(-num_inputs // (format.group_size or num_inputs))
    low, high, dtype = (-128, 128, np.int8) if format.kind == "int8" else (0, 16, np.uint8)
    values = generator.integers(low, high, (num_outputs, num_inputs)).astype(dtype)
    scales = generator.standard_normal((num_outputs, 1 if format.is_folded else groups)).astype(np.float32)
    offsets = generator.standard_normal((num_outputs, groups)).astype(np.float32) if format.has_offsets else None
    scales, offsets = (None if part is None else as_scales(part, format) for part in (scales, offsets))
    assert scales is not None
    multipliers = generator.choice(MULTIPLIERS, (num_outputs, groups)) if format.is_folded else None
    return QuantizedWeight(format, values, scales, offsets, multipliers)


def as_scales(numbers: np.ndarray, format: WeightFormat) -> np.ndarray:
    """Return float32 numbers that the format's scales can be."""
    if format.scales == "float16":
        return numbers.astype(np.float16).astype(np.float32)
    cut = 16 if format.scales == "bfloat16" else 0
    found: np.ndarray = (numbers.view(np.uint32) >> cut << cut).view(np.float32)
    return found


def block_of(format: WeightFormat) -> int:
    """Return the number of inputs of a row that share a scale."""
    return MAX_BLOCK if format.is_folded else min(format.group_size or MAX_BLOCK, MAX_BLOCK)


def quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of one block as integers and scales [rows]: rounded to nearest even, by 127 / max |x|; below 1e-30 everything
    is zero."""
    largest = np.abs(x).max(1)
    is_zero = largest < 1e-30
    inverse = np.float32(127) / np.where(is_zero, np.float32(1), largest)
    integers = np.rint(x * inverse[:, None]) * ~is_zero[:, None]
    return integers.astype(np.int64), np.where(is_zero, np.float32(0), largest / np.float32(127))


def linear(x: np.ndarray, weight: QuantizedWeight, bias: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return y, float64 [rows, out], and the sum of the magnitudes of its terms, by which rounding errors are measured."""
    num_inputs = x.shape[1]
    group_size = weight.format.group_size or num_inputs
    block = block_of(weight.format)
    integers = weight.values.astype(np.int64)
    if weight.format.kind == "float4":
        integers = DOUBLED_E2M1[integers].astype(np.int64)
    if weight.format.kind == "int4" and weight.offsets is None:
        integers -= 8
    if weight.multipliers is not None:
        integers *= weight.multipliers[:, np.arange(num_inputs) // group_size]
        group_size = num_inputs
    y = np.zeros((len(x), len(integers)))
    magnitude = np.zeros_like(y)
    for begin in range(0, num_inputs, block):
        group = begin // group_size
        q, scales = quantized(x[:, begin : begin + block])
        products = (q @ integers[:, begin : begin + block].T) * scales[:, None].astype(float)
        terms = [products * weight.scales[:, group].astype(float)]
        if weight.offsets is not None:
            terms.append(-weight.offsets[:, group].astype(float) * (q.sum(1) * scales.astype(float))[:, None])
        y += sum(terms)
        magnitude += sum(np.abs(term) for term in terms)
    if bias is not None:
        y += bias
        magnitude += np.abs(bias)
    return y, magnitude
