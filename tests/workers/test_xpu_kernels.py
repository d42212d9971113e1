"""Steps on an XPU find a kernel for each of their ops: the ops in Paddle's own log, compared with its list of kernels. A
missing one would run on the CPU with copies, or fail with our setting.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import paddle
import pytest

from ops.paddle.metadata import quotient
from ops.step_layout import MAX_DIVIDED
from tests.ops.xpu_kernels import has_kernel
from tests.paths import REPOSITORY
from tests.workers.seeing import ARCHITECTURES as SEEING
from tests.workers.serving import ARCHITECTURES

_KERNEL = re.compile(r"\] (\w+) API kernel key: \[\w+, [^,]*, (\w+)\]")
# A prompt in two chunks, and steps that decode, of each model; with drafts, as graphs, of pictures, and of what is pooled.
# Paddle decides when it is loaded what it logs.
_PROGRAM = """
import sys, tempfile
from pathlib import Path
from workers.devices.blas import configure_blas
configure_blas(1)
from engine.checkpoint.record import ModelRecord
from engine.messages import SamplingParams
from engine.options.resolve_pooling import resolve_pooling
from tests.paths import GOLDEN
from tests.pooled import write_checkpoint
from tests.workers.encoders.serving import Units
from tests.workers.mtp import drafting
from tests.workers.seeing import make_seeing_runner, picture_sequences
from tests.workers.serving import ServedSequence, Serving, encoder_of, make_runner
from tests.workers.test_pooling import ASKED, pooled
from tests.workers.test_runners import NGRAM, WithGraphs, captured
from workers.extensions.media.encoder import Encoder
from workers.runners import xpu_runner

SIZES = {"max_model_len": 64, "num_kv_blocks": 16, "max_num_seqs": 2, "max_num_batched_tokens": 32}
TEXT = {
    "reference": {"ops": "reference"},
    "fused": {"ops": "fused"},
    "captured": {"ops": "reference", "kind": WithGraphs, **captured(1)},
    "ngram": {"ops": "reference", "speculative_config": NGRAM},
    "mtp": {"ops": "reference", "speculative_config": drafting(2)},
}
for case in sys.argv[1:]:
    name, how = case.split(":")
    said = []
    if how == "pooled":
        path = write_checkpoint(name, Path(tempfile.mkdtemp()) / "model")
        pooling, record = resolve_pooling(ASKED, ModelRecord.read(path))
        options = {"ops": "reference", "plan": "eager", "pooling": pooling, "num_kv_blocks": 64, "max_model_len": 32}
        runner = make_runner(path, model=record.config, kind=xpu_runner, **options)
        run = lambda: pooled(runner, [{"token_ids": [5, 9, 3, 7] * 4}])
    elif how in ("sees", "encodes"):
        options = {"ops": "reference", "plan": "eager", "max_model_len": 256, "num_kv_blocks": 32, "max_num_seqs": 3}
        runner, arena = make_seeing_runner(GOLDEN / name, kind=xpu_runner, **options)
        if how == "encodes":
            tower = encoder_of(runner)._tower
            units = Units(tower, [(1, 8, 4)])
            encoder = Encoder(tower, runner.device, units.arena, 7, "eager")
            run = lambda: encoder.run(units.call(), units.pixels)
        else:
            sequence = picture_sequences(name, arena)[0]
            sequence.num_outputs = 2
            serving = Serving(runner)
            serving.place(sequence, 1)
            run = lambda: serving.run([sequence])
    else:
        serving = Serving(make_runner(GOLDEN / name, **{"kind": xpu_runner, **SIZES, **TEXT[how]}), chunk=12)
        sequence = ServedSequence([5, 9, 3, 7] * 5, SamplingParams(temperature=0.0), 2 if how in ("reference", "fused") else 4)
        serving.place(sequence, 1)
        run = lambda: serving.run([sequence])
    print("steps of", case, file=sys.stderr, flush=True)
    run()
    print("steps of none", file=sys.stderr, flush=True)
"""
CASES = [
    *(f"{name}:reference" for name in ARCHITECTURES),
    *(f"{name}:{how}" for name in SEEING for how in ("sees", "encodes")),
    *(f"{name}:fused" for name in ("qwen3", "qwen3_moe", "deepseek_v3")),
    *("qwen3_moe:captured", "qwen3:ngram", "deepseek_v3:mtp"),
    *(f"{name}:pooled" for name in ("qwen3 classifier", "bert classifier", "xlm-roberta first, normalized")),
]


@pytest.mark.slow
def test_golden_models_use_only_existing_kernels() -> None:
    settings = {**os.environ, "GLOG_vmodule": "*api*=6"}
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, *CASES]
    ran = subprocess.run(command, cwd=REPOSITORY, env=settings, capture_output=True, timeout=300, check=False)
    logged = ran.stderr.decode(errors="replace")
    assert ran.returncode == 0, logged[-2000:]
    parts = dict(part.split("\n", 1) for part in logged.split("steps of ")[1:] if not part.startswith("none"))
    found = {case: set(_KERNEL.findall(part)) for case, part in parts.items()}
    assert list(found) == CASES
    for case, kernels in found.items():
        own = (
            {("matmul", "float32")}
            if case.endswith(":encodes")
            else {("matmul", "float32"), ("gather", "int32"), ("scatter", "int32")}
        )
        assert own <= kernels, case
        assert sorted(each for each in kernels if not has_kernel(*each)) == [], case
    assert ("swiglu", "float32") in found["qwen3:fused"]
    assert ("topk", "float32") in found["deepseek_v3:reference"]
    assert ("tanh", "float32") in found["bert classifier:pooled"]


def test_missing_kernels_are_known() -> None:
    assert has_kernel("index_select", "bfloat16")
    assert not has_kernel("gather", "bfloat16")
    assert not has_kernel("searchsorted", "int32")
    assert not has_kernel("floor_divide", "int32")


@pytest.mark.parametrize("divisor", [1, 3, 8, 16, 24, 64, 511, 4096])
def test_float_quotients_equal_integer_division(divisor: int) -> None:
    """Integers where float32 rounds worst: around multiples, up to the largest dividend."""
    multiples = np.arange(0, MAX_DIVIDED, divisor * max(1, MAX_DIVIDED // divisor // 50_000))
    x = np.concatenate([multiples + offset for offset in (-1, 0, 1)]).clip(0, MAX_DIVIDED).astype(np.int32)
    np.testing.assert_array_equal(quotient(paddle.to_tensor(x), divisor).numpy(), x // divisor)
