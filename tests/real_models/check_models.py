"""Published models over HTTP agree with llama.cpp and transformers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.engine_process import EngineProcess
from tests.real_models import files
from tests.real_models.quantization import unpacked

REFERENCE = Path(__file__).with_name("reference.py")
CLEAR_MARGIN = 0.25  # between the two best log-probabilities of exact arithmetic: below it, rounding may choose otherwise
SUBJECTS = (
    *("The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at", "The three primary colours are"),
    *("In 1969,", "To bake bread you need", "Dear Sir or Madam,", "The quick brown fox", "SELECT name FROM users WHERE"),
)
QUESTIONS = (
    *("What is gravity?", "Name three rivers.", "Write a haiku about rain.", "What is 12 + 7?", "Who wrote Hamlet?"),
    *("Translate 'good morning' to French.", "What is photosynthesis?", "List two prime numbers.", "Why is the sky blue?"),
    "Give me a synonym of 'happy'.",
)
OTHERS = (
    *("Ünïcödé ünd Straße", "日本語のテキスト", "Привет, мир!", "emoji 🙂👩\u200d👩\u200d👧", "  leading and trailing  "),
    *(
        "tabs\tand\nnewlines\r\n",
        "1234567890 3.14159",
        "http://example.com/a?b=c&d=e",
        "a" * 100,
        "<|im_start|>user\nhi<|im_end|>",
    ),
)
TEXTS = (*SUBJECTS, *QUESTIONS, *OTHERS)  # 30
CONVERSATIONS = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "日本語?"}],
]


def reference(question: str, model: Path, values: Any) -> Any:
    """Return the answer of another program; skip the test if that program is missing or crashes on this machine."""
    python = os.environ["TOKAMAK_REFERENCE_PYTHON"]
    command = [python, str(REFERENCE), question, str(model)]
    found = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True)
    if found.returncode < 0:
        pytest.skip(f"not tested here: `{question}` ended with {signal.Signals(-found.returncode).name}; {remedy(python)}")
    if "No module named 'llama_cpp'" in found.stderr:
        pytest.skip(f"not tested here: llama-cpp-python is not installed; {remedy(python)}")
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def remedy(python: str) -> str:
    return (
        f"build llama.cpp without AMX: CMAKE_ARGS=-DGGML_NATIVE=OFF {python} -m pip install --no-cache-dir --force-reinstall "
        "--no-deps llama-cpp-python==0.3.36; or set LLAMA_CPP_LIB_PATH to the directory of a build that runs"
    )


def post(engine: EngineProcess, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{engine.url}{path}", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


Best = list[list[tuple[int, float]]]  # the best tokens of each step, with their log-probabilities


@pytest.fixture(scope="module")
def smollm2() -> Iterator[tuple[EngineProcess, list[dict[str, Any]]]]:
    path = files.smollm2()
    expected = reference("greedy", path, TEXTS)
    with EngineProcess(path, "--dtype", "float32", "--max-model-len", "1024") as engine:
        yield engine, expected


@pytest.fixture(scope="module")
def exact(smollm2: tuple[EngineProcess, list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory) -> list[Best]:
    return reference("exact", unpacked(files.smollm2(), tmp_path_factory.mktemp("unpacked")), smollm2[1])


def test_smollm2_has_llama_cpps_tokens(smollm2: tuple[EngineProcess, list[dict[str, Any]]]) -> None:
    engine, expected = smollm2
    found = [post(engine, "/tokenize", prompt=text)["tokens"] for text in TEXTS]
    assert [tokens == case["prompt"] for tokens, case in zip(found, expected, strict=True)] == [True] * len(TEXTS)


def test_smollm2_continues_like_llama_cpp(smollm2: tuple[EngineProcess, list[dict[str, Any]]], exact: list[Best]) -> None:
    """Both round activations to 8 bits, so exact arithmetic says which choices are close: those below a margin, and below the
    margins that llama.cpp's own choices miss. What was counted is printed."""
    engine, expected = smollm2
    missed = [
        margin_of(best)
        for case, steps in zip(expected, exact, strict=True)
        for token, best in zip(case["tokens"], steps, strict=True)
        if token != best[0][0]
    ]
    limit, num_equal, margins = max([CLEAR_MARGIN, *missed]), 0, []
    for case, steps in zip(expected, exact, strict=True):
        body = {"prompt": case["prompt"], "max_tokens": len(case["tokens"]), "temperature": 0, "ignore_eos": True}
        found = post(engine, "/v1/completions", **body, return_token_ids=True)["choices"][0]["token_ids"]
        for ours, theirs, best in zip(found, case["tokens"], steps, strict=True):
            if ours != theirs:
                margins.append(margin_of(best))
                assert margins[-1] <= limit, (case["prompt"], ours, theirs, best[:2])
                break
            num_equal += 1
    print(f"{num_equal} equal tokens, {len(margins)} differences of exact margins {np.round(margins, 3)}; limit {limit:.3f}")
    assert num_equal > 500


