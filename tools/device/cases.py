"""Checks and timings of each CUDA row: operands in numpy, the compared part of the outcome, bytes, arithmetic.

`cases(is_large)`: few rows and small matrices, fast enough for the emulation, or those of models of 8 billion parameters. Bytes
are those that must be read or written once; a multiply-add is two operations.
"""

from __future__ import annotations

import itertools

import msgspec
import numpy as np

from ops.cuda.operands import TYPE_BYTES, TYPES
from ops.cuda.packing import in_units, num_parts
from tools.device.case import Case, Outcome, Values, drawn_weights, kept, named, random, size, weights_of
from tools.device.draft_cases import draft_cases
from tools.device.element_cases import element_cases
from tools.device.recurrent_cases import recurrent_cases

WITHOUT_CASES = {"Peak", "Gather", "ShareRows", "ReturnResults"}  # one only measures, others need several cards
_ATTENTION_BAR = 0.7  # share of copy bandwidth, with one row that reads 16,384 keys


def cases(*, is_large: bool) -> list[Case]:
    models = [*_linears(is_large), *_attention(is_large), *expert_cases(is_large), *_of_steps(is_large)]
    return [*models, *draft_cases(is_large), *recurrent_cases(is_large), *element_cases(is_large)]


# ------------------------------------------------------------------------------------------------------------- linears


def _cache_of(keys: np.ndarray, values: np.ndarray, kind: str, block_size: int, kv_heads: int, *dims: int) -> Values:
    lines, scale_bytes = block_size * kv_heads, 4 if kind == "int8" else 0
    return {
        "keys": keys,
        "values": values,
        "type": TYPES[kind],
        "block_size": block_size,
        "kv_heads": kv_heads,
        "key_dim": dims[0],
        "value_dim": dims[1],
        "key_bytes": lines * (dims[0] * TYPE_BYTES[kind] + scale_bytes),
        "value_bytes": lines * (dims[1] * TYPE_BYTES[kind] + scale_bytes),
    }


def _linears(is_large: bool) -> list[Case]:
    inputs, outputs, many = (4096, 14336, 2048) if is_large else (128, 40, 70)
    found = []
    for dtype, kind in (
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float32", "int8"),
        ("bfloat16", "int8"),
        ("bfloat16", "int4"),
    ):
        found += [_linear(dtype, kind, rows, inputs, outputs) for rows in (1, 16, many)]
    outputs = 1024 if is_large else 40  # so few that blocks share a tile
    return [*found, *(_linear("bfloat16", kind, 16, 4096, outputs) for kind in ("bfloat16", "int4"))]


