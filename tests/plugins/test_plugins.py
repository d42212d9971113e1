"""Plugins: a package that is really installed and served, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from engine.checkpoint.families import FAMILIES, MODEL_TYPES
from engine.errors import OptionError
from engine.plugins import load_plugins
from tests.e2e.engine_process import GOLDEN, EngineProcess
from tests.paths import REPOSITORY

EXAMPLE = REPOSITORY / "tests" / "plugins" / "example"
TEMPLATE = """{%- for m in messages -%}<{{ m.role }}>{{ m.content }}{%- for c in m.tool_calls or [] -%}
@@{{ c.function.name }} {{ c.function.arguments }}@@{%- endfor -%}{%- endfor -%}{{ tools }}{# << and >> around reasoning #}>>"""
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}},
    }
]
INSTALL_SECONDS = 60


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory into which pip installed the example."""
    source, target = tmp_path_factory.mktemp("source") / "example", tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLE, source)
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, str(source)]
    subprocess.run(command, check=True, timeout=INSTALL_SECONDS, stdin=subprocess.DEVNULL)
    return target


def test_installed_package_is_served(installed: Path, tmp_path: Path) -> None:
    model = tmp_path / "example"
    shutil.copytree(GOLDEN / "qwen3", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "example", "architectures": ["ExampleForCausalLM"]}))
    environment = {"PYTHONPATH": os.pathsep.join((str(installed), os.environ.get("PYTHONPATH", "")))}
    options = ("--plugins", "tokamak-example", "--chat-template", TEMPLATE, "--max-num-seqs", "2")
    with EngineProcess(model, *options, environment=environment) as engine, httpx.Client(base_url=engine.url) as client:
        about = client.get("/v1/models").json()["data"][0]
        assert (about["tool_call_parser"], about["reasoning_parser"]) == ("example", "example")
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": "required"}
        answer = client.post("/v1/chat/completions", json=body | {"parallel_tool_calls": False}).json()
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "f"
        assert json.loads(call["function"]["arguments"])["a"] in (1, 2)


def test_models_of_a_plugin_need_it(tmp_path: Path) -> None:
    model = tmp_path / "example"
    shutil.copytree(GOLDEN / "qwen3", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "example", "architectures": ["ExampleForCausalLM"]}))
    engine = EngineProcess(model)
    engine.launch()
    assert engine.process is not None
    assert engine.process.wait(timeout=INSTALL_SECONDS) == 2
    assert "example" not in FAMILIES


def package(directory: Path, name: str, module: str, source: str, *entries: str) -> None:
    """Write an installed package with one module and these lines of entry points."""
    (directory / f"{module}.py").write_text(source)
    about = directory / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("\n".join(entries) + "\n")


@pytest.mark.parametrize(
    ("source", "group", "message"),
    [
        ("1 / 0", "families", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("raise SystemExit('no')", "parsers", "cannot be loaded: SystemExit: no"),
        ("", "families", "cannot be loaded: AttributeError"),
        ("FOUND = 3", "families", "expected a Family, got int"),
        ("FOUND = 3", "parsers", "expected a CallFamily or a ThinkingFamily, got int"),
        ("from engine.checkpoint.families.qwen3 import Qwen3 as FOUND", "families", "the model type qwen3 is already that"),
        (
            "from engine.checkpoint.families.qwen3 import Qwen3\nclass FOUND(Qwen3):\n    name = 'other'",
            "families",
            "the class Qwen3ForCausalLM is already that of the family qwen3",
        ),
        ("from engine.parsers.glm45 import Glm45 as FOUND", "parsers", "already a parser of tool calls named glm45"),
        (
            "from engine.parsers.thinking import ThinkingFamily\nFOUND = ThinkingFamily('auto')",
            "parsers",
            "already a parser of reasoning named auto",
        ),
        ("class FOUND:\n    def __init__(self): 1 / 0", "parsers", "cannot be used: ZeroDivisionError: division by zero"),
        (
            "from engine.checkpoint.families.family import Family\nclass FOUND(Family): name = 'other'",
            "families",
            "cannot be used: AttributeError: 'FOUND' object has no attribute 'class_names'",
        ),
        ("class FOUND:\n    def __init__(self, a): pass", "parsers", "missing 1 required positional argument"),
    ],
)
def test_plugin_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, group: str, message: str
) -> None:
    module = f"broken_{tmp_path.name}".replace("-", "_")
    package(tmp_path, "broken-package", module, source, f"[tokamak.{group}]", f"broken = {module}:FOUND")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(FAMILIES)
    for name in ("broken", "broken_package"):
        with pytest.raises(OptionError) as caught:
            load_plugins([name])
        assert str(caught.value).startswith(f"--plugins {name}: {module}:FOUND of the package broken-package")
        assert message in str(caught.value)
    assert set(FAMILIES) == before


def test_error_of_a_family_names_its_plugin(tmp_path: Path) -> None:
    """One line and exit code 2, whether the start reads it or an actor."""
    sources = ("def vision(self, options, text): return text.values['nothing']", "model = 'broken_family:Nothing'")
    for number, body in enumerate(sources):
        directory = tmp_path / str(number)
        directory.mkdir()
        source = f"from engine.checkpoint.families.qwen3 import Qwen3\nclass Broken(Qwen3):\n    name = 'broken'\n    {body}\n"
        source += "    class_names = ('BrokenForCausalLM',)\n    gguf_name = None\n"
        source += "class Nothing:\n    def __init__(self, config, weights): self.layers = 1 / 0\n"
        package(directory, "broken-family", "broken_family", source, "[tokamak.families]", "broken = broken_family:Broken")
        model = directory / "model"
        shutil.copytree(GOLDEN / "qwen3", model)
        config = json.loads((model / "config.json").read_text())
        changed = config | {"model_type": "broken", "architectures": ["BrokenForCausalLM"]}
        (model / "config.json").write_text(json.dumps(changed))
        environment = {"PYTHONPATH": os.pathsep.join((str(directory), os.environ.get("PYTHONPATH", "")))}
        engine = EngineProcess(model, "--plugins", "broken", environment=environment)
        try:
            engine.launch()
            assert engine.wait_for_exit() == 2
            where = ("vision failed: KeyError: 'nothing'", "__init__ failed: ZeroDivisionError: division by zero")[number]
            assert f"--plugins broken (package broken-family): {where} (broken_family.py, line " in engine.text
            assert "Traceback" not in engine.text
        finally:
            engine.close()


def test_unknown_plugin_is_refused_with_those_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "one", "one", "", "[tokamak.parsers]", "known = one:FOUND")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(OptionError, match=r"--plugins unknown: no installed package has an entry point .* installed: known"):
        load_plugins(["unknown"])


def test_entry_point_of_two_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        package(tmp_path, name, name, "", "[tokamak.parsers]", f"same = {name}:FOUND")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(OptionError, match=r"both have the entry point same in tokamak\.parsers; uninstall one"):
        load_plugins(["same"])


def test_other_names_of_a_family_are_not_inherited() -> None:
    for name, family in MODEL_TYPES.items():
        assert name == family.name or name in vars(type(family))["other_names"]
