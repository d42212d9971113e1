"""`tokamak bench step`: rows add up, the bound of an op follows from its work, and the options are those of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from ops import _cpu
from ops.cpu.choice import TIMED
from ops.cpu.executors import OpProfile
from ops.cpu.work import Work
from tests.paths import GOLDEN
from tests.workers.checkpoints import TINY, write_checkpoint
from tools.bench.replays import TimedOp
from tools.bench.roofline import Peak, Roofline
from tools.bench.step import main, rows

ROOFLINE = Roofline(1e9, {"float32": Peak("float32 FMA", "avx2", 1e11)})


@pytest.fixture(autouse=True)
def selected() -> Iterator[None]:
    """Restore this process's kernels, which a profile changes."""
    before = _cpu.variant()
    yield
    _cpu.select(before)


def op(kind: str, name: str, seconds: float, num_bytes: int = 0, num_operations: int = 0) -> TimedOp:
    return TimedOp(OpProfile(kind, name, Work(num_bytes, num_operations)), seconds)


def test_ops_of_all_layers_are_one_row() -> None:
    layers = [op("linear", f"model.layers.{i}.self_attn.q_proj+model.layers.{i}.self_attn.k_proj", 0.5, 4, 6) for i in range(3)]
    (row,) = rows(layers, ROOFLINE)
    assert (row.op, row.num_calls, row.seconds, row.work) == ("linear q+k", 3, 1.5, Work(12, 18))


def test_bound_of_an_op() -> None:
    found = rows(
        [
            op("attention", "", 1.0, num_bytes=900_000_000, num_operations=10),
            op("linear", "a.down_proj", 0.5, num_bytes=10, num_operations=40_000_000_000),
            op("map_slots", "", 0.001, num_bytes=10),
        ],
        ROOFLINE,
    )
    assert [(row.op, row.bound) for row in found] == [
        ("attention", "memory"),
        ("linear down", "compute"),
        ("map_slots", "latency"),
    ]
    assert [round(row.roofline_share, 2) for row in found[:2]] == [0.9, 0.8]


@pytest.mark.slow
def test_a_profile_of_every_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, TINY)
    options = ["--model", str(tmp_path), "--batch", "1,70", "--context", "20", "--tokens", "33", "--repeat", "2"]
    assert main([*options, "--on-paper", "4,64", "--no-weight-cache", "--json"]) == 0
    found = orjson.loads(capsys.readouterr().out)
    assert found["settings"]["model"] == str(tmp_path)
    assert found["roofline"]["bytes_per_s"] > 0
    assert all(rate > 0 for rate in found["roofline"]["operations_per_s"].values())
    peak = found["roofline"]["operations_per_s"]
    assert peak["bfloat16"] >= peak["float32"], "kernels for bfloat16 can widen it"
    assert found["kernels"]["chosen"]["float32"] in _cpu.candidates()
    for part, rates in found["kernels"]["operations_per_s"].items():
        assert part in TIMED
        assert set(rates) <= set(_cpu.candidates())
        assert all(rate > 0 for each in rates.values() for rate in each)
    cases = [(case["phase"], case["batch"], case["num_tokens"], case["context"]) for case in found["cases"]]
    decode = [("decode", batch, 1, context) for context in (20,) for batch in (1, 70)]
    assert cases == [*decode, ("prefill", 1, 33, 33)]
    for case in found["cases"]:
        ops = {op["op"]: op for op in case["ops"]}
        assert {"linear q+k+v", "linear o", "linear gate+up", "linear down", "linear lm_head", "attention"} <= set(ops)
        assert ops["linear q+k+v"]["calls"] == 2
        assert ops["linear lm_head"]["operations"] == 2 * case["batch"] * 16 * 40  # logits of one row a sample
        down_rows = case["batch"] * case["num_tokens"] + case["batch"]  # in the last of two layers one row a sample
        assert ops["linear down"]["operations"] == 2 * down_rows * 24 * 16
        assert case["step_s"] >= case["sample_s"]
        assert [paper["threads"] for paper in case["on_paper"]] == [4, 64]
        for paper in case["on_paper"]:
            assert {op["op"] for op in paper["ops"]} == set(ops)
            assert paper["replay_s"] > 0
            assert all(0 < op["work_share"] <= 1 for op in paper["ops"])


