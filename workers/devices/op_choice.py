"""The fused ops that a device takes for a model: checked when the rank starts, on the device, before its weights are loaded.
And whole steps, once they are.

Called by `workers/runner.py` with `--ops fused`. `ops/paddle/choice.py` says what is checked of ops; here is with what shapes,
and what is said.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import numpy as np

from engine.checkpoint.kv_cache_spec import KVCacheSpec
from engine.checkpoint.model_config import ModelConfig
from engine.errors import OptionError
from ops.table import OpTable
from workers.devices.device import Device
from workers.models import Model
from workers.step.inputs import StepInputs
from workers.step.kv_cache import map_kv_cache
from workers.step.media_rows import MediaRows
from workers.step.slots import Slots
from workers.weights.declaration import Weights
from workers.weights.rotary import rotary_tables

_LOG = logging.getLogger(__name__)
_NUM_POSITIONS = 512  # that are checked of a rotation
_BLOCK_SIZE, _NUM_SLOTS, _LENGTH = 16, 3, 100  # of the steps that are checked
Sequences = list[tuple[int, int, int]]  # slot, first position, positions


class ChosenOps(msgspec.Struct, frozen=True):
    ops: OpTable
    fallbacks: tuple[tuple[str, str], ...] = ()  # op, and the candidate that was not taken


def choose_ops(ops: OpTable, name: str, config: ModelConfig, weights: Weights, *, allows_variant: bool = False) -> ChosenOps:
    """`ops` with what is right at the device `name`, of what a model declares. OptionError: nothing is, for one of them."""
    from ops.paddle import choice  # imports Paddle, which the device has done by now

    linears = [*weights.linears, *weights.encoder_linears, *weights.patch_linears]
    distinct: dict[Any, choice.Case] = {}
    for linear in linears:
        distinct[linear.num_inputs, linear.width, linear.columns, linear.has_bias] = choice.linear_case(linear)
    for norm in weights.norms:
        distinct[norm.width, norm.epsilon] = choice.norm_case(norm)
    for rope, rotary in weights.rotaries:
        if not rotary.is_by_row:
            distinct[rotary.head_dim, rope] = choice.rotary_case(rotary, *rotary_tables(rope, rotary.head_dim, _NUM_POSITIONS))
    if config.activation == "silu":
        distinct["silu"] = choice.activation_case("silu", config.intermediate_size)
    if ops.drawing is not None:
        distinct["draw"] = choice.draw_case(config.vocab_size)
    try:
        chosen = choice.choose(ops, distinct.values(), allows_variant=allows_variant)
    except choice.NoCandidateError as error:
        raise OptionError(
            f"--ops fused: on {name} an answer would depend on what else is computed with it, or be wrong: {error}; use "
            "--ops reference, or --allow-variant-ops if only other bits in other company are to blame"
        ) from error
    for fallback in chosen.fallbacks:
        _LOG.warning("%s: %s is not taken on %s: %s", fallback.op, fallback.candidate, name, fallback.reason)
    _LOG.info("fused ops on %s: %s", name, ", ".join(f"{op} {candidate}" for op, candidate in chosen.taken.items()))
    return ChosenOps(chosen.ops, tuple((fallback.op, fallback.candidate) for fallback in chosen.fallbacks))


def check_steps(device: Device, model: Model, kv_dtype: str, max_model_len: int, *, allows_variant: bool) -> None:
    """A prompt whole, and in chunks with others beside it: the same bits after the last layer, whatever its ops are, attention
    and experts too. OptionError where they are not. In a cache of its own."""
    config, table = model.config, device.ops
    media = MediaRows(config, None) if config.vision else None
    length = min(_LENGTH, max_model_len)
    first, end, others = length * 3 // 8, length - 2, length // 5
    whole_step: Sequences = [(1, 0, length)]
    cut: list[Sequences] = [[(1, 0, first)], [(0, 0, others), (1, first, end - first), (2, 0, others // 2)]]
    cut += [[(0, others, 1), (1, end, 1), (2, others // 2, 1)], [(1, end + 1, 1)]]
    inputs = StepInputs(device, _NUM_SLOTS, 2 * length, length, _BLOCK_SIZE, table.row_tile, media)
    tables = inputs.host_block_tables[:_NUM_SLOTS]
    tables[:] = np.arange(tables.size, 0, -1).reshape(tables.shape)
    spec = KVCacheSpec.of(config, _BLOCK_SIZE, kv_dtype)
    cache = map_kv_cache(memoryview(bytearray(spec.arena_bytes(tables.size))), spec, tables.size, device)
    slots = Slots(inputs.host_block_tables, length, config.vocab_size)
    slots.token_ids[:, :length] = np.random.default_rng(0).integers(0, config.vocab_size, (len(slots.token_ids), length))

    def hidden_of(steps: list[Sequences]) -> np.ndarray:
        found = []
        for step in steps:
            of_slots, starts, counts = (np.array(column, np.int32) for column in zip(*step, strict=True))
            inputs.set_rows(of_slots, starts, counts, counts, slots.token_ids, slots)
            rows = model.forward(table, inputs, cache).numpy()[: counts.sum()]
            found.append(np.split(rows, np.cumsum(counts)[:-1])[of_slots.tolist().index(1)])
        return np.concatenate(found)

    whole, in_parts = hidden_of([whole_step]), hidden_of(cut)
    if np.array_equal(whole, in_parts):
        return
    rows = np.flatnonzero((whole != in_parts).any(axis=1))
    where = f"{len(rows)} of {len(whole)} rows of a prompt, the first at position {rows[0]},"
    text = f"--ops {table.name}: on {device.capabilities.place} {where} have other bits in chunks beside others"
    if not allows_variant:
        raise OptionError(f"{text}; use --ops reference, or --allow-variant-ops")
    _LOG.warning(text)
