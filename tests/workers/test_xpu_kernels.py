"""Steps on an XPU find a kernel for each of their ops: those that Paddle's own log names, held against its list of kernels.

There it would run what is missing on the CPU, through copies; or, as we set it, fail.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import paddle
import pytest

from ops.paddle.metadata import MAX_DIVIDED, quotient
from tests.ops.xpu_kernels import has_kernel
from tests.paths import REPOSITORY
from tests.workers.serving import ARCHITECTURES

_KERNEL = re.compile(r"\] (\w+) API kernel key: \[\w+, [^,]*, (\w+)\]")
# A prompt in two chunks, and a step that decodes, of each model. Paddle decides when it is loaded what it logs.
_PROGRAM = """
import sys
from workers.devices.blas import configure_blas
configure_blas(1)
from engine.messages import SamplingParams
from tests.paths import GOLDEN
from tests.workers.serving import Sample, Serving, make_runner
from workers.runners.xpu import xpu_runner
sizes = {"max_model_len": 64, "num_kv_blocks": 16, "max_num_seqs": 2, "max_num_batched_tokens": 32}
for case in sys.argv[1:]:
    name, ops = case.split(":")
    serving = Serving(make_runner(GOLDEN / name, kind=xpu_runner, ops=ops, **sizes), chunk=12)
    sample = Sample([5, 9, 3, 7] * 5, SamplingParams(temperature=0.0), 2)
    serving.place(sample, 1)
    print("steps of", case, file=sys.stderr, flush=True)
    serving.run([sample])
    print("steps of none", file=sys.stderr, flush=True)
"""
CASES = [*(f"{name}:reference" for name in ARCHITECTURES), "qwen3:fused"]


def test_steps_of_golden_models() -> None:
    settings = {**os.environ, "GLOG_vmodule": "*api*=6"}
    command = [sys.executable, "-c", _PROGRAM, *CASES]
    ran = subprocess.run(command, cwd=REPOSITORY, env=settings, capture_output=True, timeout=300, check=False)
    logged = ran.stderr.decode(errors="replace")
    assert ran.returncode == 0, logged[-2000:]
    parts = dict(part.split("\n", 1) for part in logged.split("steps of ")[1:] if not part.startswith("none"))
    found = {case: set(_KERNEL.findall(part)) for case, part in parts.items()}
    assert list(found) == CASES
    for case, kernels in found.items():
        assert {("matmul", "float32"), ("gather", "int32"), ("scatter", "int32")} <= kernels, case
        assert sorted(each for each in kernels if not has_kernel(*each)) == [], case
    assert ("swiglu", "float32") in found["qwen3:fused"]
    assert ("topk", "float32") in found["deepseek_v3:reference"]


def test_what_has_no_kernel_there() -> None:
    assert has_kernel("index_select", "bfloat16")
    assert not has_kernel("gather", "bfloat16")
    assert not has_kernel("searchsorted", "int32")
    assert not has_kernel("floor_divide", "int32")


@pytest.mark.parametrize("divisor", [1, 3, 8, 16, 24, 64, 511, 4096])
def test_quotients_without_integer_division(divisor: int) -> None:
    """Whole numbers where float32 rounds worst: around multiples, up to the largest that is divided."""
    multiples = np.arange(0, MAX_DIVIDED, divisor * max(1, MAX_DIVIDED // divisor // 50_000))
    x = np.concatenate([multiples + offset for offset in (-1, 0, 1)]).clip(0, MAX_DIVIDED).astype(np.int32)
    np.testing.assert_array_equal(quotient(paddle.to_tensor(x), divisor).numpy(), x // divisor)
