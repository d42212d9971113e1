"""Cases of the rows of recurrent layers: sequences that begin, continue after logged rows, and end with drafts."""

from __future__ import annotations

from typing import Any

import numpy as np

from ops.cuda.operands import TYPES
from tools.device.case import Case, Outcome, Values, kept, numbers, random, size

ROWS = ("Convolve", "Recur")
_NUM_LOGGED = 2


def recurrent_cases(is_large: bool) -> list[Case]:
    rows, heads, dim = (512, 32, 128) if is_large else (5, 2, 20)
    found = []
    for dtype in ("float32", "bfloat16"):
        found += [_convolution(dtype, rows, heads * dim), _norm(dtype, rows, heads, dim)]
        found += [_recurrence(dtype, rows, heads, dim, is_delta_rule=each) for each in (True, False)]
    return found


def _states(rows: int, slot_floats: int) -> Values:
    """Return the states of two sequences with so many rows, and of one without."""
    memory = random(6, slot_floats, seed=9) / 8
    memory[0] = 0.0
    sequences = [[1, 10, 2, 3, 12, rows - 1], [0, 0, 4, 0, 0, rows], [0] * 6]
    return {
        "memory": memory.view(np.uint8),
        "offsets": np.array([0, rows, 2 * rows, 2 * rows], np.int32),
        "starts": np.array([11, 0, 0], np.int32),
        "sequences": np.array(sequences, np.int32),
        "slot_bytes": 4 * slot_floats,
        "num_sequences": 3,
    }


def _case(row: str, text: str, dtype: str, num_operations: int = 0, **values: Any) -> Case:
    def compared(outcome: Outcome) -> list[np.ndarray]:
        of_states = [outcome["states.memory"].view(np.float32)] if "states" in values else []
        return [numbers(outcome["y"], dtype), *of_states]

    arrays = [value for value in values.values() if isinstance(value, np.ndarray)]
    return Case(row, f"{text} {dtype}", {"type": TYPES[dtype], **values}, compared, size(*arrays), num_operations, dtype)


def _convolution(dtype: str, rows: int, channels: int) -> Case:
    taps, num_rows = 4, 2 * rows
    x, y = kept(random(num_rows, channels + 1), dtype), kept(np.zeros((num_rows, channels), np.float32), dtype)
    values = {"states": _states(rows, (taps - 1 + _NUM_LOGGED) * channels), "x": x, "y": y}
    values |= {"weight": random(taps, channels, seed=1), "bias": random(channels, seed=2)}
    numbers = {"num_rows": num_rows, "stride": channels + 1, "first": 1, "channels": channels, "taps": taps}
    options = {"is_activated": True, "is_gated": False, "window_at": 0, "log_at": 4 * (taps - 1) * channels}
    operations = 2 * taps * num_rows * channels
    return _case("Convolve", f"{num_rows} x {channels}", dtype, operations, **values, **numbers, **options)


def _recurrence(dtype: str, rows: int, heads: int, dim: int, *, is_delta_rule: bool) -> Case:
    num_rows, width, key_heads = 2 * rows, heads * dim, heads // 2
    log_width, matrix = key_heads * dim + width + heads, heads * dim * dim
    x = kept(random(num_rows, width + 2 * key_heads * dim), dtype)
    inputs = kept(random(num_rows, 2 * heads, seed=1), dtype)
    values = {"states": _states(rows, matrix + _NUM_LOGGED * log_width), "x": x, "decays": inputs}
    values |= {"betas": inputs if is_delta_rule else None, "skips": None if is_delta_rule else random(heads, seed=4)}
    values |= {"rates": -np.exp(random(heads, seed=2)), "biases": random(heads, seed=3)}
    values |= {"y": kept(np.zeros((num_rows, width), np.float32), dtype), "epsilon": 1e-6, "least": 0.0, "most": 9.0}
    sizes = {"heads": heads, "key_heads": key_heads, "key_dim": dim, "value_dim": dim, "num_decays": 1}
    strides = {"num_rows": num_rows, "x_stride": x.shape[1], "decay_stride": 2 * heads}
    strides |= {"beta_stride": 2 * heads if is_delta_rule else 0, "first": 0, "decay_first": 0, "beta_first": heads}
    places = {"matrix_at": 0, "log_at": 4 * matrix, "log_width": log_width}
    text = f"{'delta rule' if is_delta_rule else 'state space'}, {num_rows} rows, {heads} x {dim} x {dim}"
    return _case("Recur", text, dtype, 8 * num_rows * matrix, **values, **sizes, **strides, **places)


def _norm(dtype: str, rows: int, heads: int, dim: int) -> Case:
    width = heads * dim
    x, gate = (kept(random(rows, width, seed=seed), dtype) for seed in (5, 6))
    values: Values = {"x": x, "gate": gate, "y": np.zeros_like(x), "weight": random(dim, seed=7), "epsilon": 1e-6}
    sizes: Values = {"num_rows": rows, "width": width, "group": dim, "weight_width": dim, "gate_stride": width, "gate_first": 0}
    return _case("GateAndNorm", f"{rows} x {width}", dtype, **values, **sizes, is_gated_first=False, is_sigmoid=False)
