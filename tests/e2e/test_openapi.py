"""schemathesis against the running engine's own OpenAPI document: it describes the actual behaviour, and nothing is a 5xx."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.engine_process import GOLDEN, OPERATOR, REPOSITORY, EngineProcess

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"

# `test_pooling.py` has an engine that answers these
POOLING_ROUTES = "^/v1/(embeddings|score|rerank)$|^/(v2/rerank|pooling|classify)$|^/api/(embed|embeddings)$"
ORDERS = "^/(admin|sleep|wake_up|is_sleeping|clear_load_weight|update_model_weight)"  # after which other answers differ


def fuzz(engine: EngineProcess, *options: str) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{engine.url}/openapi.json", *options]
    command += ["--seed", "7", "--request-timeout", "120", "--generation-database", "none"]
    command += ["--suppress-health-check", "all", "--header", f"authorization: {OPERATOR['authorization']}"]
    command += ["--checks", CHECKS]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


def phases(config: pytest.Config) -> str:
    """Return the phases of a run. With `--all-cases` each value of each field is sent as well, in thousands of requests."""
    return "examples,coverage,fuzzing" if config.getoption("--all-cases") else "examples,fuzzing"


@pytest.mark.timeout(1800)  # a busy machine takes long for thousands of requests
def test_the_document_holds(pytestconfig: pytest.Config) -> None:
    with EngineProcess(GOLDEN / "qwen3", "--max-model-len", "256") as engine:
        others = f"{ORDERS}|{POOLING_ROUTES}"
        fuzz(engine, "--exclude-path-regex", others, "--phases", "examples,fuzzing", "--max-examples", "2")
        if pytestconfig.getoption("--all-cases"):
            # each field of the translated ones was covered once (4,003 requests, minutes); it is chat that answers them
            others += "|^/(v1/messages|v1/responses|api/)"
            fuzz(engine, "--exclude-path-regex", others, "--phases", "coverage", "--max-examples", "4")
        assert engine.metric("http_responses_total", status="5xx") == 0
        fuzz(engine, "--include-path-regex", ORDERS, "--phases", "examples,coverage,fuzzing", "--max-examples", "3")
        assert engine.metric("http_responses_total", status="5xx") == 0
