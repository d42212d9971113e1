"""Times of PyTorch for the work of a case, on the same card: `torch.matmul` (cuBLAS) and scaled dot product attention; and
of models of transformers. Either may be missing: then the cause is told.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from ops.cuda.operands import TYPES
from tools.device.case import Case

ROWS = ("Linear", "Attention")
_BATCHES, _RUNS = 5, 20


class Beside(NamedTuple):
    """Seconds of the other's work, 0 without any, and what it is, or why there is none."""

    seconds: float
    text: str


@functools.cache
def missing() -> str:
    """Return why PyTorch cannot use this card; empty: it can."""
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed"
    return "" if torch.cuda.is_available() else "this PyTorch has no CUDA, or finds no card"


def seconds_of(case: Case) -> Beside:
    if case.row not in ROWS:
        return Beside(0.0, "")
    if cause := missing():
        return Beside(0.0, cause)
    try:
        return _matmul(case) if case.row == "Linear" else _attention(case)
    except (RuntimeError, TypeError) as error:  # of CUDA, of memory, or of an old version
        return Beside(0.0, str(error).splitlines()[0])


def _type(case: Case) -> Any:
    import torch

    return {TYPES[name]: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}[case.values["type"]]


def _matmul(case: Case) -> Beside:
    import torch

    weights = case.values["weights"]
    x = torch.randn(case.values["num_rows"], weights["num_inputs"], device="cuda", dtype=_type(case))
    matrix = torch.randn(weights["num_outputs"], weights["num_inputs"], device="cuda", dtype=_type(case))
    return Beside(_seconds(lambda: torch.matmul(x, matrix.T)), f"torch.matmul {case.dtype}")


def _attention(case: Case) -> Beside:
    import torch

    values, cache = case.values, case.values["cache"]
    length, count, dim = int(values["tile_contexts"].max()), values["num_rows"], cache["key_dim"]
    is_prompt = values["tile_rows"] > 1
    batch, num_queries = (1, count) if is_prompt else (count, 1)
    queries = torch.randn(batch, values["heads"], num_queries, dim, device="cuda", dtype=_type(case))
    keys, others = (torch.randn(batch, cache["kv_heads"], length, dim, device="cuda", dtype=_type(case)) for _ in range(2))

    def run() -> object:
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, others, enable_gqa=True)

    return Beside(_seconds(run), f"SDPA {case.dtype}, without a mask")


def _seconds(run: Callable[[], object]) -> float:
    import torch

    run()
    found: list[float] = []
    for _ in range(_BATCHES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_RUNS):
            run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1000 / _RUNS)
    return median(found)


class Transformers:
    """A model of transformers with random weights in bfloat16, SDPA and a static cache. ImportError if something is missing."""

    text = "transformers, bfloat16, SDPA, static cache"

    def __init__(self, config: dict[str, Any], device: str = "cuda") -> None:
        import torch
        import transformers

        if device == "cuda" and (cause := missing()):
            raise ImportError(cause)
        settings = transformers.AutoConfig.for_model(**config)
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16, attn_implementation="sdpa")
        self._model, self._device = model.to(device).eval(), device

    def step_s(self, num_streams: int, input_len: int, output_len: int) -> float:
        """Return the seconds of a decode step."""
        self._generate(num_streams, input_len, output_len)  # compiles what it compiles
        seconds = self._generate(num_streams, input_len, output_len) - self._generate(num_streams, input_len, 1)
        return seconds / (output_len - 1)

    def prefill_s(self, input_len: int) -> float:
        self._generate(1, input_len, 1)
        return self._generate(1, input_len, 1)

    def _generate(self, num_streams: int, input_len: int, output_len: int) -> float:
        """Return its seconds."""
        import torch

        prompts = torch.full((num_streams, input_len), 5, device=self._device)
        given = {"do_sample": False, "cache_implementation": "static", "eos_token_id": None, "pad_token_id": 0}
        begin = time.perf_counter()
        found = self._model.generate(prompts, max_new_tokens=output_len, min_new_tokens=output_len, **given)
        assert found.cpu().shape == (num_streams, input_len + output_len)  # waits for the card
        return time.perf_counter() - begin
