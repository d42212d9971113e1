"""Read the flags of `vllm serve` from a wheel of vLLM, without installing it: `python -m tools.vllm_flags WHEEL...`.

Prints JSON for `tests/engine/options/vllm_flags.json`: version -> flag -> whether it takes no value. The wheels come from `pip
download --no-deps vllm==VERSION`. The sources are parsed, never run: calls of `add_argument` in the modules that build the
parser, and the fields of its dataclasses.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

_PARSERS = ("engine/arg_utils.py", "cli_args.py", "entrypoints/cli/serve.py")
_CONFIGS = "vllm/config/"
_BOOLEANS = ("bool", "bool | None")


def main(arguments: Sequence[str]) -> int:
    """Run and return the exit code."""
    found = {Path(name).name.split("-")[1]: dict(sorted(flags_in(Path(name)).items())) for name in arguments}
    print(json.dumps(found, indent=1))
    return 0 if found else 2


def flags_in(wheel: Path) -> dict[str, bool]:
    """Return the names of flags with underscores, and whether each takes no value."""
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        parsers = [ast.parse(packed.read(name)) for name in names if name.endswith(_PARSERS)]
        configs = [ast.parse(packed.read(name)) for name in names if name.startswith(_CONFIGS)]
    types = {name: type_ for tree in (*configs, *parsers) for _, name, type_ in _fields(tree)}
    flags: dict[str, bool] = {}
    for tree in parsers:
        for class_name, name, type_ in _fields(tree):
            if class_name.endswith("FrontendArgs"):
                flags[name] = type_ in _BOOLEANS
        for names_given, takes_none in _calls(tree):
            for name in names_given:
                flags[name] = takes_none or types.get(name) in _BOOLEANS
    return flags


def _fields(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Yield (class, field, type) of each annotated field."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    yield node.name, each.target.id, ast.unparse(each.annotation)


def _calls(tree: ast.AST) -> Iterator[tuple[list[str], bool]]:
    """Yield the flags of each `add_argument`, and whether the call says that they take no value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            action = next((ast.unparse(each.value) for each in node.keywords if each.arg == "action"), "")
            names = [text[2:].replace("-", "_") for text in texts if text.startswith("--")]
            yield names, "store_true" in action or "Boolean" in action


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
