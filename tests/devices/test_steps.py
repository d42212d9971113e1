"""Steps on a device with memory that the host cannot touch and with asynchronous streams: the CPU place's answers bit for bit,
op by op and captured, with no copy or wait beyond those that a step needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.table import ROW_TILE
from tests.devices.board import Board
from tests.devices.child import Child
from tests.paths import GOLDEN
from tests.workers.mtp import write_walk, write_with_layers
from tests.workers.test_runners import QWEN

pytestmark = pytest.mark.slow
NUM_STEPS = 5


@pytest.fixture(scope="module")
def child(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with Child(plugin, Board(tmp_path_factory.mktemp("board") / "board")) as child:
        yield child


@pytest.fixture(scope="module")
def with_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model with a layer that drafts."""
    path = tmp_path_factory.mktemp("with-layers")
    write_with_layers(path, QWEN)
    return path


@pytest.fixture(autouse=True)
def pauses(child: Child) -> Iterator[None]:
    """Make the streams pause now and then; restore the settings of a test."""
    child.board.set(delay_seed=7, memory_bytes=0, capture_bytes=0, kernel_ns=0)
    yield
    child.board.set(delay_seed=7, memory_bytes=0, capture_bytes=0, kernel_ns=0)


@pytest.mark.parametrize(
    ("model", "method"), [("qwen3", ""), ("qwen3", "ngram"), ("deepseek_v3", "mtp"), ("qwen3_moe", ""), ("ernie4_5", "")]
)
def test_answers_equal_those_of_the_cpu(child: Child, model: str, method: str) -> None:
    expected, _, _ = child.call("answers_of", model, "cpu", method)
    assert child.call("answers_of", model, "eager", method) == (expected, [], [])
    found, failed_sizes, said = child.call("answers_of", model, "captured", method)
    assert found == expected
    assert (failed_sizes, said) == ([], []), "experts too: in a graph the host reads no routing"


def test_draft_tokens_of_captured_layers_are_accepted(child: Child, tmp_path: Path) -> None:
    """The layer predicts the model's next tokens."""
    write_walk(tmp_path, np.random.default_rng(0).permutation(80), is_by_hidden=True)
    expected = child.call("tokens_of_rows", str(tmp_path), "cpu")
    assert max(expected) == 3
    assert child.call("tokens_of_rows", str(tmp_path), "captured") == expected


def test_prompt_steps_are_replayed(child: Child) -> None:
    sizes = {"graph_only_prefill": True, "cudagraph_capture_sizes": (32, 16), "max_cudagraph_capture_size": 32}
    replays = child.board.counts()["replays"]
    expected, _, _ = child.call("answers_of", "qwen3", "cpu")
    assert child.call("answers_of", "qwen3", "captured", **sizes) == (expected, [], [])
    assert child.board.counts()["replays"] > replays + 1 + 2, "beside those that are tried when it starts"


@pytest.mark.parametrize("plan", ["eager", "captured"])
def test_steps_start_before_their_tokens_are_known(child: Child, plan: str) -> None:
    expected, found, num_unknown = child.call("answers_ahead", plan)
    assert found == expected
    assert num_unknown > 10


def test_unread_inputs_are_not_overwritten(child: Child) -> None:
    """Chunks of a prompt that the host sends faster than the device computes them."""
    expected = child.call("answer_of_chunks", "cpu")
    child.board.set(kernel_ns=500_000)
    assert child.call("answer_of_chunks", "eager") == expected


def test_golden_models_agree_with_transformers(child: Child) -> None:
    cases = json.loads((GOLDEN / "qwen3" / "golden.json").read_text())["cases"]
    assert child.call("golden_tokens", "qwen3") == [case["greedy_token_ids"] for case in cases]


@pytest.mark.parametrize(
    ("num_rows", "model", "method"),
    [
        (1, "qwen3", ""),
        (1, "qwen3_moe", "ngram"),
        (32, "qwen3", "ngram"),
        (32, "with layers", "mtp"),
        (32, "qwen3_moe", ""),
        (32, "deepseek_v3", "mtp"),
    ],
)
@pytest.mark.parametrize("plan", ["eager", "captured"])
def test_steady_step_has_one_copy_each_way(
    child: Child, num_rows: int, plan: str, model: str, method: str, with_layers: Path
) -> None:
    """Mixtures of experts too: op by op, the host does not read the routing of so few rows."""
    model = str(with_layers) if model == "with layers" else model
    found = child.call("steady_steps", child.board, num_rows, plan, method, NUM_STEPS, model)
    assert (found["copies_to_device"], found["copies_to_host"], found["event_waits"]) == (NUM_STEPS,) * 3
    assert (found["blocking_copies"], found["stream_waits"], found["device_waits"], found["allocations"]) == (0,) * 4
    # waiting for a result before the next step begins leaves the device idle, except for entries of layers that draft
    assert found["waits_ahead"] == (NUM_STEPS if method == "mtp" else 0)
    num_graphs = 4 if method == "mtp" else 1  # two draft tokens, the model, entries
    assert (found["replays"], found["captures"]) == (NUM_STEPS * num_graphs if plan == "captured" else 0, 0)
    assert found["kernels"] > 100 * NUM_STEPS
    most = num_rows * (3 if method else 1)
    num_lines = 2 if method == "mtp" else 1  # draft tokens with the sampled ones
    assert found["bytes_to_host"] <= NUM_STEPS * num_lines * 4 * (most + ROW_TILE), "tokens, and no logits"


