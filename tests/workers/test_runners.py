"""Runners of devices, on Paddle's CPU place: the CPU runner's answers bit for bit, one step ahead, and captured or not. Instead
of a card's graphs, a test device has ones that run their work again.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import SpeculativeConfig
from engine.grammars.formats import HEAD
from engine.grammars.tokens import GrammarTokens
from engine.messages import Grammar, SamplingParams, StepResult
from tests.paths import GOLDEN, REPOSITORY
from tests.workers.deepseek import CONFIG as DEEPSEEK
from tests.workers.mtp import drafting, write_walk, write_with_layers
from tests.workers.serving import ServedSequence, Serving, ServingAhead, layers_of, make_runner, swap_slots
from tests.workers.test_mixtures import COMMON
from workers.assembly import DeviceParts, RunnerParts, build_runner
from workers.devices.capabilities import DeviceError
from workers.devices.enqueued import Graph
from workers.devices.paddle import PaddleDevice
from workers.engine.captures import Phase
from workers.engine.device_inputs import DeviceInputs
from workers.engine.graph_plan import GraphPlan
from workers.engine.plan import make_plan
from workers.engine.runner import ModelRunner
from workers.extensions.drafts.device_draft_plan import DeviceDraftPlan
from workers.extensions.grammars import limits
from workers.runners import Ahead, Runner, cpu_runner, gpu_runner, xpu_runner

SIZES = {"max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 4, "ops": "reference"}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=2, adaptive=False)
NONE = SpeculativeConfig()
QWEN = {**COMMON, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}


class Again:
    """A graph that repeats its work without the host's values at capture."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self._run()


class GraphDevice(PaddleDevice):
    def capture(self, run: Callable[[], object], group: int = 0) -> Graph:  # type: ignore[override]
        run()
        return Again(run)


class WithGraphs:
    """Runner of a device, on one with graphs."""

    def __init__(self, parts: RunnerParts) -> None:
        self.core = build_runner(parts, DeviceParts(GraphDevice("cpu"), DeviceInputs, make_plan))


def captured(unit: int) -> dict[str, Any]:
    sizes = tuple(unit * count for count in (4, 2, 1))
    return {"plan": "captured", "cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": sizes[0]}


def sequences() -> list[ServedSequence]:
    """Return sequences of several lengths: one sampled with a seed, one that repeats itself, one with a scored prompt."""
    words = [5, 9, 3, 30, 22, 8, 17] * 5
    return [
        ServedSequence(words[:3], SamplingParams(temperature=0.0, num_logprobs=2), 9),
        ServedSequence(words[:16], SamplingParams(temperature=0.8, seed=4), 7),
        ServedSequence(words[2:30], SamplingParams(temperature=0.0, num_prompt_logprobs=1), 5),
    ]


def answers(runner: ModelRunner, *others: ServedSequence) -> list[tuple[object, ...]]:
    """Return the outcome of the sequences, beside `others`."""
    serving, batch = Serving(runner, chunk=16), [*sequences(), *others]
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    for sequence in batch:
        serving.step([sequence])
    serving.run(batch)
    return [sequence.answer() for sequence in batch]


def core_of(kind: Callable[..., Runner], name: str = "qwen3", **options: Any) -> ModelRunner:
    return make_runner(GOLDEN / name, kind=kind, **{**SIZES, **options})


@pytest.mark.parametrize(("name", "config"), [("qwen3", NONE), ("qwen3", NGRAM), ("deepseek_v3", NONE)])
def test_eager_and_captured_equal_the_cpu(name: str, config: SpeculativeConfig) -> None:
    options = {"speculative_config": config}
    expected = answers(core_of(cpu_runner, name, **options))
    assert answers(core_of(xpu_runner, name, **options)) == expected
    runner = core_of(WithGraphs, name, **options, **captured(1 + config.max_drafts))
    plan = runner.weights.plan
    assert isinstance(plan, GraphPlan)
    before = {size: found.graph.num_replays for size, found in plan.captured.items()}  # type: ignore[attr-defined]
    assert list(before) == list(runner.config.cudagraph_capture_sizes), "the largest first, when weights are loaded"
    assert answers(runner) == expected
    after = {size: found.graph.num_replays for size, found in plan.captured.items()}  # type: ignore[attr-defined]
    num_replayed = sum(after[size] > before[size] for size in before)
    assert runner.ran is not None
    assert {size for size, is_captured in runner.ran if is_captured} == {size for size in before if after[size] > before[size]}
    traffic = runner.device.traffic
    assert traffic.num_to_device >= traffic.num_to_host >= len(runner.ran)
    assert num_replayed >= (1 if config.max_drafts else len(before)), "how many rows there are with drafts depends on these"


