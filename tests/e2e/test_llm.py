"""`LLM`: the answers of an engine over HTTP, in a process without the engine; its death leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine.process.run_directory import Run
from tests.e2e.engine_process import DEMO, leftovers
from tests.engine.echo_engine import is_gone
from tests.pooled import MODELS, QUERY, TOLERANCE, write_checkpoint
from tests.tools.package.test_parameters import SET
from tests.waiting import WATCHDOG_S, wait_until
from tokamak import LLM, BeamSearchParams, EngineDeadError, PoolingParams, SamplingParams, StructuredOutputsParams, TokensPrompt

GREEDY = SamplingParams(temperature=0, max_tokens=24)
QUESTIONS = [[{"role": "user", "content": f"What is {number} + 30?"}] for number in range(40)]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(DEMO), max_num_seqs=8, max_model_len=300, restart_limit=100, seed=7, trust_remote_code=True) as made:
        yield made


def run_of(llm: LLM) -> Run:
    directory = Path(llm._engine.url.removeprefix("unix:")).parent
    return Run(directory.name, directory)


def over_http(llm: LLM, path: str, **body: Any) -> Any:
    """Ask the engine as any client does."""
    transport = httpx.HTTPTransport(uds=llm._engine.url.removeprefix("unix:"))
    with httpx.Client(transport=transport, base_url="http://localhost", timeout=WATCHDOG_S) as client:
        key = {"authorization": f"Bearer {llm._engine.key}"}
        return client.post(path, json=body, headers=key).raise_for_status().json()


def actors(llm: LLM) -> dict[str, int]:
    return {row["name"]: row["pid"] for row in llm._call("/admin/actors")["actors"]}


# -------------------------------------------------------------------------------------------------------------- answers


def test_texts_equal_those_over_http(llm: LLM) -> None:
    prompts: list[Any] = ["The sun", [10, 20, 30], TokensPrompt(prompt_token_ids=[40, 50]), {"prompt": "a fox"}]
    for params in (GREEDY, SamplingParams(seed=5, top_p=0.9, top_k=40, n=3, max_tokens=None, min_tokens=4, stop=["e"])):
        found = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(["The sun", [10, 20, 30], [40, 50], "a fox"], found, strict=True):
            fields = params.fields()
            choices = over_http(llm, "/v1/completions", prompt=prompt, return_token_ids=True, **fields)["choices"]
            assert [(each.text, each.token_ids, each.finish_reason, each.stop_reason) for each in output.outputs] == [
                (choice["text"], choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) for choice in choices
            ]
            assert output.prompt_token_ids == choices[0]["prompt_token_ids"]
            assert output.prompt == (prompt if isinstance(prompt, str) else None)
            assert output.finished
            assert [each.index for each in output.outputs] == list(range(params.n))


def test_conversations_equal_those_over_http(llm: LLM) -> None:
    found = llm.chat(QUESTIONS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in found] == [f"{number} + 30 = {number + 30}" for number in range(40)]
    answer = over_http(llm, "/v1/chat/completions", messages=QUESTIONS[5], temperature=0, max_tokens=24, return_token_ids=True)
    assert found[5].outputs[0].token_ids == answer["choices"][0]["token_ids"]
    assert found[5].prompt_token_ids == answer["choices"][0]["prompt_token_ids"]
    assert found[5].prompt is not None
    assert "What is 5 + 30?" in found[5].prompt
    metrics = found[5].metrics
    assert metrics is not None
    assert metrics.arrival_time < metrics.first_token_ts <= metrics.last_token_ts
    assert metrics.num_generation_tokens == len(found[5].outputs[0].token_ids)


def test_fork_gets_its_own_answers(llm: LLM) -> None:
    """A fork inherits its parent's connections, on which each would read the other's answers."""
    prompts = [f"{number} + 1" for number in range(20)]
    expected = [output.outputs[0].text for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert llm.generate(prompts[0], GREEDY, use_tqdm=False)[0].outputs[0].text == expected[0]  # one connection is idle

    def each_alone() -> list[str]:
        return [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text for prompt in prompts * 3]

    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if each_alone() == expected * 3 and llm._engine.is_alive() else 2
            llm.shutdown()  # is its parent's to say
        finally:
            os._exit(status)
    assert each_alone() == expected * 3
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert llm._engine.is_alive()


def test_conversation_becomes_a_prompt(llm: LLM) -> None:
    (plain,) = llm.chat(QUESTIONS[0], GREEDY, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    assert plain.prompt == tokenizer.apply_chat_template(QUESTIONS[0], tokenize=False, add_generation_prompt=True)
    assert plain.prompt_token_ids == tokenizer.encode(plain.prompt or "") == tokenizer(plain.prompt or "")["input_ids"]
    assert tokenizer.decode(plain.prompt_token_ids or []) == plain.prompt
    begun = [*QUESTIONS[0], {"role": "assistant", "content": "0 + 30 ="}]
    (continued,) = llm.chat(begun, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert continued.outputs[0].text == " 30"
    (own,) = llm.chat(QUESTIONS[0], GREEDY, chat_template="{{ messages[0]['content'] }}!", use_tqdm=False)
    assert own.prompt == "What is 0 + 30?!"
    (with_tools,) = llm.chat(QUESTIONS[0], GREEDY, tools=[TOOL], use_tqdm=False)
    assert len(with_tools.prompt_token_ids or []) > len(plain.prompt_token_ids or [])


def test_log_probabilities_as_vllm_has_them(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    for output in (*llm.generate(["the sun is", "of"], params, use_tqdm=False), *llm.chat(QUESTIONS[:1], params)):
        (best,) = output.outputs
        assert best.logprobs is not None
        assert [token_id in row for row, token_id in zip(best.logprobs, best.token_ids, strict=True)] == [True] * 5
        assert all(row[token_id].rank == 1 for row, token_id in zip(best.logprobs, best.token_ids, strict=True))
        assert {len(row) for row in best.logprobs} == {2}
        total = sum(row[token_id].logprob for row, token_id in zip(best.logprobs, best.token_ids, strict=True))
        assert best.cumulative_logprob == pytest.approx(total)
        assert "".join(row[token].decoded_token or "" for row, token in zip(best.logprobs, best.token_ids, strict=True))
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids or [])
        told = zip(output.prompt_logprobs, output.prompt_token_ids or [], strict=True)
        assert all(row is None or token_id in row for row, token_id in told)
    (chosen,) = llm.generate("a", SamplingParams(max_tokens=1, logprob_token_ids=[5, 6]), use_tqdm=False)[0].outputs
    assert chosen.logprobs is not None
    assert {5, 6} <= set(chosen.logprobs[0])


def test_beam_search_finds_the_likeliest(llm: LLM) -> None:
    """A single beam is the greedy answer; the log-probability of each beam is that of its tokens as a prompt."""
    prompt = llm.chat(QUESTIONS[3], GREEDY, use_tqdm=False)[0]
    assert prompt.prompt_token_ids is not None
    greedy = prompt.outputs[0].token_ids
    start = TokensPrompt(prompt_token_ids=prompt.prompt_token_ids)
    params = BeamSearchParams(beam_width=1, max_tokens=24, include_stop_str_in_output=True, length_penalty=0)
    (alone,) = llm.beam_search([start], params)
    (best,) = alone.sequences
    assert best.tokens == prompt.prompt_token_ids + greedy
    assert (best.finish_reason, best.text) == ("stop", llm.get_tokenizer().decode(best.tokens))
    wide = BeamSearchParams(beam_width=4, max_tokens=6, length_penalty=0, ignore_eos=True)
    found = llm.beam_search([start, "The sun", "a fox"], wide, concurrency_limit=2)
    assert [len(output.sequences) for output in found] == [4, 4, 4]
    for output in found:
        sums = [sequence.cum_logprob for sequence in output.sequences]
        assert sums == sorted(sums, reverse=True)
        assert len({tuple(sequence.tokens) for sequence in output.sequences}) == 4
        for sequence in output.sequences:
            scored = SamplingParams(max_tokens=1, prompt_logprobs=1)
            (again,) = llm.generate([sequence.tokens], scored, use_tqdm=False)
            assert again.prompt_logprobs is not None
            rows = again.prompt_logprobs[-6:]
            own = [row[token].logprob for row, token in zip(rows, sequence.tokens[-6:], strict=True) if row is not None]
            assert sequence.cum_logprob == pytest.approx(sum(own), abs=1e-3)
            assert len(sequence.logprobs) == 6
    assert found[1].sequences[0].text is not None
    assert found[1].sequences[0].text.startswith("The sun")
    with pytest.raises(ValueError, match="beam_width"):
        BeamSearchParams(beam_width=0, max_tokens=1)
    with pytest.raises(ValueError, match="max-logprobs"):
        llm.beam_search(["a"], BeamSearchParams(beam_width=60, max_tokens=1))


def test_metrics_equal_those_over_http(llm: LLM) -> None:
    llm.generate("a", GREEDY, use_tqdm=False)
    found = {metric.name: metric for metric in llm.get_metrics()}
    assert found["tokamak:generation_tokens"].value > 0
    assert found["tokamak:num_requests_running"].value == 0
    latency = found["tokamak:time_to_first_token_seconds"]
    assert latency.count == latency.buckets["+Inf"] > 0
    assert latency.sum > 0
    assert "actor" in found["tokamak:http_requests"].labels


def test_every_parameter_acts_or_is_refused(llm: LLM) -> None:
    for name, value in SET.items():
        (output,) = llm.chat(QUESTIONS[0], SamplingParams(**{"max_tokens": 4, name: value}), use_tqdm=False)
        assert output.outputs[0].finish_reason, name
    form = StructuredOutputsParams(choice=["yes", "perhaps"])
    (output,) = llm.generate("?", SamplingParams(structured_outputs=form, max_tokens=50), use_tqdm=False)
    assert output.outputs[0].text in ("yes", "perhaps")
    (output,) = llm.generate("?", SamplingParams(detokenize=False), use_tqdm=False)
    assert (output.outputs[0].text, bool(output.outputs[0].token_ids)) == ("", True)


def test_unseeded_samples_differ_between_prompts(llm: LLM) -> None:
    """Samples without a seed differ from prompt to prompt."""
    drawn = llm.generate(["a"] * 8, SamplingParams(max_tokens=12, ignore_eos=True, temperature=2), use_tqdm=False)
    assert len({output.outputs[0].text for output in drawn}) > 4


def test_parameters_of_each_prompt_and_of_the_model(llm: LLM) -> None:
    each = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 2, 3)]
    assert [len(output.outputs[0].token_ids) for output in llm.generate(["a"] * 3, each, use_tqdm=False)] == [1, 2, 3]
    assert len(llm.generate("a", use_tqdm=False)[0].outputs[0].token_ids) <= 16


def test_progress_is_told(llm: LLM) -> None:
    told: list[int] = []

    class Bar:
        def __init__(self, total: int, **_: Any) -> None:
            told.append(total)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self) -> None:
            told.append(1)

    llm.generate(["a"] * 3, GREEDY, use_tqdm=Bar)
    llm.generate("a", GREEDY, use_tqdm=Bar)
    assert told == [3, 1, 1, 1, 1, 1]


MISTAKES: list[tuple[Any, Any, type[Exception], str]] = [
    (["a", "b " * 5000], GREEDY, ValueError, r"prompts\[1\]: .*tokens"),
    ([[1, 2], [10**7]], GREEDY, ValueError, r"prompts\[1\]: prompt: token id 10000000"),
    (["a", ""], GREEDY, ValueError, r"prompts\[1\]"),
    (["a", 3.5], GREEDY, TypeError, r"prompts\[1\] is a float"),
    ([{"text": "a"}], GREEDY, ValueError, r"prompts\[0\] has text"),
    (["a", "\ud800"], GREEDY, ValueError, r"prompts\[1\]: "),
    (["a"], SamplingParams(temperature=-1), ValueError, r"prompts\[0\]: temperature"),
    (["a"], SamplingParams(logprobs=50), ValueError, "max-logprobs"),
    (["a"], [GREEDY, GREEDY], ValueError, "2 entries for 1"),
    (["a"], {"temperature": 0}, TypeError, "expected SamplingParams"),
    (["a"], SamplingParams(thinking_token_budget=3), ValueError, "use chat"),
    (["a"], SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")), ValueError, "regex"),
    ({"prompt": "a", "multi_modal_data": {"image": "x"}}, GREEDY, ValueError, "image"),
]


@pytest.mark.parametrize(("prompts", "params", "kind", "what"), MISTAKES)
def test_mistakes(llm: LLM, prompts: Any, params: Any, kind: type[Exception], what: str) -> None:
    with pytest.raises(kind, match=what):
        llm.generate(prompts, params, use_tqdm=False)


def test_one_mistake_among_many_ends_all_at_once(llm: LLM) -> None:
    """Open requests are aborted; none keeps running."""
    long = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    with pytest.raises(ValueError, match=r"prompts\[3\]"):
        llm.generate(["a", "b", "c", [10**7], *["d"] * 50], long, use_tqdm=False)
    wait_until(lambda: llm._call("/load")["running"] == 0, what="the others are aborted")
    assert llm.generate("a", GREEDY, use_tqdm=False)
    assert llm.generate([], GREEDY) == []


def test_interrupted(llm: LLM) -> None:
    """Ctrl+C, or the button of a notebook."""
    long = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    interrupter = threading.Thread(
        target=lambda: (wait_until(lambda: llm._call("/load")["running"]), os.kill(os.getpid(), signal.SIGINT))
    )

    def generate() -> None:
        interrupter.start()  # only here: it may still see what ran before
        llm.generate(["a"] * 1000, long, use_tqdm=False)

    with pytest.raises(KeyboardInterrupt):
        generate()
    interrupter.join()
    wait_until(lambda: llm._call("/load")["running"] == 0, what="all are aborted")


def test_calls_inside_an_event_loop(llm: LLM) -> None:
    async def cell() -> str:
        return llm.chat(QUESTIONS[1], GREEDY, use_tqdm=False)[0].outputs[0].text

    assert asyncio.run(cell()) == "1 + 30 = 31"


def test_several_threads_at_once(llm: LLM) -> None:
    found: dict[int, list[str]] = {}

    def ask(first: int) -> None:
        found[first] = [each.outputs[0].text for each in llm.chat(QUESTIONS[first : first + 10], GREEDY, use_tqdm=False)]

    threads = [threading.Thread(target=ask, args=(first,)) for first in (0, 10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[first][0] for first in (0, 10, 20, 30)] == [f"{first} + 30 = {first + 30}" for first in (0, 10, 20, 30)]


@pytest.mark.parametrize("victim", ["api0", "worker0"])
def test_requests_survive_a_dying_actor(llm: LLM, victim: str) -> None:
    """If the HTTP process dies, its requests are sent again."""
    expected = [each.outputs[0].token_ids for each in llm.chat(QUESTIONS, GREEDY, use_tqdm=False)]
    pid = actors(llm)[victim]
    found: list[list[list[int]]] = []
    asking = threading.Thread(
        target=lambda: found.append([each.outputs[0].token_ids for each in llm.chat(QUESTIONS, GREEDY, use_tqdm=False)])
    )
    asking.start()
    os.kill(pid, signal.SIGKILL)
    asking.join(WATCHDOG_S)
    assert found == [expected]


def test_commands(llm: LLM) -> None:
    before = llm.chat(QUESTIONS[2], GREEDY, use_tqdm=False)[0].outputs[0].text
    assert llm.reset_prefix_cache()
    llm.sleep()
    with pytest.raises(RuntimeError, match="wake_up"):
        llm.chat(QUESTIONS[2], GREEDY, use_tqdm=False)
    llm.wake_up()
    assert llm.chat(QUESTIONS[2], GREEDY, use_tqdm=False)[0].outputs[0].text == before


def test_adapter_without_lora_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="lora"):
        llm.generate("a", GREEDY, lora_request=SimpleNamespace(lora_name="x", lora_int_id=1, lora_path="/no/such"))


# --------------------------------------------------------------------------------------------------- vectors and scores


def test_vectors_and_scores(tmp_path: Path) -> None:
    """Results equal a third party's; two engines run at once."""
    embedder, scorer = MODELS["qwen3 mean"], MODELS["bert classifier"]
    vectors = write_checkpoint("qwen3 mean", tmp_path / "embedder")
    scores = write_checkpoint("bert classifier", tmp_path / "scorer")
    with LLM(vectors, dtype="float32") as first, LLM(model=str(scores), dtype="float32", task="score") as second:
        texts = [case["text"] for case in embedder["cases"]]
        for case, output in zip(embedder["cases"], first.embed(texts, use_tqdm=False), strict=True):
            assert output.outputs.embedding == pytest.approx(case["vector"], abs=TOLERANCE)
            assert output.prompt_token_ids == case["token_ids"]
            assert output.outputs.hidden_size == len(case["vector"])
        (short,) = first.embed([case["token_ids"]], pooling_params=PoolingParams(dimensions=7), use_tqdm=False)
        assert short.outputs.embedding == output.outputs.embedding[:7]
        assert len(first.score(texts[0], texts, use_tqdm=False)) == len(texts)
        cases = scorer["cases"] * 8  # more than one request has
        found = second.score(QUERY, [case["text"] for case in cases], use_tqdm=False)
        assert [each.outputs.score for each in found] == pytest.approx([case["score"] for case in cases], abs=TOLERANCE)
        assert [each.prompt_token_ids for each in found] == [case["token_ids"] for case in cases]
        with pytest.raises(ValueError, match="data_1 has 2"):
            second.score(["a", "b"], ["c"])
        with pytest.raises(ValueError, match="it supports embeddings"):
            first.generate("a", use_tqdm=False)
        with pytest.raises(ValueError, match="data_2"):
            second.score("a", ["b", "b " * 5000], use_tqdm=False)
        os.kill(second._engine.process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            second.score("a", ["b"] * 100, use_tqdm=False)
    for llm in (first, second):
        with pytest.raises(EngineDeadError, match=r"shut down|killed"):
            llm.embed("a", use_tqdm=False)


# ------------------------------------------------------------------------------------------------------------ its life

SCRIPT = """
import asyncio, json, sys, threading
from tokamak import LLM, SamplingParams

async def main():
    engines = []
    thread = threading.Thread(target=lambda: engines.append(LLM(MODEL, max_model_len=500)))  # which ends before its engine
    thread.start()
    engines.append(LLM(MODEL))
    thread.join()
    texts = [llm.chat([{"role": "user", "content": "What is 2 + 30?"}], SamplingParams(temperature=0)) for llm in engines]
    pids = [row["pid"] for llm in engines for row in llm._call("/admin/actors")["actors"]]
    texts = [text[0].outputs[0].text for text in texts]
    print(json.dumps({"pids": pids, "texts": texts, "modules": [*sys.modules]}), flush=True)
    sys.stdin.readline()
    engines.pop()  # drops the last reference to it
    sys.stdin.readline()

asyncio.run(main())
"""


def started(tmp_path: Path) -> subprocess.Popen[str]:
    for name in ("tools", "api", "engine"):  # the user's own
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('a module of the user')\n")
    command = [sys.executable, "-c", f"MODEL = {str(DEMO)!r}\n{SCRIPT}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd=tmp_path, text=True, **pipes)  # type: ignore[call-overload, no-any-return]


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text().split()]


def test_killed_process_leaves_nothing(tmp_path: Path) -> None:
    """Two engines, one of them started by a thread that has ended, in a directory with packages of the same names as ours."""
    with started(tmp_path) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["texts"] == ["2 + 30 = 32"] * 2
        engines = children_of(process.pid)
        assert len(engines) == 2
        names = {name.partition(".")[0] for name in told["modules"]}
        assert not names & {"api", "engine", "ops", "shm", "tools", "workers", "paddle", "numpy", "zmq", "httpx"}
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        wait_until(lambda: len(children_of(process.pid)) == 1, what="an engine that nobody has ends")
        process.kill()
    pids = [*told["pids"], *engines]
    wait_until(lambda: all(map(is_gone, pids)), what="the engines end")
    assert leftovers(pids) == []


def test_process_killed_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    with started(tmp_path) as process:
        pids = wait_until(lambda: children_of(process.pid), what="an engine starts")
        process.kill()
    wait_until(lambda: all(map(is_gone, pids)), what="the engines end")
    assert leftovers(pids) == []


@pytest.mark.parametrize(
    ("options", "kind", "what"),
    [
        ({"model": "/no/such/model"}, ValueError, "/no/such/model"),
        ({"max_model_length": 3}, TypeError, "did you mean max-model-len"),
        ({"dtype": "float8"}, ValueError, "dtype float8: expected one of"),
        ({"hf_overrides": {"a": 1}}, ValueError, "config.json"),
        ({"model": object()}, TypeError, "model is a object"),
        ({"ssl_keyfile": "key.pem"}, ValueError, "servers that others use"),
    ],
)
def test_options_that_are_wrong(options: dict[str, Any], kind: type[Exception], what: str) -> None:
    with pytest.raises(kind, match=what):
        LLM(**options)
