"""Functions that tests run in a process that has the device. Called by `child.py`; arguments and results can be pickled."""

from __future__ import annotations

import functools
import gc
import logging
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from engine.config import SpeculativeConfig
from engine.messages import SamplingParams
from tests.devices.board import Board
from tests.devices.build import NAME
from tests.devices.pinned import offer_pinned_memory
from tests.e2e.workload import Body
from tests.paths import GOLDEN
from tests.workers.serving import ServedSequence, Serving, ServingAhead, golden_sequences, make_runner, swap_slots
from tests.workers.test_runners import SIZES, answers, captured, plain_sequences, run_ahead, run_alone
from workers.engine.runner import ModelRunner
from workers.runners import cpu_runner, xpu_runner

Answers = list[tuple[object, ...]]
offer_pinned_memory()


def drafting(method: str) -> SpeculativeConfig:
    """Return the configuration of a draft method; "": none."""
    return SpeculativeConfig(method=method, num_speculative_tokens=2, adaptive=False) if method else SpeculativeConfig()


def runner_of(model: str, plan: str, method: str = "", **options: Any) -> ModelRunner:
    """Return a runner; `plan`: "cpu", or one of the device."""
    given: dict[str, Any] = {**SIZES, "speculative_config": drafting(method), **options}
    if plan == "cpu":
        paddle.device.set_device("cpu")
        return make_runner(GOLDEN / model, kind=cpu_runner, **given)
    if plan == "captured":
        given = {**captured(1 + given["speculative_config"].max_drafts), **given}
    return make_runner(GOLDEN / model, kind=xpu_runner, device=NAME, **given)