@pytest.mark.slow
@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_with_layers(path, QWEN, 2),
        lambda path: write_with_layers(path, {**DEEPSEEK, "rms_norm_eps": 1e-6}),
        lambda path: write_walk(path, np.random.default_rng(0).permutation(80), is_by_hidden=True),
    ],
    ids=["two in turn", "latents", "accepted drafts"],
)
def test_mtp_layers_are_replayed_with_the_model(write: Callable[[Path], object], tmp_path: Path) -> None:
    """Each draft token of a row (0, 1), and entries (-1)."""
    write(tmp_path)
    options = {**SIZES, "speculative_config": drafting(2)}
    expected = answers(make_runner(tmp_path, kind=cpu_runner, **options))
    runner = make_runner(tmp_path, kind=WithGraphs, **{**options, **captured(3)})
    layers = layers_of(runner)
    plan = layers._device_plan  # type: ignore[attr-defined]
    assert isinstance(plan, DeviceDraftPlan)

    def replays() -> dict[tuple[int, int], int]:
        return {key: found.graph.num_replays for key, found in plan._captured.items()}  # type: ignore[union-attr,attr-defined]

    before = replays()
    assert set(before) == {(-1, size) for size in (12, 6, 3)} | {(number, size) for number in (0, 1) for size in (4, 3, 2, 1)}
    assert answers(runner) == expected
    after = replays()
    assert len(after) == len(before)
    assert {of for of, size in after if after[of, size] > before[of, size]} == {-1, 0, 1}
    assert layers.num_uncaptured == 0
    plan._modules[0].norm.weight = plan._modules[0].norm.weight + 0.0  # type: ignore[attr-defined]
    with pytest.raises(
        DeviceError, match=r"captured for \d rows of draft layers read moved memory: weights\.\w+(\.\w+)*\.weight at 0x"
    ):
        answers(runner)


class Recording(Serving):
    """Serving that records the token ids of slots after each step, including rejected draft tokens."""

    def __init__(self, runner: ModelRunner, **options: Any) -> None:
        super().__init__(runner, **options)
        self.found: list[list[list[int]]] = []

    def step(self, sequences: list[ServedSequence]) -> StepResult:
        result = super().step(sequences)
        self.found.append(self.runner.slots.token_ids.tolist())
        return result


