"""Tokens with the largest logits."""

from __future__ import annotations

import math

import paddle

from ops.paddle.metadata import keep_drawn
from ops.paddle.reference.chunks import expand
from ops.table import StepInputs


def draw_largest(inputs: StepInputs, logits: paddle.Tensor) -> paddle.Tensor:
    """Run `DeviceSampler.run` at temperature 0."""
    tokens = largest(logits)
    if inputs.is_made_on_device:
        keep_drawn(inputs, tokens)
    return tokens.reshape([1, -1])


def largest(logits: paddle.Tensor) -> paddle.Tensor:
    """[m, vocab] -> int32 [m]: the first NaN if there is any, like the native sampler, otherwise the first of the largest."""
    width = logits.shape[1]
    is_number = logits == logits
    numbers = paddle.where(is_number, logits, paddle.full_like(logits, -math.inf))
    is_largest = numbers == expand(paddle.max(numbers, axis=-1, keepdim=True), logits.shape)
    from_last = _from_last(logits.shape)
    ranked = paddle.where(is_number, paddle.where(is_largest, from_last, paddle.zeros_like(from_last)), from_last + width)
    return ((width - 1) - paddle.max(ranked, axis=-1, keepdim=True) % width).flatten()


def _from_last(shape: list[int]) -> paddle.Tensor:
    """Return int32 [R, n]: n - 1, n - 2, ..., 0 in each row."""
    return expand((shape[1] - 1) - paddle.arange(shape[1], dtype="int32"), shape)


def largest_of(values: paddle.Tensor, count: int) -> paddle.Tensor:
    """Return int32 [R, count]: indices of the largest of [R, n], the largest first; ties go to the first."""
    last, from_last = values.shape[1] - 1, _from_last(values.shape)
    found = []
    for _ in range(count):
        is_largest = values == expand(paddle.max(values, axis=-1, keepdim=True), values.shape)
        first = paddle.max(paddle.where(is_largest, from_last, paddle.zeros_like(from_last)), axis=-1, keepdim=True)
        values = paddle.where(from_last == first, paddle.full_like(values, -math.inf), values)
        found.append(last - first)
    return paddle.concat(found, axis=1)
