"""Every package that ours import is declared, and serving on the native ops needs none but the base ones."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest

from tests.paths import REPOSITORY

PACKAGES = ("api", "engine", "ops", "shm", "tools", "workers")
BY_HAND = {  # run by hand; their docstrings name what to install
    "tools/bench/llama_encoder.py": {"llama-cpp"},
    "tools/bench/llama_server.py": {"llama-cpp"},
    "tools/bench/openvino_pictures.py": {"openvino", "openvino-genai"},
    "tools/bench/openvino_server.py": {"openvino-genai"},
    "tools/bench/transformers_encoder.py": {"torch", "transformers"},
    "tools/bench/transformers_text.py": {"torch", "transformers"},
    "tools/bench/transformers_pictures.py": {"transformers"},
    **{  # tools/test-clients installs them
        f"tools/clients/of_{name}.py": {name, "openai", "pydantic", "langchain-core", "langchain-openai"}
        for name in ("openai", "anthropic", "ollama", "litellm", "langchain", "instructor", "vllm")
    },
    "tools/clients/run.py": {"tests"},  # of the same checkout: a model that makes vectors
    **{
        f"tools/device/{name}.py": {"tests", "httpx"} for name in ("engines", "whole", "served")
    },  # likewise; tools/test runs them
    **{f"tools/device/{name}.py": {"tests"} for name in ("evidence", "folder", "speed")},
    "tools/device/vendor.py": {"torch", "transformers"},
    "tools/demo/evaluate.py": {"httpx"},
    "tools/demo/vision/agreement.py": {"httpx", "torch", "transformers"},
    "tools/demo/vision/evaluate.py": {"httpx"},
    **{f"tools/demo/vision/{name}.py": {"torch", "safetensors"} for name in ("batches", "checkpoint", "network", "train")},
    **{
        f"tools/demo/{name}.py": {"torch", "safetensors"}
        for name in ("batches", "checkpoint", "drafts", "examine", "muon", "network", "state", "train")
    },
}
IMAGE_READERS = ("engine/media/", "tools/bench/transformers_pictures.py", "tools/demo/vision/")
PADDLE_USERS = ("ops/paddle/", "workers/devices/", "workers/rank_group/gloo.py")


packages_distributions = cache(importlib.metadata.packages_distributions)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def declared(extra: str = "") -> set[str]:
    """Return the distributions that `pip install tokamak` brings, or that an extra adds."""
    condition = f'extra == "{extra}"' if extra else ""
    requirements = [text.replace("'", '"').partition(";") for text in importlib.metadata.requires("tokamak-serve") or []]
    names = [text for text, _, marker in requirements if marker.strip() == condition]
    return {normal(re.split(r"[^\w.-]", name, maxsplit=1)[0]) for name in names}


def imported(path: str) -> Iterator[str]:
    """Yield the root packages that a module imports, except for annotations only."""
    waiting: list[ast.AST] = [ast.parse((REPOSITORY / path).read_text(), path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]
        waiting.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_is_declared(package: str) -> None:
    distributions = packages_distributions()
    undeclared = []
    for file in sorted((REPOSITORY / package).rglob("*.py")):
        path = str(file.relative_to(REPOSITORY))
        allowed = declared() | BY_HAND.get(path, set())
        if path.startswith(PADDLE_USERS):
            allowed |= declared("cpu")
        if path.startswith(IMAGE_READERS):
            allowed |= declared("vision")
        if path == "engine/checkpoint/hubs/modelscope.py":
            allowed |= declared("modelscope")
        if path == "api/span_sender.py":
            allowed |= declared("otel") | {"opentelemetry-api"}  # which comes with the sdk
        for name in set(imported(path)) - {*PACKAGES, "tokamak", *sys.stdlib_module_names}:
            if not allowed.intersection(normal(origin) for origin in distributions.get(name, [name])):
                undeclared.append((path, name))
    assert undeclared == []


def test_a_private_class_of_uvicorn_is_bounded() -> None:
    """api/connection.py builds on a private class, which any release may change."""
    assert any(text.startswith("uvicorn") and "<" in text for text in importlib.metadata.requires("tokamak-serve") or [])


def test_native_serving_imports_no_paddle() -> None:
    """All modules of actors, the command line, and a device with native ops."""
    code = """
import sys
from engine.process.topology import TARGETS
import importlib
import tools.serving
from workers.devices.device import make_device
for target in TARGETS.values():
    importlib.import_module(target.partition(":")[0])
make_device("cpu", "native", 1)
print([name for name in sys.modules if name.partition(".")[0] in ("paddle", "openai", "torch")])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300, cwd=REPOSITORY)
    assert done.stdout == "[]\n"


COSTLY = {
    "argparse",
    "asyncio",
    "dataclasses",
    "difflib",
    "engine.metrics",
    "gguf",
    "hashlib",
    "importlib.metadata",
    "numpy",
    "paddle",
    "rich",
    "ssl",
    "yaml",
    "zmq",
}
LOADED = {  # of these, for itself or by what others wrote
    "tools.serving": {"argparse"},
    "engine.scheduler.actor": set(),
    "engine.cache.actor": {"zmq"},
    "engine.tokenizer.actor": {"dataclasses", "hashlib"},
    "workers.actor": {"numpy"},
    "api.server": {"asyncio", "dataclasses", "hashlib", "ssl"},
}


@pytest.mark.parametrize("module", LOADED)
def test_a_start_loads_no_more_than_it_needs(module: str) -> None:
    """Six processes import at once what they need for READY: a second start is mostly that, and each keeps it. A dataclass,
    which compiles its methods and imports `inspect`, costs twenty times as much as a struct; `hashlib` maps OpenSSL."""
    code = f"import sys, engine.process.main, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300, cwd=REPOSITORY)
    assert COSTLY.intersection(done.stdout.split()) == LOADED[module]