def _linear(dtype: str, kind: str, rows: int, inputs: int, outputs: int) -> Case:
    weights, scales, group = drawn_weights(outputs, inputs, kind)
    x, y = kept(random(rows, inputs), dtype), np.zeros((rows, outputs), kept(np.zeros(1, np.float32), dtype).dtype)
    parts = num_parts(inputs, outputs)
    is_shared = parts > 8
    values = {
        "type": TYPES[dtype],
        "x": x,
        "y": y,
        "floats": None,
        "weights": weights_of(weights, scales, kind, inputs, outputs, group, parts),
        "bias": None,
        "parts": np.zeros((parts * 16, outputs), np.float32) if is_shared else None,
        "arrivals": np.zeros(outputs // 32 + 1, np.int32) if is_shared else None,
        "num_rows": rows,
    }
    text = f"{rows} x {inputs} x {outputs} {dtype}, weights {kind}"
    work = size(x, y, weights, scales), 2 * rows * inputs * outputs
    return Case("Linear", text, values, named(dtype, "y"), *work, dtype)


# ----------------------------------------------------------------------------------------------------------- attention


def _attention(is_large: bool) -> list[Case]:
    heads, kv_heads, dim = (32, 8, 128) if is_large else (6, 2, 24)
    found = []
    for dtype, kv_dtype in (("float32", "float32"), ("bfloat16", "bfloat16")):
        for count, length, tile_rows in (
            ((1, 16384, 1), (32, 2048, 1), (512, 2048, 16)) if is_large else ((2, 1100, 1), (16, 200, 16))
        ):
            case = _attend(dtype, kv_dtype, count, length, tile_rows, (heads, kv_heads, dim), is_prompt=tile_rows > 1)
            is_longest = length in (16384, 1100)
            found.append(msgspec.structs.replace(case, bandwidth_bar=_ATTENTION_BAR if is_longest else 0.0))
    return found


def _attend(
    dtype: str, kv_dtype: str, rows: int, length: int, tile_rows: int, shape: tuple[int, int, int], *, is_prompt: bool
) -> Case:
    """Return a case of rows that each decode in a sequence of `length` positions, or of the last rows of one prompt."""
    heads, kv_heads, dim = shape
    block_size, num_slots = 16, 1 if is_prompt else rows
    blocks = -(-length // block_size)
    table = (np.arange(num_slots * blocks, dtype=np.int32) + 1).reshape(num_slots, blocks)
    numbers = (num_slots * blocks + 1) * block_size * kv_heads * dim
    keys, kept_values = (kept(random(numbers, seed=seed) / 4, kv_dtype).view(np.uint8) for seed in (1, 2))
    tiles = rows // tile_rows
    positions = (length - rows if is_prompt else length - 1) + np.arange(rows, dtype=np.int32) * is_prompt
    queries = kept(random(rows, heads * dim, seed=3), dtype)
    parts = -(-length // 512)
    output, scratch = np.zeros_like(queries), None if is_prompt else np.zeros((rows, heads, parts, dim + 2), np.float32)
    tile_firsts = np.arange(tiles) * tile_rows
    values = {
        "type": TYPES[dtype],
        "queries": queries,
        "output": output,
        "cache": _cache_of(keys, kept_values, kv_dtype, block_size, kv_heads, dim, dim),
        "block_tables": table,
        "tile_slots": np.zeros(tiles, np.int32) if is_prompt else np.arange(tiles, dtype=np.int32),
        "tile_contexts": (positions[tile_firsts + tile_rows - 1] + 1).astype(np.int32),
        "tile_row_ids": np.arange(rows, dtype=np.int32),
        "row_queries": np.arange(rows, dtype=np.int32),
        "positions": positions.astype(np.int32),
        "first_keys": None,
        "last_keys": None,
        "parts": scratch,
        "sinks": None,
        "scale": dim**-0.5,
        "softcap": 0.0,
        "num_rows": rows,
        "num_tiles": tiles,
        "tile_rows": tile_rows,
        "num_parts": parts,
        "blocks_per_slot": blocks,
        "heads": heads,
        "kv_heads": kv_heads,
        "first_kv": 0,
        "window": 0,
        "has_chunks": False,
        "is_two_sided": False,
        "is_latent": False,
    }
    num_keys = int((positions + 1).sum())
    work = size(queries, output, keys, kept_values), 4 * num_keys * heads * dim
    text = (
        f"{rows} {'of a prompt' if is_prompt else 'that decode'}, {length} keys {kv_dtype}, {heads} / {kv_heads} heads {dtype}"
    )
    return Case("Attention", text, values, named(dtype, "output"), *work, dtype)


# ------------------------------------------------------------------------------------------------------------- experts


def expert_cases(is_large: bool, rows: int = 0) -> list[Case]:
    """Return cases of experts; `rows`: 0: those of its size."""
    own_rows, experts, chosen, hidden, inner = (64, 128, 8, 2048, 768) if is_large else (9, 12, 3, 64, 40)
    rows = rows or own_rows
    logits, ids = random(rows, experts), np.zeros((rows, chosen), np.int32)
    weights = np.zeros((rows, chosen), np.float32)
    route = {
        "logits": logits,
        "correction": None,
        "scales": None,
        "expert_sets": None,
        "num_tokens": None,
        "ids": ids,
        "weights": weights,
        "added_to_sum": 0.0,
        "smallest_sum": 0.0,
        "factor": 1.0,
        "num_rows": rows,
        "num_experts": experts,
        "num_chosen": chosen,
        "num_groups": 1,
        "num_chosen_groups": 1,
        "num_best": 2,
        "has_sigmoid": False,
        "is_normalized": True,
        "set": 0,
    }
    found = [Case("Route", f"{rows} rows, {chosen} of {experts}", route, lambda o: [o["ids"], o["weights"]], size(logits))]
    generator = np.random.default_rng(4)
    chosen_ids = np.stack([generator.permutation(experts)[:chosen] for _ in range(rows)]).astype(np.int32)
    num_choices = rows * chosen
    max_tiles = num_choices // 16 + experts
    lists = _dispatched(chosen_ids, experts, max_tiles)
    sizes = {"num_choices": num_choices, "num_experts": experts, "max_tiles": max_tiles}
    empty = {name: np.full_like(array, -1) for name, array in lists.items()}
    found.append(Case("Dispatch", f"{num_choices} choices", {"ids": chosen_ids, **empty, **sizes}, _of_lists, size(chosen_ids)))
    x = random(rows, hidden, seed=5)
    y = np.zeros((num_choices, inner), np.float32)
    matrices = np.resize(random(inner * hidden, seed=6), (experts * inner, hidden))
    linear = {
        "type": TYPES["float32"],
        "x": x,
        "y": y,
        **lists,
        "weights": weights_of(in_units(matrices, "float32"), None, "float32", hidden, inner, 32),
        "bias": random(experts, inner, seed=9),
        "max_tiles": max_tiles,
        "x_divisor": chosen,
    }
    num_read = len(np.unique(chosen_ids)) * inner * hidden * 4 + size(x, y)
    text = f"{num_choices} choices x {hidden} x {inner} float32"
    found.append(Case("ExpertLinear", text, linear, named("float32", "y"), num_read, 2 * num_choices * hidden * inner))
    results, sums = random(rows, chosen, hidden, seed=7), np.zeros((rows, hidden), np.float32)
    combine = {
        "type": TYPES["float32"],
        "results": results,
        "shared": None,
        "y": sums,
        "ids": chosen_ids,
        "weights": np.abs(random(rows, chosen, seed=8)),
        "num_rows": rows,
        "num_chosen": chosen,
        "width": hidden,
    }
    found.append(Case("Combine", f"{rows} rows of {chosen} x {hidden}", combine, named("float32", "y"), size(results, sums)))
    return found


def _dispatched(ids: np.ndarray, experts: int, max_tiles: int) -> dict[str, np.ndarray]:
    flat = ids.reshape(-1)
    counts = np.bincount(flat, minlength=experts)
    offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
    tiles = -(-counts // 16)
    owners = np.repeat(np.arange(experts), tiles)
    firsts = offsets[owners] + 16 * (np.arange(len(owners)) - np.repeat(np.cumsum(tiles) - tiles, tiles))
    tile_experts, tile_firsts = np.full(max_tiles, -1, np.int32), np.zeros(max_tiles, np.int32)
    tile_experts[: len(owners)], tile_firsts[: len(owners)] = owners, firsts
    choices = np.argsort(flat, kind="stable").astype(np.int32)
    return {"offsets": offsets, "choices": choices, "tile_experts": tile_experts, "tile_firsts": tile_firsts}


def _of_lists(outcome: Outcome) -> list[np.ndarray]:
    """Choices of an expert may be in any order, and tiles without any have no first one."""
    offsets, used = outcome["offsets"], outcome["tile_experts"] >= 0
    choices = [np.sort(outcome["choices"][begin:end]) for begin, end in itertools.pairwise(offsets)]
    return [offsets, np.concatenate(choices), outcome["tile_experts"], outcome["tile_firsts"][used]]


# ----------------------------------------------------------------------------------------------- other parts of a step


def _of_steps(is_large: bool) -> list[Case]:
    rows, heads, kv_heads, dim, vocab = (512, 32, 8, 128, 151936) if is_large else (5, 4, 2, 24, 300)
    block_size, blocks = 16, 64
    positions = np.arange(rows, dtype=np.int32) % (blocks * block_size)
    table = np.arange(1, 2 * blocks + 1, dtype=np.int32).reshape(2, blocks)
    row_slots = np.zeros(rows, np.int32)
    mapping = (table[0][positions // block_size] * block_size + positions % block_size).astype(np.int32)
    begin = {
        "block_tables": table,
        "positions": positions,
        "row_slots": row_slots,
        "slot_mapping": np.zeros(rows, np.int32),
        "num_rows": rows,
        "blocks_per_slot": blocks,
        "block_size": block_size,
    }
    found = [Case("Begin", f"{rows} rows", begin, lambda o: [o["slot_mapping"]], 4 * size(positions))]
    numbers = (2 * blocks + 1) * block_size * kv_heads * dim
    keys, kept_values = np.zeros(4 * numbers, np.uint8), np.zeros(4 * numbers, np.uint8)
    angles = np.outer(np.arange(blocks * block_size), np.linspace(1, 0.01, dim))
    angle_values = {
        "angle_rows": positions,
        "cosines": np.cos(angles).astype(np.float32),
        "sines": np.sin(angles).astype(np.float32),
        "partners": (np.arange(dim, dtype=np.int32) + dim // 2) % dim,
    }
    qkv, queries = random(rows, (heads + 2 * kv_heads) * dim), np.zeros((rows, heads * dim), np.float32)
    rotate = {
        "type": TYPES["float32"],
        "qkv": qkv,
        "queries": queries,
        "cache": _cache_of(keys, kept_values, "float32", block_size, kv_heads, dim, dim),
        "slot_mapping": mapping,
        **angle_values,
        "norm_weight": random(3, dim, seed=3),
        "epsilon": 1e-6,
        "is_normalized_after": False,
        "has_values": False,
        "num_rows": rows,
        "heads": heads,
        "kv_heads": kv_heads,
        "first_kv": 0,
    }
    text = f"{rows} rows, {heads} / {kv_heads} heads of {dim} float32"
    of_cache = named("float32", "queries", "cache.keys", "cache.values")
    found.append(Case("RotateAndStore", text, rotate, of_cache, 2 * size(qkv)))
    plain, rotary, latent = (128, dim, 512) if is_large else (10, dim, 40)
    both, compressed = random(rows, heads * (plain + rotary)), random(rows, latent + rotary, seed=2)
    slots = (2 * blocks + 1) * block_size
    latents = _cache_of(
        np.zeros(4 * slots * rotary, np.uint8), np.zeros(4 * slots * latent, np.uint8), "float32", block_size, 1, rotary, latent
    )
    store = {
        "type": TYPES["float32"],
        "queries": both,
        "compressed": compressed,
        "rotated": np.zeros_like(both),
        "cache": latents,
        "slot_mapping": mapping,
        **angle_values,
        "norm_weight": random(latent, seed=3),
        "epsilon": 1e-6,
        "num_rows": rows,
        "heads": heads,
        "plain_dim": plain,
    }
    of_latents = named("float32", "rotated", "cache.keys", "cache.values")
    found.append(Case("StoreLatent", f"{rows} rows, latents of {latent}", store, of_latents, 2 * size(both, compressed)))
    return [*found, *_metadata(is_large), sample_case(32 if is_large else 4, vocab)]


def _metadata(is_large: bool) -> list[Case]:
    """Return cases of step metadata, in which each slot decodes one position."""
    slots, positions, blocks, block_size = (256, 16384, 1024, 16) if is_large else (5, 64, 4, 16)
    max_rows, max_written = slots, 3 * slots
    max_tiles = max_rows
    sent = np.zeros(1 + 5 * slots + 2 * max_written, np.int32)
    columns = sent[1 : 1 + 5 * slots].reshape(5, slots)
    columns[0], columns[1], columns[2], columns[3] = np.arange(slots), positions // 2, 1, 1
    tables = (slots + 1) * positions
    memory = np.zeros((slots + 1) * (positions + blocks + 1 + 10), np.int32)
    memory[:tables] = np.arange(tables) % 1000
    memory[tables : tables + slots * blocks] = 1 + np.arange(slots * blocks)
    of_sequences = 2 * max_rows + 4 * slots + 1 + max_tiles * (2 + 16)
    derived = np.zeros(2 * of_sequences + 4 * max_rows, np.int32)
    values = {
        "sent": sent,
        "slots": memory,
        "derived": derived,
        "num_slots": slots,
        "num_positions": positions,
        "num_blocks": blocks,
        "max_rows": max_rows,
        "max_tiles": max_tiles,
        "block_size": block_size,
        "num_rows": slots,
        "tile_rows": 1,
        "num_kept": slots,
        "kept_tile_rows": 1,
    }
    return [Case("Derive", f"{slots} rows that decode", values, lambda o: [o["derived"]], size(derived))]


def sample_case(rows: int, vocab: int) -> Case:
    """Return a case of sampling; every second row has no temperature."""
    logits = random(rows, vocab) * 3
    positions, blocks = 64, 4
    memory = np.zeros((rows + 1) * (positions + blocks + 1 + 10), np.int32)
    settings = memory[(rows + 1) * (positions + blocks + 1) :].reshape(rows + 1, 10)
    for row in range(rows):
        settings[row, :8] = (
            np.array([row + 5, 0]).astype(np.uint32).view(np.int32).tolist()
            + np.array([0.9 * (row % 2), 0.9, 0.0], np.float64).view(np.int32).tolist()
        )
    flags = np.zeros(1 + 5 * rows, np.int32)
    values = {
        "logits": logits,
        "logit_row_ids": np.arange(rows, dtype=np.int32),
        "row_ids": np.arange(rows, dtype=np.int32),
        "row_slots": np.arange(rows, dtype=np.int32),
        "positions": np.full(rows, 7, np.int32),
        "sequence_offsets": np.arange(rows + 1, dtype=np.int32),
        "sequence_slots": np.arange(rows, dtype=np.int32),
        "context_lengths": np.full(rows, 8, np.int32),
        "sent": flags,
        "slots": memory,
        "drawn": np.zeros((3, rows), np.int32),
        "num_rows": rows,
        "vocab": vocab,
        "num_slots": rows,
        "num_positions": positions,
        "num_blocks": blocks,
    }

    def compared(outcome: Outcome) -> list[np.ndarray]:
        drawn = outcome["drawn"]
        return [drawn[0], drawn[1].view(np.float32), drawn[2]]

    return Case("Sample", f"{rows} rows of {vocab} logits", values, compared, size(logits))
