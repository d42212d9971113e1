"""Reads options from the command line, the environment and a file, in that order of precedence, each value by itself.

    --max-model-len 4096        command line
    TOKAMAK_MAX_MODEL_LEN=4096  environment
    max-model-len: 4096         --config FILE (YAML or JSON; underscores do as well)

Called once by `engine/supervisor/launch.py`. The options are in `table.py`; `resolve.py` checks values against each other.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from engine.errors import OptionError
from engine.options.argument_parser import ArgumentParser
from engine.options.nearest import nearest
from engine.options.other_hosts import FLAGS, OTHER_HOSTS, refuse_other_hosts
from engine.options.table import GROUPS, OPTIONS, Option, OptionValues
from engine.options.vllm import spelled, table, take_flag, translated
from engine.options.vllm_flags import VLLM_FLAGS, Fate

ENVIRONMENT_PREFIX = "TOKAMAK_"
MAX_SHOWN = 200  # characters of a wrong value in a message
FOREIGN_VARIABLES = {  # of other programs -> the option; ours take precedence
    "AWS_ACCESS_KEY_ID": "object_store_access_key",
    "AWS_SECRET_ACCESS_KEY": "object_store_secret_key",
    "AWS_SESSION_TOKEN": "object_store_session_token",
    "AWS_REGION": "object_store_region",
}
TOOL_VARIABLES = (
    "TOKAMAK_ADDED_EXTRA",
    "TOKAMAK_BUILD_ALL",
    "TOKAMAK_EXTRA",
    "TOKAMAK_PYTHON",
    "TOKAMAK_SERVE_SCRIPT",
    "TOKAMAK_SHM_NAMESPACE",
    "TOKAMAK_URL",
    "TOKAMAK_VENV",
)  # variables of tools/serve and the clients


def read_options(
    arguments: Sequence[str], environment: Mapping[str, str], embedded_models: Mapping[str, str] | None = None
) -> OptionValues:
    """Return the option values. `embedded_models`: directories of the models of --demo. Raises OptionError that names the wrong
    option, its source and the expected values; --help and errors of argparse end the process (0, 2)."""
    defaults = {option.key: option.default for option in OPTIONS.values()}
    found = OptionValues(defaults, set(), embedded_models=embedded_models or {})
    parser = make_parser()
    command_line = vars(parser.parse_args(spelled(arguments)))
    config_path = command_line.pop("config", None) or environment.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    model = command_line.pop("MODEL", None)
    if model is not None and model.startswith("-"):  # argparse takes an option with a space in it for a value
        parser.refuse(model)
    if model is not None and command_line.get("model", model) != model:
        raise OptionError(f"two models are given, {model} and --model {command_line['model']}; remove one")
    if model is not None:
        command_line["model"] = model
    if config_path is not None:
        take_file(found, Path(config_path))
    take_environment(found, environment)
    for key, value in command_line.items():
        take(found, key, value, f"--{key.replace('_', '-')}")
    return found


@cache
def make_parser() -> ArgumentParser:
    """Return the command-line parser, with groups. Values stay text: they are checked like those of the other sources."""
    parser = ArgumentParser(
        prog="tokamak serve",
        usage="tokamak serve [MODEL] [options]",
        description="Start the engine and serve a model over HTTP.",
        epilog=(
            "Every option can also be set as TOKAMAK_<NAME> in the environment or by name in the --config file. "
            "The command line overrides the environment, and the environment overrides the file."
        ),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("MODEL", nargs="?", help="same as --model")
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON file with options")
    for title, options in GROUPS.items():
        group = parser.add_argument_group(title)
        for option in options:
            add_argument(group, option)
    for key in OTHER_HOSTS:
        kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if key in FLAGS else {"nargs": "?", "const": ""}
        parser.add_argument(f"--{key.replace('_', '-')}", help=argparse.SUPPRESS, **kind)
    add_flags(parser, "vllm serve", OPTIONS, VLLM_FLAGS)
    return parser


def add_flags(parser: ArgumentParser, program: str, own: Mapping[str, Option], flags: Mapping[str, Fate]) -> None:
    """Add the flags of another program, which --help does not show, and --vllm-flags, which does."""
    for key, fate in flags.items():
        if key not in own:
            kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if fate.is_flag else {"nargs": "?", "const": ""}
            kind = {"nargs": "*"} if fate.takes_several else kind
            parser.add_argument(f"--{key.replace('_', '-')}", help=argparse.SUPPRESS, **kind)
    text = f"list how each flag of `{program}` is handled, and exit"
    parser.add_argument("--vllm-flags", action=_ShowFlags, const=table(own, flags, program), help=text)


class _ShowFlags(argparse.Action):
    """Prints a text and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: str, help: str, default: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, const=const, default=default, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(self.const)
        parser.exit()