def test_replayed_step_is_cheap_for_the_host(child: Child) -> None:
    """Calls to the device and the host's own, compared with a step op by op (times: `tests/devices/host.py`)."""
    eager, captured = (child.call("steady_steps", child.board, 32, plan, "", NUM_STEPS) for plan in ("eager", "captured"))
    assert captured["launches"] == NUM_STEPS * 3, "a copy each way, and a graph"
    assert eager["launches"] > NUM_STEPS * 100
    assert captured["calls"] <= eager["calls"] / 5


@pytest.mark.parametrize("plan", ["eager", "captured"])
def test_device_has_work_while_the_host_waits(child: Child, plan: str) -> None:
    """The next step is enqueued before the last is waited for."""
    found = child.call("steps_ahead", child.board, 4, plan, NUM_STEPS)
    assert (found["event_waits"], found["waits_ahead"]) == (NUM_STEPS, NUM_STEPS)
    assert (found["blocking_copies"], found["stream_waits"], found["device_waits"], found["allocations"]) == (0,) * 4


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_reloaded_weights_are_captured_again(child: Child, model: str) -> None:
    """While weights are cleared, other processes can have their memory."""
    before = child.board.counts()
    (first, again), ratio = child.call("answers_after_loading_again", model, child.board)
    after = child.board.counts()
    assert first == again
    assert after["captures"] - before["captures"] == 1 + 2 * 3, "one to see whether there are graphs, then three sizes twice"
    assert ratio < 1.5, "what Paddle keeps for later is given back"


def test_slots_can_be_swapped(child: Child) -> None:
    """Two swaps cancel out in every tensor of slots, and the next step serves the sequences in their present slots."""
    for plan in ("eager", "captured"):
        expected, _ = child.call("run_with_swaps", [], plan)

        @settings(max_examples=4, database=None)
        @given(swaps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5))
        def check(plan: str, expected: object, swaps: list[tuple[int, int, int]]) -> None:
            assert child.call("run_with_swaps", swaps, plan) == (expected, True)

        check(plan=plan, expected=expected)


def test_failed_capture_leaves_its_size_eager(child: Child) -> None:
    expected, _, _ = child.call("answers_of", "qwen3", "cpu")
    child.board.set(capture_bytes=1 << 12)
    found, failed_sizes, said = child.call("answers_of", "qwen3", "captured")
    assert found == expected
    assert failed_sizes == [1, 2, 4]
    assert said[0].startswith("steps of 4 rows run op by op, because capturing failed: Place(tokasim:0): ")
    assert "memory" in said[0].lower()


def test_out_of_memory_at_load_is_an_error(child: Child) -> None:
    child.board.set(memory_bytes=1 << 26)
    with pytest.raises(Exception, match=r"(?i)out of memory"):
        child.call("answers_of", "qwen3", "eager", num_kv_blocks=20000)


def test_too_large_cache_is_refused(child: Child) -> None:
    """The number of blocks is an estimate: a step of the most rows is tried once the weights are loaded."""
    options = {"is_cache_estimated": True, "max_num_batched_tokens": 16384}
    expected, _, _ = child.call("answers_of", "qwen3", "eager", is_cache_estimated=True)
    assert (expected, [], []) == child.call("answers_of", "qwen3", "cpu")
    child.board.set(memory_bytes=1 << 26)
    says = r"tokasim:0: a step of 16384 rows does not fit beside the weights and 64 KV blocks: (.|\n)*lower --gpu-memory-util"
    with pytest.raises(Exception, match=says):
        child.call("answers_of", "qwen3", "eager", **options)


def test_missing_kernel_is_named(plugin: Path, tmp_path: Path) -> None:
    """No op runs on the CPU instead."""
    with (
        Child(plugin, Board(tmp_path / "board"), TOKASIM_WITHOUT="silu") as lacking,
        pytest.raises(RuntimeError, match="kernel `silu` is not registered"),
    ):
        lacking.call("answers_of", "qwen3", "eager")
