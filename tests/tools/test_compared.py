"""`.github/COMPARED.md`, the comparison with other engines: every claim about ours names existing tests."""

from __future__ import annotations

import ast
import functools
import re

from tests.paths import REPOSITORY

COMPARED = (REPOSITORY / ".github" / "COMPARED.md").read_text()
ENGINES = ["Tokamak", "vLLM", "SGLang", "llama.cpp", "Ollama", "FastDeploy"]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in COMPARED.splitlines() if line.startswith("|")]
FEATURES = [row for row in ROWS if row[0] and set(row[0]) != {"-"}]


@functools.cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((REPOSITORY / "tests" / path).read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


def test_every_cell_is_an_answer() -> None:
    assert len(FEATURES) > 50
    assert all(row[1:] == [*ENGINES, "our test"] for row in ROWS if not row[0])
    for feature, *answers, _ in FEATURES:
        assert len(answers) == len(ENGINES), feature
        for answer in answers:
            assert re.fullmatch(r"no|\?|yes(: .+)?|part: .+", answer), (feature, answer)


def test_claims_name_existing_tests() -> None:
    for feature, ours, *_, shown in FEATURES:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", shown)
        assert ", ".join(f"`{path}::{test}`" for path, test in named) == shown, feature
        assert bool(named) == (ours != "no"), feature
        for path, test in named:
            assert test in functions_of(path), (feature, path, test)