def answers_of(model: str, plan: str, method: str = "", **options: Any) -> tuple[Answers, list[int], list[str]]:
    """Return answers, the sizes that could not be captured, and the log lines about them."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("workers.engine.graph_plan").addHandler(handler)
    try:
        runner = runner_of(model, plan, method, **options)
        assert runner.weights.plan is not None
        return answers(runner), sorted(runner.weights.plan.failed_sizes), said
    finally:
        logging.getLogger("workers.engine.graph_plan").removeHandler(handler)


def tokens_of_rows(path: str, plan: str) -> list[int]:
    """Return the number of tokens that each row brings where layers draft."""
    serving = Serving(runner_of(path, plan, "mtp"))
    sequence = ServedSequence([5, 9, 3], SamplingParams(temperature=0.0), 20)
    serving.place(sequence, 0)
    serving.run([sequence])
    return serving.num_tokens_of_rows


def answers_after_loading_again(model: str, board: Board) -> tuple[list[Answers], float]:
    """Return answers before and after weights are cleared and loaded, and how many times as much memory the device has given
    meanwhile as there is in tensors."""
    runner = runner_of(model, "captured")
    found = [answers(runner)]
    runner.clear()
    counts = board.counts()
    ratio = (counts["allocated_bytes"] - counts["freed_bytes"]) / runner.device.memory_bytes()
    runner.load(runner.config.model, 2, lambda num_done, num_bytes: None)
    return [*found, answers(runner)], ratio


def golden_tokens(model: str) -> list[list[int]]:
    serving = Serving(runner_of(model, "eager", num_kv_blocks=600, max_num_seqs=32, max_model_len=512))
    sequences = golden_sequences(model)
    for slot, sequence in enumerate(sequences):
        serving.place(sequence, slot)
    serving.run(sequences)
    return [sequence.outputs for sequence in sequences]


def answers_to(bodies: list[Body], options: dict[str, Any], model: str = "qwen3") -> list[tuple[list[int], list[float]]]:
    """Return tokens and log-probabilities of completions on the CPU place, each alone; `options`: of the runner."""
    found = []
    serving = Serving(runner_of(model, "cpu", **options))
    for body in bodies:
        names = set(body) & set(SamplingParams.__struct_fields__) - {"max_tokens", "ignore_eos"}
        given = {name: body[name] for name in names}
        given["logit_bias"] = {int(token): bias for token, bias in body.get("logit_bias", {}).items()}
        sequence = ServedSequence(body["prompt"], SamplingParams(num_logprobs=0, **given), body["max_tokens"])
        serving.place(sequence, 0)
        serving.run([sequence])
        found.append((sequence.outputs, sequence.logprobs))
    return found


def answers_ahead(plan: str) -> tuple[Answers, Answers, int]:
    """Return the answers of the CPU place, each alone, those of the device, where a step begins before the tokens that it reads
    are known, and how many such tokens there were."""
    batch, alone = plain_sequences(), plain_sequences()
    num_unknown = run_ahead(runner_of("qwen3", plan), batch)
    run_alone(runner_of("qwen3", "cpu"), alone)
    return [sequence.answer() for sequence in alone], [sequence.answer() for sequence in batch], num_unknown


def answer_of_chunks(plan: str) -> tuple[object, ...]:
    """Return the answer to a prompt in chunks that sample nothing, so that the host waits for none of them."""
    serving = Serving(runner_of("qwen3", plan), chunk=8)
    sequence = ServedSequence([5, 9, 3, 30, 22, 8, 17] * 15, SamplingParams(temperature=0.0, num_prompt_logprobs=-1), 3)
    serving.place(sequence, 0)
    serving.run([sequence])
    return sequence.answer()


class Growing(Serving):
    """Serving that sends blocks when they are first needed, as the scheduler does."""

    def _message(self, rows: list[tuple[ServedSequence, int]]) -> Any:
        message = super()._message(rows)
        tables = self.runner.slots.block_tables
        growth = message.block_slots, message.block_tables, message.block_indexes, message.block_ids
        slots, numbers, indexes, blocks = (np.frombuffer(each, np.int32) for each in growth)
        is_new = tables[slots, numbers, indexes] != blocks
        message.block_slots, message.block_tables, message.block_indexes, message.block_ids = (
            each[is_new].tobytes() for each in (slots, numbers, indexes, blocks)
        )
        return message


def steady_steps(board: Board, num_rows: int, plan: str, method: str, num_steps: int, model: str = "qwen3") -> dict[str, int]:
    """Return the device's counts in steady steps in which each row goes on, and the calls of functions by the runner, of Python
    and of C ("calls")."""
    serving, sequences = _steady(num_rows, plan, method, num_steps, model)
    before, calls = board.counts(), [0]
    core = serving.runner
    for name in ("begin", "end"):
        setattr(core, name, functools.partial(_counted, calls, getattr(core, name)))
    for _ in range(num_steps):
        serving.step(sequences)
    del core.begin, core.end  # through which the runner would hold itself, and its graphs until the plugin is gone
    return {name: count - before[name] for name, count in board.counts().items()} | {"calls": calls[0]}


def _counted(calls: list[int], function: Callable[..., Any], *arguments: Any) -> Any:
    def count(_frame: object, event: str, _argument: object) -> None:
        calls[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        return function(*arguments)
    finally:
        sys.setprofile(None)


def _steady(
    num_rows: int, plan: str, method: str, num_steps: int, model: str = "qwen3"
) -> tuple[Growing, list[ServedSequence]]:
    """Return `num_rows` sequences in a state from which `num_steps` steps copy only what each step needs."""
    unit = 1 + drafting(method).max_drafts
    sizes = {"cudagraph_capture_sizes": (num_rows * unit,), "max_cudagraph_capture_size": num_rows * unit}
    options = {"max_num_seqs": 32, "num_kv_blocks": 600, **(sizes if plan == "captured" else {})}
    # with equally many draft tokens of each row in every step: a step with more rows than before would allocate memory
    drafter = (lambda sequence: sequence.tokens[-2:]) if method == "ngram" else None
    serving = Growing(runner_of(model, plan, method, **options), drafter=drafter)
    sampling = SamplingParams(temperature=0.0)
    sequences = [ServedSequence([5, 9, 3, 30 + row] * 3, sampling, 40 + 3 * num_steps) for row in range(num_rows)]
    for slot, sequence in enumerate(sequences):
        serving.place(sequence, slot)
    for _ in range(8):
        serving.step(sequences)
    gc.collect()  # of earlier runners, which wait for their events
    paddle.device.synchronize()
    return serving, sequences


def steps_ahead(board: Board, num_rows: int, plan: str, num_steps: int, kernel_ns: int = 0) -> dict[str, int]:
    """Return the device's counts in steps that each began before the one before was waited for, and their time ("span_ns")."""
    sizes = {"cudagraph_capture_sizes": (num_rows,), "max_cudagraph_capture_size": num_rows}
    serving = ServingAhead(
        runner_of("qwen3", plan, num_kv_blocks=600, max_num_seqs=32, **(sizes if plan == "captured" else {}))
    )
    sequences = [
        ServedSequence([5, 9, 3, 30 + row], SamplingParams(temperature=0.0), num_steps + 12) for row in range(num_rows)
    ]
    for slot, sequence in enumerate(sequences):
        serving.place(sequence, slot)
    serving.begin(sequences)
    for _ in range(4):
        serving.begin(sequences)
        serving.finish()
    board.set(kernel_ns=kernel_ns)
    serving.begin(sequences)
    serving.finish()  # the next one has kernels that take this long
    before, begin_ns = board.counts(), time.monotonic_ns()
    for _ in range(num_steps):
        serving.begin(sequences)
        serving.finish()
    found = {name: count - before[name] for name, count in board.counts().items()}
    span_ns = time.monotonic_ns() - begin_ns
    board.set(kernel_ns=0)
    serving.finish()
    return found | {"span_ns": span_ns}