def test_smollm2_is_as_exact_as_llama_cpp(smollm2: tuple[EngineProcess, list[dict[str, Any]]], exact: list[Best]) -> None:
    """Log-probabilities at each step of llama.cpp's answers."""
    engine, expected = smollm2
    errors, num_missed = np.zeros(2), np.zeros(2)
    for case, steps in zip(expected, exact, strict=True):
        body = {"prompt": case["prompt"] + case["tokens"], "max_tokens": 1, "prompt_logprobs": len(steps[0])}
        answer = post(engine, "/v1/completions", **body)["choices"][0]["prompt_logprobs"][len(case["prompt"]) :]
        ours = [{int(token): found["logprob"] for token, found in step.items()} for step in answer]
        for best, *found in zip(steps, ours, map(dict, case["best"]), strict=True):
            tokens = [token for token, _ in best if all(token in each for each in found)]
            errors += [np.mean([abs(each[token] - dict(best)[token]) for token in tokens]) for each in found]
            num_missed += [max(each, key=each.__getitem__) != best[0][0] for each in found]
    errors /= sum(map(len, exact))
    print(f"mean errors: ours {errors[0]:.4f}, llama.cpp's {errors[1]:.4f}; other choices than exact: {num_missed}")
    assert errors[0] < 1.1 * errors[1]
    assert num_missed[0] < 1.5 * num_missed[1]


def margin_of(best: list[tuple[int, float]]) -> float:
    return best[0][1] - best[1][1]


def test_minilm_has_the_vectors_of_transformers() -> None:
    path = files.minilm()
    expected = np.array(reference("embeddings", path, TEXTS))
    with EngineProcess(path, "--dtype", "float32") as engine:
        found = np.array([row["embedding"] for row in post(engine, "/v1/embeddings", input=list(TEXTS))["data"]])
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("name", files.TOKENIZERS)
def test_tokenizer_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    """Texts and conversations, through a model of random weights with this vocabulary. transformers 5 rebuilds that of
    Llama 2 so that the leading space of a text is not doubled, unlike tokenizer.json and SentencePiece."""
    texts = [text for text in TEXTS if name != "llama2" or not text.startswith(" ")]
    source = files.tokenizer(name)
    for file in source.iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    vocabulary = json.loads((source / "tokenizer.json").read_text())
    largest = max([*vocabulary["model"]["vocab"].values(), *(token["id"] for token in vocabulary["added_tokens"])])
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": largest + 1, "hidden_size": 16},
        **{"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
        **{"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    has_template = "chat_template" in json.loads((source / "tokenizer_config.json").read_text())
    with EngineProcess(tmp_path, "--load-format", "dummy") as engine:
        found = [post(engine, "/tokenize", prompt=text)["tokens"] for text in texts]
        rendered = [post(engine, "/tokenize", messages=messages)["tokens"] for messages in CONVERSATIONS if has_template]
    assert found == reference("tokens", source, texts)
    assert rendered == (reference("chats", source, CONVERSATIONS) if has_template else [])
