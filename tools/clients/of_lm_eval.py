"""lm-evaluation-harness with `local-completions`: generated text, and log-probabilities of prompt tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.clients.checks import Server, check, main, program, run

SUMS = [(12, 30), (7, 8), (21, 4), (3, 300), (50, 9)]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{rest}
"""
GENERATED = """
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["<|im_end|>"], max_gen_toks: 24, temperature: 0}
filter_list:
  - name: number
    filter: [{function: regex, regex_pattern: '(\\d+)\\D*$'}, {function: take_first}]
metric_list: [{metric: exact_match}]
"""
CHOSEN = """
doc_to_choice: choices
doc_to_target: 1
target_delimiter: ""
metric_list: [{metric: acc}]
"""


def evaluate(server: Server, name: str, kind: str, rest: str) -> dict[str, Any]:
    """The task's results."""
    place = Path(server.place) / name
    place.mkdir()
    before = "<|im_start|>user\nWhat is {} + {}?<|im_end|>\n<|im_start|>assistant\n"
    questions = [
        {
            "question": before.format(a, b),
            "answer": str(a + b),
            "choices": [f"{a} + {b} = {found}" for found in (a + b + 11, a + b)],
        }
        for a, b in SUMS
    ]
    (place / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    (place / f"{name}.yaml").write_text(TASK.format(name=name, file=place / "questions.jsonl", kind=kind, rest=rest))
    arguments = f"model={server.model},base_url={server.url}/v1/completions,tokenizer={server.tokenizer},max_length=1024"
    run(
        program("lm_eval"),
        *("--model", "local-completions", "--model_args", arguments, "--tasks", name),
        *("--include_path", str(place), "--output_path", str(place / "results")),
    )
    (file,) = (place / "results").rglob("results*.json")
    found: dict[str, Any] = json.loads(file.read_text())["results"][name]
    return found


@check("generate_until")
def generated(server: Server) -> str:
    found = evaluate(server, "sums", "generate_until", GENERATED)
    assert found["exact_match,number"] == 1, found
    return f"{len(SUMS)} of {len(SUMS)} sums are right"


@check("loglikelihood (echo, prompt log-probabilities)")
def chosen(server: Server) -> str:
    found = evaluate(server, "choices", "multiple_choice", CHOSEN)
    assert found["acc,none"] == 1, found
    return f"{len(SUMS)} of {len(SUMS)} choices are right"


if __name__ == "__main__":
    main()
