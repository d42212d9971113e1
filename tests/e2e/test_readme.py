"""The README's own commands give the answers that it shows, at the address of an engine of the test."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.e2e.engine_process import DEMO, EngineProcess
from tests.paths import REPOSITORY
from tests.waiting import WATCHDOG_S
from tools.demo import VISION_MODEL

BLOCKS = [
    re.sub(r"^    ", "", block, flags=re.MULTILINE).strip()
    for block in re.findall(r"(?:^(?: {4}.*)?\n)+", (REPOSITORY / "README.md").read_text(), re.MULTILINE)
    if block.strip()
]
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(DEMO) as engine:
        yield engine


def block(part: str) -> str:
    """Return the only block of the README that has `part`."""
    (found,) = (text for text in BLOCKS if part in text)
    return found


def typed(text: str, engine: EngineProcess | None = None, typed_then: str = "") -> str:
    """Return the output of a block of Python or of the shell, typed in the checkout."""
    text = text.replace(ADDRESS, engine.url) if engine else text
    text = text.replace(".venv/bin/tokamak", f"{sys.executable} -m tools.cli")
    is_python = text.startswith("from ")
    command = [sys.executable, "-c", text] if is_python else ["bash", "-c", text]
    done = subprocess.run(command, input=typed_then, capture_output=True, text=True, timeout=WATCHDOG_S, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_curl(engine: EngineProcess) -> None:
    assert "12 + 345 = 357" in typed(block("curl "), engine)


def test_openai_client(engine: EngineProcess) -> None:
    assert typed(block("import OpenAI"), engine) == "tenalp\n"


def test_chat_and_looking_at_it(engine: EngineProcess) -> None:
    """Each command finds the engine by itself."""
    assert ".venv/bin/tokamak chat" in BLOCKS
    assert "12 + 345 = 357" in typed(".venv/bin/tokamak chat", typed_then="What is 12 + 345?\n")
    top, processes = block("tokamak top").splitlines()
    assert engine.url in typed(f"{top} --once")
    assert f"  {engine.actors()['worker0']['pid']}  " in typed(processes)


def test_from_python() -> None:
    assert typed(block("import LLM")) == "12 + 345 = 357\n"


def test_a_picture() -> None:
    with EngineProcess(VISION_MODEL) as engine:
        assert typed(block("--image").replace("chat", f"chat --url {engine.url}"), engine).endswith(": 3\n")