def draft_tokens_of_all_kinds(
    path: Path, kind: Callable[..., Runner], method: str, **options: Any
) -> tuple[object, object, int]:
    """Return answers of rows that the device samples and that the host samples, one of them with a format, in chunks, with a
    cached prefix and in swapped slots; with all draft tokens, and the most tokens that a row brought."""
    drafts = drafting(2, method=method)
    runner = make_runner(path, kind=kind, **{**SIZES, "run_dir": str(path), "speculative_config": drafts, **options})
    serving = Recording(runner, chunk=5)
    grammar = Grammar(HEAD + "start: /[^~]*/", b"")
    ways = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.6, seed=3, num_logprobs=1),
        SamplingParams(temperature=0.0, frequency_penalty=0.1),
        SamplingParams(temperature=0.0, grammar=grammar, stop_token_ids=[79]),
    )
    batch = [ServedSequence([5, 9, 3, 30 + slot, 7, 11, 2] * 3, way, 9 + 4 * slot) for slot, way in enumerate(ways)]
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    serving.run(batch[:1])  # the device draws for it alone
    serving.run(batch[1:])
    again = ServedSequence(batch[1].tokens[:24], SamplingParams(temperature=0.0), 12)
    serving.place(again, 0, batch[1].block_ids[:1])
    while len(again.outputs) < 2:
        serving.step([again])
    swap_slots(runner.slots, 0, 2)
    for slot in (0, 2):
        runner.inputs.start(runner.slots, slot)
    again.slot = 2
    serving.run([again])
    return [sequence.answer() for sequence in (*batch, again)], serving.found, max(serving.num_tokens_of_rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "method", "most"),
    [
        (lambda path: write_walk(path, np.random.default_rng(0).permutation(80), is_by_hidden=True), "ngram,mtp", 3),
        (lambda path: write_with_layers(path, {**QWEN, "vocab_size": 80}, 2), "mtp", 1),
    ],
    ids=["accepted drafts", "two in turn"],
)
def test_device_and_host_draft_the_same_tokens(
    write: Callable[[Path], object], method: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step, wherever rows are sampled, and whichever needs a draft token first."""
    for name in ("FAST_NS", "STEP_NS", "SLOW_NS", "BURST_NS"):  # drafts and masks are not cut because the machine is busy
        monkeypatch.setattr(limits, name, 60_000_000_000)
    write(tmp_path)
    pieces = [bytes([33 + index]) for index in range(79)] + [b"<end>"]
    GrammarTokens.of(pieces, [79], [], [79], 80).write(tmp_path / "vocabulary")
    expected = draft_tokens_of_all_kinds(tmp_path, cpu_runner, method)
    assert expected[2] >= most
    assert draft_tokens_of_all_kinds(tmp_path, xpu_runner, method) == expected
    assert draft_tokens_of_all_kinds(tmp_path, WithGraphs, method, **captured(3)) == expected


PROMPTS: dict[str, Any] = {
    "plan": "captured",
    "graph_only_prefill": True,
    "cudagraph_capture_sizes": (40, 16, 5),
    "max_cudagraph_capture_size": 40,
}


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_prompt_steps_are_replayed(name: str) -> None:
    """Chunks of one prompt and of several, with sampled last tokens; prompts with bounds on their keys run op by op."""

    def of(runner: ModelRunner) -> list[tuple[object, ...]]:
        bounds = np.stack([np.zeros(20), np.maximum(np.arange(20), 9)], 1).astype(np.int32)
        return answers(
            runner, ServedSequence([7, 8, 9, 4] * 5, SamplingParams(temperature=0.0), 4, mask_bounds=bounds.tobytes())
        )

    runner = core_of(WithGraphs, name, **PROMPTS)
    plan = runner.weights.plan
    assert isinstance(plan, GraphPlan)
    before = {size: found.graph.num_replays for size, found in plan.captured.items()}  # type: ignore[attr-defined]
    assert list(before) == [40, 16, 5]
    assert of(runner) == of(core_of(cpu_runner, name))
    after = {size: found.graph.num_replays for size, found in plan.captured.items()}  # type: ignore[attr-defined]
    assert sum(after[size] > before[size] for size in before) > 1


def test_inputs_live_as_long_as_the_runner() -> None:
    """Inputs neither move nor are remade when weights sleep, wake or are loaded again."""
    runner = core_of(WithGraphs, **captured(1))

    def inputs() -> dict[tuple[bool, str], tuple[int, int]]:
        both = ((False, runner.inputs), (True, runner.inputs.kept))
        found = [(is_kept, *named) for is_kept, rows in both for named in rows.tensors()]
        return {(is_kept, name): (id(tensor), tensor.data_ptr()) for is_kept, name, tensor in found}

    before, expected = inputs(), answers(runner)
    assert {"sent", "slots", "derived", "positions", "slot_mapping", "row_ids"} <= {name for _, name in before}
    runner.clear()
    assert inputs() == before
    runner.load(runner.config.model, 2, lambda num_done, num_bytes: None)
    runner.load(runner.config.model, 3, lambda num_done, num_bytes: None)
    assert inputs() == before
    assert answers(runner) == expected
    assert inputs() == before


def test_padded_rows_write_only_the_dummy_block() -> None:
    """Three rows in a graph of four leave the cache of steps that run op by op, except for block 0, as on the CPU."""
    caches = []
    for kind, options in ((xpu_runner, {}), (WithGraphs, captured(1))):
        runner = core_of(kind, **options)
        serving, batch = Serving(runner, chunk=16), sequences()
        for slot, sequence in enumerate(batch):
            serving.place(sequence, slot)
        for _ in range(6):
            serving.step(batch)
        assert runner.mode.size == (4 if options else 0)
        caches.append([part.numpy()[1:] for layer in runner._cache.layers for part in (layer.keys, layer.values)])
    for found, expected in zip(*caches, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_draft_lengths_and_phases_match_the_config() -> None:
    for kind, options in ((xpu_runner, {}), (WithGraphs, captured(3))):
        runner = core_of(kind, speculative_config=NGRAM, **options)
        serving, modes = Serving(runner, chunk=12), []
        short, long = (ServedSequence([7, 8, 9] * count, SamplingParams(temperature=0.0), 30) for count in (1, 10))
        serving.place(short, 1)
        serving.place(long, 0)
        for number in range(7):
            serving.step([short] if number < 3 else [long, short])
            modes.append(runner.mode)
        decode, mixed, prefill = Phase.DECODE, Phase.MIXED, Phase.PREFILL
        assert [mode.phase for mode in modes] == [prefill, decode, decode, mixed, mixed, mixed, decode]
        assert {mode.num_drafts for mode in modes} == {2}
        assert all((mode.size > 0) == (bool(options) and mode.phase is decode) for mode in modes)


def test_uncapturable_steps_run_op_by_op(caplog: pytest.LogCaptureFixture) -> None:
    """The CPU place has no graphs: the same answers, and a log line for each size."""
    runner = core_of(gpu_runner, **captured(1))
    plan = runner.weights.plan
    assert plan is not None
    assert sorted(plan.failed_sizes) == [1, 2, 4]
    said = [record.getMessage() for record in caplog.records if "op by op" in record.getMessage()]
    assert len(said) == 3
    assert said[0].startswith("steps of 4 rows run op by op, because capturing failed: Place(cpu): the installed Paddle")
    assert answers(runner) == answers(core_of(cpu_runner))
    assert len([record for record in caplog.records if "op by op" in record.getMessage()]) == 3


def test_replay_after_moved_memory_is_an_error() -> None:
    runner = core_of(WithGraphs, **captured(1))
    plan = runner.weights.plan
    assert isinstance(plan, GraphPlan)
    model = plan._model
    model.norm.weight = model.norm.weight + 0.0
    with pytest.raises(
        DeviceError, match=r"captured for \d rows read moved memory: weights\.norm\.weight at 0x\w+, now at 0x\w+; reload"
    ):
        answers(runner)
    runner.load(runner.weights.path, 2, lambda num_done, num_bytes: None)
    assert answers(runner) == answers(core_of(cpu_runner))


def test_at_most_two_steps_are_in_flight() -> None:
    """The next one reads the tokens that the one before it sampled, before its result is taken."""
    core = core_of(gpu_runner)
    ahead, serving, batch = Ahead(core), Serving(core), sequences()[:2]
    assert ahead.depth == 2
    assert Ahead(core_of(xpu_runner, speculative_config=NGRAM)).depth == 1, "whoever drafts must know the last tokens"
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    pending: list[list[tuple[ServedSequence, int]]] = []
    first = Serving(core_of(cpu_runner))
    plain = sequences()[:2]
    for slot, sequence in enumerate(plain):
        first.place(sequence, slot)
    for index in range(6):  # one prompt, the other, then each goes on, in turns
        sequence = batch[index % 2]
        rows = [(sequence, len(sequence.tokens) - sequence.num_computed)]
        ahead.start(serving._message(rows))
        pending.append(rows)
        if len(pending) == 2:
            serving._apply(pending.pop(0), ahead.finish())
        first.step([plain[index % 2]])
    serving._apply(pending.pop(0), ahead.finish())
    assert [sequence.answer() for sequence in batch] == [sequence.answer() for sequence in plain]


def plain_sequences(temperature: float = 0.0, length: int = 6) -> list[ServedSequence]:
    """Return sequences that a device can sample by itself, with longer ones among them."""
    words = [5, 9, 3, 30, 22, 8, 17] * 5
    return [
        ServedSequence(
            words[first : first + 3 + 6 * first], SamplingParams(temperature=temperature, seed=first, top_p=0.9), length + first
        )
        for first in range(3)
    ]


def run_ahead(runner: ModelRunner, batch: list[ServedSequence]) -> int:
    """Run the batch; return how many tokens a step read before the host knew them."""
    serving = ServingAhead(runner)
    for slot, sequence in enumerate(batch):
        serving.place(sequence, slot)
    serving.run(batch)
    return serving.num_unknown


@pytest.mark.parametrize("is_captured", [False, True])
def test_step_starts_before_its_tokens_are_known(is_captured: bool) -> None:
    """The device has sampled them where it reads them; a sequence that the host samples is waited for."""
    expected, batch = plain_sequences(), plain_sequences()
    run_alone(core_of(cpu_runner), expected)
    core = core_of(WithGraphs, **captured(1)) if is_captured else core_of(xpu_runner)
    num_unknown = run_ahead(core, batch)
    assert [sequence.answer() for sequence in batch] == [sequence.answer() for sequence in expected]
    assert num_unknown > sum(sequence.num_outputs for sequence in batch) / 2
    run_alone(core_of(cpu_runner), mixed := [*sequences()[:2], *plain_sequences()[:1]])
    run_ahead(core, others := [*sequences()[:2], *plain_sequences()[:1]])
    assert [sequence.answer() for sequence in others] == [sequence.answer() for sequence in mixed]


def run_alone(runner: ModelRunner, batch: list[ServedSequence]) -> None:
    for sequence in batch:
        serving = Serving(runner)
        serving.place(sequence, 0)
        serving.run([sequence])


def test_reused_slot_drops_the_pending_token() -> None:
    """The token of the former sequence is dropped, and the next one gets its own."""
    core, (left, stays, comes) = core_of(xpu_runner), plain_sequences()
    serving = ServingAhead(core)
    for slot, sequence in enumerate((left, stays)):
        serving.place(sequence, slot)
    serving.begin([left, stays])
    serving.begin([left, stays])
    serving.finish()
    serving.place(comes, 0)
    serving.begin([stays, comes])
    before = core.slots.token_ids[0].copy()
    serving.finish()
    np.testing.assert_array_equal(core.slots.token_ids[0], before)
    serving.run([stays, comes])
    assert len(left.outputs) == 2
    run_alone(core_of(cpu_runner), expected := plain_sequences())
    assert [stays.answer(), comes.answer()] == [sequence.answer() for sequence in expected[1:]]


def test_capabilities_are_found_by_trial() -> None:
    """Capabilities are found by a trial, whatever its name: of Paddle's CPU place, and of one that loses its memory."""

    class Forgetting(PaddleDevice):
        def arena(self, memory: np.ndarray) -> Any:
            return super().arena(memory.copy())

    found = PaddleDevice("cpu").capabilities
    assert (found.place, found.has_graphs, found.is_arena_lasting) == ("cpu", False, True)
    assert "float32" in found.dtypes
    assert found.text.startswith("cpu: no graphs, the cache outlives the worker, float32")
    assert not Forgetting("cpu").capabilities.is_arena_lasting


KNOW_NAMES = ("workers/devices/", "workers/runners.py", "engine/options/resolve_device.py")
NAMES = {"gpu", "xpu", "npu"}  # "cuda" is an op table


def test_only_runners_read_device_names() -> None:
    """Code that depends on the device asks for `Capabilities`, or belongs to its runner."""
    found = []
    for package in ("engine", "ops", "workers"):
        for file in sorted((REPOSITORY / package).rglob("*.py")):
            path = str(file.relative_to(REPOSITORY))
            if path.startswith(KNOW_NAMES):
                continue
            text = file.read_text()
            if not any(f'"{name}"' in text for name in NAMES):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Compare):
                    constants = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                    found += [f"{path}:{node.lineno}" for value in constants if value in NAMES]
    assert found == []
