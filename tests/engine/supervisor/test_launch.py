"""The ready lines' suggestions work with the served model."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Literal

import pytest

from engine.config import PoolingConfig
from engine.options.table import OPTIONS
from engine.supervisor.clients import AGENTS, CLIENTS, client_settings
from engine.supervisor.launch import _examples, _places
from tests.engine.scheduler.simulation import small_config
from tools.demo import MODEL, VISION_MODEL


@pytest.mark.parametrize(("path", "depth"), [(MODEL, 0), (VISION_MODEL, 3)])
def test_examples_suit_the_embedded_models(path: Path, depth: int) -> None:
    config = small_config(path, model=str(path), encoder_depth=depth, host="127.0.0.1", port=8001, api_key=("secret",))
    *asking, monitor = _examples(config, "name")
    assert monitor.endswith(f"tokamak top --run {config.run_id}")
    assert all("127.0.0.1:8001" in line and "KEY" in line and "secret" not in line for line in asking)
    if depth == 0:
        assert all("What are you?" in line for line in asking)
        return
    (words,) = map(shlex.split, asking)
    assert words[1] == "chat"
    assert Path(words[words.index("--image") + 1]).is_file()
    assert words[-1] == "How many red shapes are there?"


@pytest.mark.parametrize(("task", "route"), [("embed", "/v1/embeddings"), ("classify", "/v1/rerank")])
def test_examples_suit_pooling_models(task: Literal["embed", "classify"], route: str) -> None:
    pooling = PoolingConfig(task=task, num_values=1)
    config = small_config(MODEL, model=str(MODEL), pooling=pooling, host="127.0.0.1", port=8001)
    curl, *clients, _ = _examples(config, "name")
    words = shlex.split(curl)
    assert words[1] == f"http://127.0.0.1:8001{route}"
    assert "What are you?" in json.loads(words[-1]).values()
    for client in clients:
        compile(shlex.split(client)[-1], "client", "exec")
    assert len(clients) == (task == "embed")


def test_ready_lines_mention_chat_and_the_page() -> None:
    config = small_config(MODEL, model=str(MODEL), host="127.0.0.1", port=8001, api_key=("secret",))
    chat, page = _places(config)
    assert chat.endswith("tokamak chat --url http://127.0.0.1:8001 --api-key KEY")
    assert page.endswith("http://127.0.0.1:8001/")
    socket = small_config(MODEL, model=str(MODEL), uds="/run/it")
    assert [line.split()[-1] for line in _places(socket)] == ["unix:/run/it"]


@pytest.mark.parametrize("client", CLIENTS)
def test_the_settings_of_clients(client: str) -> None:
    config = small_config(MODEL, served_model_name=("the model",), host="127.0.0.1", port=8001, api_key=("secret",))
    lines = client_settings(client, config)
    text = "\n".join(lines)
    assert "http://127.0.0.1:8001" in text
    assert "KEY" in text
    assert "secret" not in text
    if client == "opencode":
        assert list(json.loads("".join(lines[1:]))["provider"]["tokamak"]["models"]) == ["the model"]
    assert OPTIONS["print_client"].kind.parse(client) == client


@pytest.mark.parametrize("client", CLIENTS)
def test_agents_are_warned_of_a_small_context(client: str) -> None:
    small = small_config(MODEL, served_model_name=("m",), host="127.0.0.1", port=8001, max_model_len=4096)
    large = small_config(MODEL, served_model_name=("m",), host="127.0.0.1", port=8001, max_model_len=1 << 17)
    assert ("too small" in "\n".join(client_settings(client, small))) == (client in AGENTS)
    assert "too small" not in "\n".join(client_settings(client, large))


def test_claude_code_gets_all_models_and_the_context() -> None:
    config = small_config(MODEL, served_model_name=("m",), host="127.0.0.1", port=8001, max_model_len=65536)
    lines = client_settings("claude-code", config)
    for kind in ("SONNET", "OPUS", "HAIKU"):
        assert f"export ANTHROPIC_DEFAULT_{kind}_MODEL=m" in lines
    assert "export CLAUDE_CODE_MAX_CONTEXT_TOKENS=65536" in lines