@pytest.mark.slow
def test_a_profile_of_the_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", str(GOLDEN / "qwen2_5_vl"), "--phase", "encode", "--image-size", "112x84,60x56", "--repeat", "1"]
    assert main([*options, "--no-weight-cache", "--json"]) == 0
    cases = orjson.loads(capsys.readouterr().out)["cases"]
    assert [(case["phase"], case["num_tokens"]) for case in cases] == [("encode", 6 * 8), ("encode", 4 * 4)]
    for case in cases:
        ops = {op["op"]: op for op in case["ops"]}
        assert ops["linear qkv"]["operations"] == 4 * 2 * case["num_tokens"] * 64 * 3 * 64  # of four layers
        assert case["patches_per_s"] == case["num_tokens"] / case["step_s"]
    seen = 48 * 48, 16 * 16  # every patch sees all: windows are of 8 x 8 patches
    assert [op["operations"] for case in cases for op in case["ops"] if op["op"] == "attention"] == [
        4 * 4 * 64 * n for n in seen
    ]


@pytest.mark.slow
def test_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, TINY)
    options = ["--model", str(tmp_path), "--no-weight-cache", "--phase", "decode", "--batch", "2", "--repeat", "1"]
    assert main([*options, "--context", "30", "--on-paper", "8"]) == 0
    shown = capsys.readouterr().out
    assert "decode, batch 2, context 30" in shown
    assert "decode, batch 2, context 30, on paper" in shown
    assert "barriers" in shown
    assert "GB/s from memory, float32 FMA " in shown
    if len([name for name in _cpu.candidates() if name != "portable"]) > 1:
        assert shown.count("chosen") == 2  # for float32 linears, and for attention
    assert "linear gate+up" in shown
    assert "tokens/s" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plan", "eager"], "--plan does not apply: only tapes of native ops can be profiled"),
        (["--context", "100000"], "a context of 100000 tokens plus one new token exceeds the limit of the model"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--phase", "encode"], "needs a vision encoder"),
    ],
)
def test_unmeasurable_options_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_steps_with_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of a token and its drafts are verified: each has logits, and is compared with the step of the same sequences
    alone."""
    write_checkpoint(tmp_path, TINY)
    options = ["--model", str(tmp_path), "--no-weight-cache", "--phase", "decode", "--batch", "3", "--context", "30,40"]
    options += [
        "--drafts",
        "2",
        "--acceptance",
        "0.5,1",
        "--repeat",
        "60",
        "--json",
    ]  # an adaptive policy would draft less
    assert main(options) == 0
    found = orjson.loads(capsys.readouterr().out)
    assert [(case["num_tokens"], case["num_drafts"], case["context"]) for case in found["cases"]] == [
        (1, 0, 30), (3, 2, 32), (1, 0, 40), (3, 2, 42),
    ]  # fmt: skip
    heads = [op["operations"] for case in found["cases"] for op in case["ops"] if op["op"] == "linear lm_head"]
    assert heads == [2 * rows * 16 * 40 for rows in (3, 9, 3, 9)]
    downs = [op["operations"] for case in found["cases"] for op in case["ops"] if op["op"] == "linear down"]
    assert downs == [2 * 2 * rows * 24 * 16 for rows in (3, 9, 3, 9)]  # in both layers
    assert [(each["context"], each["num_drafts"]) for each in found["drafts"]] == [(30, 0), (30, 2), (40, 0), (40, 2)]
    for plain, drafted in (found["drafts"][:2], found["drafts"][2:]):
        assert plain["cost"] == plain["allowed"]["1.0"] == 1
        assert drafted["cost"] == drafted["step_s"] / plain["step_s"]
        assert drafted["allowed"]["0.5"] == pytest.approx(1.75 / drafted["cost"])
        assert drafted["allowed"]["1.0"] == pytest.approx(3 / drafted["cost"])