def add_argument(group: argparse._ArgumentGroup, option: Option) -> None:
    shown = option.help.replace("%", "%%")
    if option.kind.is_flag:
        group.add_argument(
            f"--{option.name}",
            action=argparse.BooleanOptionalAction,
            help=f"{shown} (default: {'yes' if option.default else 'no'})",
        )
        return
    if option.default not in (None, "", (), {}):
        shown += f" (default: {option.kind.show(option.default)})"
    names = (f"--{option.name}", *filter(None, [option.short]))
    kind: dict[str, Any] = {"action": "append" if option.kind.is_list else "store"}
    if option.takes_several:
        kind = {"action": "extend", "nargs": "+"}
    group.add_argument(*names, metavar=option.kind.metavar, help=shown, **kind)


def take_file(
    found: OptionValues, path: Path, options: Mapping[str, Option] = OPTIONS, flags: Mapping[str, Fate] = VLLM_FLAGS
) -> None:
    for name, value in _read_file(path).items():
        key = str(name).replace("-", "_")
        if key.startswith("no_") and key[3:] in options and options[key[3:]].kind.is_flag and isinstance(value, bool):
            key, value = key[3:], not value
        if key not in options and key not in OTHER_HOSTS and key not in flags:
            raise OptionError(f"{path}: unknown option {name}{_suggestion(key, '-')}")
        if value is not None:
            take(found, key, value, f"{path}: {name}", options, flags)


def _read_file(path: Path) -> dict[str, Any]:
    import yaml  # only for a file

    try:
        content = yaml.safe_load(path.read_text())  # YAML contains JSON
    except OSError as error:
        raise OptionError(f"--config {path}: {error.strerror}") from error
    except Exception as error:  # yaml raises various errors for a value that does not fit its tag, such as !!int
        raise OptionError(f"--config {path} is not valid YAML or JSON: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise OptionError(f"--config {path} contains a {type(content).__name__}, expected option names with values")
    return content


def take_environment(found: OptionValues, environment: Mapping[str, str], options: Mapping[str, Option] = OPTIONS) -> None:
    for variable, key in FOREIGN_VARIABLES.items():
        if environment.get(variable) and key in options:
            take(found, key, environment[variable], variable, options)
    for variable, value in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in (*TOOL_VARIABLES, f"{ENVIRONMENT_PREFIX}CONFIG"):
            continue
        key = variable[len(ENVIRONMENT_PREFIX) :].lower()
        if key in options or key in OTHER_HOSTS or key in VLLM_FLAGS:
            take(found, key, value, variable, options)
        elif key not in OPTIONS:
            found.notes.append(f"ignored environment variable {variable}: unknown option{_suggestion(key, '_', str.upper)}")


def take(
    found: OptionValues,
    key: str,
    value: Any,
    source: str,
    options: Mapping[str, Option] = OPTIONS,
    flags: Mapping[str, Fate] = VLLM_FLAGS,
) -> None:
    """Check one value, a text or a value from a YAML file, and store it."""
    if key in OTHER_HOSTS:
        if value is not False:
            refuse_other_hosts(key, "" if value is True else _shortened(value), source)
        return
    if key not in options:
        value = translated(key, value, source, found.notes) if isinstance(value, str) else value
        key = take_flag(key, value, source, found.notes, flags)
        if key not in options:
            return
    kind = options[key].kind
    value = translated(key, value, source, found.notes) if not isinstance(value, (list, dict)) else value
    parts = value if isinstance(value, list) else [value]
    if isinstance(value, dict) or (len(parts) != 1 and not kind.is_list):
        raise OptionError(f"{source}: expected a single value, got {_shortened(value)}")
    try:
        parsed = [kind.parse(str(part)) for part in parts]
    except ValueError as error:
        raise OptionError(f"{source} {_shortened(value)}: {error}") from None
    found.values[key] = tuple(item for items in parsed for item in items) if kind.is_list else parsed[0]
    found.given.add(key)
    if found.values[key] is None:  # set by `resolve` if not given
        found.given.discard(key)


def _shortened(value: Any) -> str:
    try:
        text = str(value)
    except ValueError:  # Python formats no number of more than 4300 digits
        return "with thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} letters)"


def _suggestion(key: str, separator: str, spell: Any = str) -> str:
    close = nearest(key, OPTIONS)
    prefix = ENVIRONMENT_PREFIX if spell is str.upper else ""
    return f"; did you mean {prefix}{spell(close.replace('_', separator))}?" if close else ""
