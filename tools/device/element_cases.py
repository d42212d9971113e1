"""Cases of rows with little arithmetic: lookups, norms, activations, sums and copies."""

from __future__ import annotations

from typing import Any

import numpy as np

from ops.cuda.operands import TYPES
from ops.cuda.packing import in_units
from tools.device.case import Case, drawn_weights, kept, named, random, size, weights_of


def element_cases(is_large: bool) -> list[Case]:
    return [*_lookups(is_large), *_of_rows(is_large), *_of_columns(is_large), *_of_adapters(is_large)]


def _case(row: str, dtype: str, result: str, shape: tuple[int, int], **values: Any) -> Case:
    """Return the case of a row whose compared result is of the row's type."""
    arrays = [value for value in values.values() if isinstance(value, np.ndarray)]
    text = f"{shape[0]} x {shape[1]} {dtype}"
    return Case(row, text, {"type": TYPES[dtype], **values}, named(dtype, result), size(*arrays), dtype=dtype)


def _zeros(dtype: str, *shape: int) -> np.ndarray:
    return kept(np.zeros(shape, np.float32), dtype)


def _ids(count: int, limit: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, limit, count).astype(np.int32)


def _lookups(is_large: bool) -> list[Case]:
    rows, width, vocab = (2048, 4096, 32000) if is_large else (5, 96, 40)
    found = []
    for dtype, kind in (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float32", "int4")):
        inputs = 128 if kind in ("int8", "int4") and not is_large else width
        weights, scales, group = drawn_weights(vocab, inputs, kind)
        table = weights_of(weights, scales, kind, inputs, vocab, group)
        values = {"ids": _ids(rows, vocab), "y": _zeros(dtype, rows, inputs), "weights": table, "num_rows": rows}
        values |= {"same": np.array([[1, 2], [5, 3]], np.int32), "num_same": 2}
        found.append(_case("Embed", dtype, "y", (rows, inputs), **values))
    x, y = kept(random(vocab, width), "bfloat16"), _zeros("bfloat16", rows, width)
    found.append(_case("TakeRows", "bfloat16", "y", (rows, width), x=x, ids=_ids(rows, vocab), y=y, num_rows=rows, width=width))
    features = random(7, 2 * width).view(np.uint8)
    values = {"x": random(rows, width, seed=2), "features": features, "feature_rows": _ids(rows, 8) - 1, "num_features": 7}
    values |= {"row_bytes": 8 * width, "are_bfloat16": False, "first": width, "num_rows": rows, "width": width}
    found.append(_case("TakeFeatures", "float32", "x", (rows, width), **values, are_added=True))
    to, places = np.zeros(4 * rows, np.int32), np.random.default_rng(4).permutation(4 * rows)[:rows].astype(np.int32)
    scatter = {"to": to, "places": places, "values": _ids(rows, 1000), "count": rows}
    found.append(Case("Scatter", f"{rows} values", scatter, lambda outcome: [outcome["to"]], 12 * rows))
    ids, weights_of_rows = _ids(rows * 4, 60).reshape(rows, 4), np.abs(random(rows, 4))
    values = {"ids": ids, "weights": weights_of_rows, "chosen": np.zeros((rows, 1), np.int32)}
    values |= {"ones": np.zeros((rows, 1), np.float32), "factors": np.zeros((rows, 1), np.float32)}
    found.append(_case("Choose", "float32", "factors", (rows, 4), **values, num_rows=rows, num_chosen=4, index=2))
    return found


def _of_rows(is_large: bool) -> list[Case]:
    rows, width = (2048, 4096) if is_large else (5, 300)
    found = []
    for dtype, is_centered in (("float32", True), ("float32", False), ("bfloat16", False)):
        x, other = (kept(random(rows, width, seed=seed), dtype) for seed in (1, 2))
        values: dict[str, Any] = {"x": x, "other": other, "total": _zeros(dtype, rows, width), "y": _zeros(dtype, rows, width)}
        values |= {"weight": random(width, seed=3), "bias": random(width, seed=4) if is_centered else None, "epsilon": 1e-5}
        numbers = {"num_rows": rows, "stride": width, "first": 0, "groups": 1, "width": width, "is_centered": is_centered}
        found.append(_case("Norm", dtype, "y", (rows, width), **values, **numbers))
    for dtype in ("float32", "bfloat16"):
        both, half = kept(random(rows, 2 * width, seed=5), dtype), _zeros(dtype, rows, width)
        gate = {"is_gated": True, "activation": 0, "alpha": 0.0, "limit": 0.0}
        found.append(_case("Activate", dtype, "y", (rows, width), x=both, y=half, num_rows=rows, width=width, **gate))
    x, other, count = random(rows, width, seed=6), random(rows, width, seed=7), rows * width
    y = np.zeros_like(x)
    found.append(_case("ScaleAndAdd", "float32", "y", (rows, width), x=x, other=other, y=y, factor=0.7, count=count))
    factors = random(rows, 1, seed=8)
    sizes = {"num_rows": rows, "width": width}
    found.append(_case("Multiply", "float32", "y", (rows, width), x=x, factors=factors, y=y, num_factors=1, **sizes))
    narrow = kept(x, "bfloat16")
    found.append(
        _case("Convert", "bfloat16", "x", (rows, width), x=_zeros("bfloat16", *x.shape), floats=x, **_convert(count, 0))
    )
    to_floats = _case("Convert", "bfloat16", "x", (rows, width), x=narrow, floats=np.zeros_like(x), **_convert(count, 1))
    found.append(to_floats)
    x, y = random(4 * rows, width, seed=9), np.zeros((rows, width), np.float32)
    found.append(_case("MeanRows", "float32", "y", (rows, width), x=x, y=y, num_rows=rows, group=4, width=width))
    return found


def _convert(count: int, is_to_float: int) -> dict[str, int]:
    return {"count": count, "is_to_float": is_to_float}


def _of_columns(is_large: bool) -> list[Case]:
    rows, width, heads, inputs, outputs = (512, 1024, 16, 128, 512) if is_large else (5, 40, 3, 32, 21)
    x, y = random(rows, width), np.zeros((rows, 2 * width), np.float32)
    sizes = {"num_rows": rows, "width": width, "width_of_y": 2 * width}
    columns = {**sizes, "first": 8, "count": width - 8, "first_of_y": width}
    rules = np.sort(random(4, 2 * width, seed=1), axis=0)
    per_head, results = random(rows, heads * (inputs + 8), seed=2), np.zeros((rows, heads * outputs), np.float32)
    units = np.concatenate([in_units(random(outputs, inputs, seed=3 + head), "float32") for head in range(heads)])
    weights = weights_of(units, None, "float32", inputs, outputs, 32)
    linear = {"x": per_head, "y": results, "weights": weights, "num_rows": rows, "heads": heads, "stride": inputs + 8}
    return [
        _case("CopyColumns", "float32", "y", (rows, width), x=x, y=y, **columns),
        _case("AdjustColumns", "float32", "y", (rows, width), x=x, y=y.copy(), rules=rules, first=width, **sizes),
        _case("HeadLinear", "float32", "y", (rows, outputs), **linear),
    ]


def _of_adapters(is_large: bool) -> list[Case]:
    rows, inputs, outputs, rank = (64, 4096, 4096, 16) if is_large else (5, 40, 21, 6)
    room, panels = -(-rank // 16) * 16, -(-outputs // 16)
    slots = random(3, inputs * room + panels * rank * 16, seed=4)
    values = {"x": random(rows, inputs, seed=5), "y": random(rows, outputs + 8, seed=6), "slots": slots}
    values |= {"slots_of_rows": _ids(rows, 4) - 1, "ranks": np.full((3, 2), rank, np.int32)}
    sizes = {"num_slots": 3, "slot_numbers": slots.shape[1], "num_modules": 2, "num_rows": rows, "num_inputs": inputs}
    sizes |= {"width": outputs + 8, "first": 8, "first_output": 0, "num_outputs": outputs, "index": 1, "first_a": 0}
    sizes |= {"first_b": inputs * room, "index_step": 0, "number_step": 0, "num_chosen": 1, "x_divisor": 1}
    return [_case("Adapt", "float32", "y", (rows, outputs), **values, **sizes, ids=None)]
