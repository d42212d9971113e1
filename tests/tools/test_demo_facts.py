"""The demonstration model's facts about Tokamak are true: commands, options, routes, files, numbers and names of its
answers."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
from starlette.routing import Route

from api.routes import routes
from engine.options.resolve import EMBEDDED_MODEL_NAMES
from engine.options.table import OPTIONS
from engine.options.vllm import VLLM_FLAGS
from engine.process.topology import MEDIA, ROLES
from tests.e2e.engine_process import DEMO
from tests.paths import REPOSITORY
from tools import ctl
from tools.cli import COMMANDS
from tools.demo.facts import TOKAMAK_FACTS
from tools.demo.newcomers import NEWCOMER_QUESTIONS
from tools.demo.small_talk import FALLBACK_ANSWER, SMALL_TALK

ANSWERS = {fact.topic: fact.answer for fact in TOKAMAK_FACTS}
CODE = re.findall(r"`([^`]+)`", " ".join(ANSWERS.values()))
WORDS_OF_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
OTHER_PROGRAMS_OPTIONS = {"--version", "--vllm-flags", "--help", "--config"}  # of no row of the table
REQUEST_FIELDS = {
    *("messages", "stream", "temperature", "top_p", "top_k", "seed", "max_tokens", "tools", "response_format"),
    *("structured_outputs", "reasoning_effort", "chat_template_kwargs"),
}


def ctl_commands() -> set[str]:
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        ctl.main(["--help"])
    return set(re.findall(r"^ {4}([a-z][a-z-]+)", shown.getvalue(), re.MULTILINE))


def words_in(pattern: str) -> set[str]:
    return {match for text in CODE for match in re.findall(pattern, text)}


def test_topics_are_told_apart() -> None:
    facts = (*TOKAMAK_FACTS, *SMALL_TALK)
    assert len({fact.topic for fact in facts}) == len(facts)
    asked = {topic for topics, _ in NEWCOMER_QUESTIONS if topics[0] != "=" for topic in topics.split("/")}
    assert asked - {"unknown", "large"} <= {fact.topic for fact in facts}


def test_commands_of_answers_exist() -> None:
    assert words_in(r"(?<!from )\btokamak ([a-z][\w-]*)") <= set(COMMANDS)
    assert words_in(r"\btokamak ctl ([\w-]+)") <= ctl_commands()


def test_options_of_answers_exist() -> None:
    found = words_in(r"--[a-z][\w-]*") - OTHER_PROGRAMS_OPTIONS
    assert len(found) > 20
    named = {option.lstrip("-").removeprefix("no-") for option in found}
    assert named <= {option.name.removeprefix("no-") for option in OPTIONS.values()}


def test_routes_of_answers_exist() -> None:
    paths = {route.path for route in routes() if isinstance(route, Route)}
    assert {text for text in CODE if re.fullmatch(r"/[a-z0-9/_]+", text)} <= paths


def test_files_of_answers_exist() -> None:
    found = words_in(r"(?<![\w/.-])((?:tools|\.github)/[\w./-]+|README\.md)")
    assert {"tools/serve", "tools/test"} <= found
    assert all((REPOSITORY / name).exists() for name in found)


def test_listed_actors_exist() -> None:
    assert ANSWERS["actors"].startswith(f"There are {WORDS_OF_NUMBERS[len(ROLES)]} kinds of actors: ")
    listed = ANSWERS["actors"].partition(": ")[2].partition(".")[0]
    assert set(re.split(", | and ", listed)) == set(ROLES)
    assert MEDIA in ROLES
    assert {"supervisor", "api actor", "media actor", "tokenizer", "scheduler", "cache actor", "worker"} <= set(ANSWERS)


@pytest.mark.parametrize(
    ("topic", "option"),
    [("port", "host"), ("port", "port"), ("users", "max_num_seqs")],
)
def test_defaults_of_answers(topic: str, option: str) -> None:
    assert str(OPTIONS[option].default) in ANSWERS[topic]


def test_death_limit_of_answer() -> None:
    assert f"{OPTIONS['restart_window'].default:g} seconds" in ANSWERS["death"]
    assert WORDS_OF_NUMBERS[OPTIONS["restart_limit"].default] in ANSWERS["death"]


def test_choices_of_answers() -> None:
    for option, topic in (("quantization", "memory"), ("print_client", "coding clients"), ("demo", "vision")):
        flag = option.replace("_", "-")
        found = set(re.findall(rf"(?:--{flag} |`)([a-z][\w-]*)`", ANSWERS[topic]))
        assert found
        assert all(OPTIONS[option].kind.parse(word) for word in found)


def test_size_and_context_of_answers() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert f"{config['max_position_embeddings']} tokens" in ANSWERS["context"]
    assert sum(path.stat().st_size for path in Path(DEMO).glob("*.safetensors")) < 4 * 2_000_000
    assert EMBEDDED_MODEL_NAMES["text"] in ANSWERS["who"]


def test_model_says_that_it_is_a_toy() -> None:
    for answer in (ANSWERS["who"], ANSWERS["skills"], ANSWERS["wrong"], FALLBACK_ANSWER):
        assert "toy" in answer


def test_cpu_needs_no_paddle() -> None:
    """The answer says so: an install for the CPU alone has no Paddle."""
    assert "PaddlePaddle is needed only for reference ops and for devices" in ANSWERS["framework"]
    project = (REPOSITORY / "pyproject.toml").read_text()
    (needed,) = re.findall(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert "paddle" not in needed
    assert re.search(r'^cpu = \[.*"paddlepaddle', project, re.MULTILINE)


def test_vllm_flags_are_shown() -> None:
    assert VLLM_FLAGS
    assert "--vllm-flags" in ANSWERS["vllm"]


def test_other_code_of_answers_is_known() -> None:
    """Code that no other test checks."""
    rest = [text for text in CODE if not re.search(r"tokamak|--|/|README", text)]
    known = REQUEST_FIELDS | {"wint4", "codex", "opencode", "open-webui", "vllm", "openai", "vllm serve", "enable_thinking"}
    assert set(rest) - known - {"Authorization: Bearer KEY", "TOKAMAK_PORT=9000"} == set()
