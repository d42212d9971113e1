"""An edge for all tests that need no particular one."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.api.edge import Edge


@pytest.fixture(scope="session")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with Edge(tmp_path_factory.mktemp("run")) as running:
        yield running


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """Of a model that thinks and calls tools."""
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with Edge(tmp_path_factory.mktemp("run"), sse_keep_alive_interval_s=0.02, **parsers) as running:
        yield running


@pytest.fixture(scope="module")
def responder(thinker: Edge) -> Iterator[openai.OpenAI]:
    """A client of `thinker`."""
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def client(edge: Edge) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0) as made:
        yield made
