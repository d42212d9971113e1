"""An api server for all tests that need no particular one."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.api.api_server import ApiServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(tmp_path_factory.mktemp("run")) as running:
        yield running


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Server of a model that thinks and calls tools."""
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with ApiServer(tmp_path_factory.mktemp("run"), sse_keep_alive_interval_s=0.02, **parsers) as running:
        yield running


@pytest.fixture(scope="module")
def responder(thinker: ApiServer) -> Iterator[openai.OpenAI]:
    """Client of `thinker`."""
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def client(server: ApiServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
