"""The kernels that Paddle has for Kunlun XPUs (KL3), by the names and types of its own list, as far as they relate to our ops.

From paddle/phi/backends/xpu/xpu3_op_list.cc of PaddlePaddle/Paddle at 007a3de384d295bdd9e5dace96a4c0fc2e68ee88, which is older
than the release that is used. Look up an op there before adding it here.
"""

from __future__ import annotations

_FLOATS = "float32 float16 bfloat16"
_ORDERED = f"{_FLOATS} int32 int64"
_ANY = f"{_ORDERED} bool"

_LISTED = {
    "assign": f"{_ANY} float64",
    "cast": f"{_ANY} float64 int8 uint8",
    "clip": "float32 float16 int32 int64",
    "concat": f"{_ANY} float64 uint8 int8 int16",
    "cumsum": _ORDERED,
    "elementwise_add": f"{_ORDERED} float64",
    "elementwise_div": _ORDERED,
    "elementwise_floordiv": _FLOATS,
    "elementwise_mod": "float32 float16 int32 int64",
    "elementwise_mul": _ORDERED,
    "elementwise_sub": _ORDERED,
    "equal": _ANY,
    "exp": _FLOATS,
    "expand_v2": "float32 float16 int32 int64 bool",
    "fill_any_like": f"{_ANY} float64",
    "fill_constant": f"{_ANY} float64 int16 int8 uint8",
    "flatten_contiguous_range": "float32 float16 bfloat16 int32 int64 int8",
    "fused_rotary_position_embedding": _FLOATS,
    "gather": "float32 float16 int32 int64 bool",
    "gelu": "float32 float16",
    "greater_than": _ORDERED,
    "index_select": _ORDERED,
    "less_equal": _ORDERED,
    "less_than": _ORDERED,
    "logical_or": "bool",
    "matmul_v2": _FLOATS,
    "range": "float32 int32 int64",
    "reduce_any": "bool",
    "reduce_max": _ORDERED,
    "reduce_mean": _FLOATS,
    "reduce_min": _FLOATS,
    "reduce_sum": f"{_ORDERED} int8",
    "relu": _FLOATS,
    "reshape2": f"{_ANY} float64",
    "rms_norm": _FLOATS,
    "rsqrt": _FLOATS,
    "scale": _ORDERED,
    "scatter": "float32 int32 int64",
    "sigmoid": "float32 float16",
    "silu": _FLOATS,
    "slice": f"{_ORDERED} float64 uint8 int8 int16",
    "split_with_num": _ORDERED,
    "square": _FLOATS,
    "squeeze2": f"{_ANY} float64 int8 uint8",
    "sum": _FLOATS,
    "swiglu": _FLOATS,
    "take_along_axis": _FLOATS,
    "tanh": "float32 float16",
    "top_k_v2": "float32 float16",
    "transpose2": _ANY,
    "unbind": "float32 bfloat16",
    "unsqueeze2": f"{_ANY} float64 int8 uint8",
    "where": f"{_ORDERED} float64",
}

# Paddle's kernel names (from its op_compat.yaml) where they differ from those of the list.
_NAMES = {
    "add": "elementwise_add",
    "add_n": "sum",
    "any": "reduce_any",
    "arange": "range",
    "assign_out": "assign",
    "divide": "elementwise_div",
    "expand": "expand_v2",
    "flatten": "flatten_contiguous_range",
    "floor_divide": "elementwise_floordiv",
    "full": "fill_constant",
    "full_like": "fill_any_like",
    "fused_rms_norm_quant": "rms_norm",  # as it was called before 3.3
    "matmul": "matmul_v2",
    "max": "reduce_max",
    "mean": "reduce_mean",
    "min": "reduce_min",
    "multiply": "elementwise_mul",
    "remainder": "elementwise_mod",
    "reshape": "reshape2",
    "squeeze": "squeeze2",
    "subtract": "elementwise_sub",
    "sum": "reduce_sum",
    "topk": "top_k_v2",
    "transpose": "transpose2",
    "unsqueeze": "unsqueeze2",
}


def has_kernel(name: str, dtype: str) -> bool:
    """Return whether an op, by its name in Paddle's log, has a kernel; a name that ends with _ works in place."""
    name = name.removesuffix("_")
    return dtype in _LISTED.get(_NAMES.get(name, name), "").split()