def host_ns(num_rows: int, plan: str, num_steps: int) -> int:
    """Return the median CPU time of the runner's thread in `num_steps` steady steps, each begun on an idle device."""
    serving, sequences = _steady(num_rows, plan, "", num_steps)
    found = []
    for _ in range(num_steps):
        rows = [(sequence, 1) for sequence in sequences]
        begun, to_begin_ns = _timed(serving.runner.begin, serving._message(rows))
        result, to_end_ns = _timed(serving.runner.end, begun)
        serving._apply(rows, result)
        found.append(to_begin_ns + to_end_ns)
    return int(statistics.median(found))


def _timed(function: Callable[[Any], Any], argument: Any) -> tuple[Any, int]:
    """Return the function's result and the CPU time of its thread."""
    paddle.device.synchronize()
    begin_ns = time.thread_time_ns()
    found = function(argument)
    return found, time.thread_time_ns() - begin_ns


def run_with_swaps(swaps: list[tuple[int, int, int]], plan: str) -> tuple[Answers, bool]:
    """Return answers where before step i slots a and b change places for each (i, a, b), and whether two swaps cancel out."""
    runner = runner_of("qwen3", plan)
    serving, slots, inputs = Serving(runner, chunk=16), runner.slots, runner.inputs
    sequences = [
        ServedSequence([5, 9, 3 + row, 30] * (3 + 2 * row), SamplingParams(temperature=0.7, seed=row), 10) for row in range(3)
    ]
    for slot, sequence in enumerate(sequences):
        serving.place(sequence, slot)
    is_identity = True

    def tell(*changed: int) -> None:
        for slot in changed:
            inputs.start(slots, slot)

    def swap(first: int, second: int) -> None:
        swap_slots(slots, first, second)
        tell(first, second)
        for sequence in sequences:
            sequence.slot = {first: second, second: first}.get(sequence.slot, sequence.slot)

    step = 0
    while any(not sequence.is_done for sequence in sequences):
        for at, first, second in swaps:
            if at == step and first != second:
                tell(first, second)  # the last sampled tokens, which otherwise travel with the next step
                before = registered(runner)
                swap(first, second)
                swap(second, first)
                is_identity = is_identity and registered(runner) == before
                swap(first, second)
        serving.step([sequence for sequence in sequences if not sequence.is_done])
        step += 1
    return [sequence.answer() for sequence in sequences], is_identity


def registered(runner: ModelRunner) -> list[object]:
    """Return the contents of all slots, on the host and, as far as in use, on the device."""
    slots, sizes = runner.slots, runner.inputs.sizes  # type: ignore[attr-defined]
    on_device = runner.inputs.slots.numpy()  # type: ignore[attr-defined]
    counts = slots.num_tokens[: sizes.num_slots].tolist()
    tokens = on_device[: sizes.tables_at].reshape(-1, sizes.num_positions)
    own = [tokens[slot, :count].tolist() for slot, count in enumerate(counts)]
    rest = on_device[sizes.tables_at :].tolist()
    return [[array.tolist() for _, array in slots.arrays()], own, rest]
