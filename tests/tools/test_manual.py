"""README and manual say what is there: every option, route, command, flag, test and path that they name exists, and none is
missing; every link leads somewhere, and every page is found from the README, which stays short.

`tests/e2e/test_readme.py` runs what the README tells a new request to run.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from starlette.routing import Route

from api.routes import routes
from engine.checkpoint.families import FAMILIES, MODEL_TYPES
from engine.options.other_hosts import OTHER_HOSTS
from engine.options.router import ROUTER_OPTIONS
from engine.options.table import OPTIONS
from engine.options.vllm_flags import VLLM_FLAGS
from engine.options.vllm_router_flags import ROUTER_FLAGS
from tests.paths import REPOSITORY
from tools.cli import BENCHES, COMMANDS
from tools.cli import main as tokamak

MANUAL = REPOSITORY / ".github" / "manual"
README = REPOSITORY / "README.md"
PAGES = {path.name: path.read_text() for path in (README, *sorted(MANUAL.glob("*.md")))}
EVERYTHING = "\n".join(PAGES.values())
LINKED = [README, *sorted((REPOSITORY / ".github").rglob("*.md")), *sorted((REPOSITORY / "tools").rglob("*.md"))]
MAX_README_BYTES = 12 << 10
MAX_SCREENSHOT_BYTES = 600_000
OTHERS_FLAGS = {  # of programs that are not ours: docker, kubectl, pip, our scripts, pytest
    "--build",
    "--extra-index-url",
    "--fast",
    "--for",
    "--from-file",
    "--here",
    "--read-only",
    "--rows",
    "--sanitize",
    "--screenshots",
    "--tmpfs",
    "--wheel",
}


# ---------------------------------------------------------------------------------------------- what is named is there


def test_every_family_has_a_row() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|", (MANUAL / "models.md").read_text().partition("## Files")[0], re.MULTILINE)
    listed = [name for row in rows for name in re.findall("`([^`]*)`", row)][1:]  # without the head
    assert len(set(listed)) == len(listed)
    assert set(FAMILIES) <= set(listed) <= set(MODEL_TYPES)


def test_every_option_is_in_one_table() -> None:
    rows = re.findall(r"^\| `--(no-)?([a-z-]+)` \| ([^|]*?) ?\|", EVERYTHING, re.MULTILINE)
    options = OPTIONS | ROUTER_OPTIONS
    assert len(rows) == len(options)
    for negation, name, default in rows:
        option = options[name.replace("-", "_")]
        if option.kind.is_flag:
            assert (bool(negation), default) == (option.default, ""), name
        elif option.default not in (None, "", ()):
            assert option.kind.parse(default.partition(" (")[0]) == option.default, name
    assert {name for _, name, _ in rows} == {option.name for option in options.values()}


def test_every_route_is_in_the_table() -> None:
    named = set(re.findall(r"`(?:GET|POST|DELETE) (/[^`]*)`", PAGES["apis.md"]))
    assert {re.sub(r":\w+", "", route.path) for route in routes() if isinstance(route, Route)} == named
    assert set(re.findall(r"`(?:GET|POST|DELETE) (/[^`]*)`", EVERYTHING)) == named


def test_every_command_is_in_the_table() -> None:
    named = set(re.findall(r"^\| `tokamak ([a-z -]+)` \|", PAGES["commands.md"], re.MULTILINE))
    assert named == {command for command in COMMANDS if command != "bench"} | {f"bench {bench}" for bench in BENCHES}


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:tests|tools|engine|workers|api|shm|ops)/[\w./]*)`", EVERYTHING))))
def test_every_path_exists(path: str) -> None:
    assert (REPOSITORY / path).exists()


def test_every_whole_engine_test_is_named() -> None:
    tests = {path.name for path in (REPOSITORY / "tests" / "e2e").glob("test_*.py")}
    assert {name for name in tests if name not in PAGES["promises.md"]} == set()


def test_every_flag_exists() -> None:
    """Some command takes every flag that a page shows."""
    known = {flag for command in _commands() for flag in re.findall(r"--[a-z][a-z-]+", _help(command))}
    known |= {f"--no-{option.name}" if option.default is True else f"--{option.name}" for option in OPTIONS.values()}
    known |= {f"--{name.replace('_', '-')}" for name in (*VLLM_FLAGS, *ROUTER_FLAGS, *OTHER_HOSTS)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", EVERYTHING))
    assert named - known - OTHERS_FLAGS - {"--help"} == set()


def test_every_command_line_names_flags_of_its_command() -> None:
    lines = re.findall(r"^ {4}(?:\.venv/bin/)?tokamak ((?:bench )?[a-z-]+)((?: [^#\n]*)?)", EVERYTHING, re.MULTILINE)
    assert len(lines) > 20
    for command, rest in lines:
        if command == "serve" or "{port}" in rest:  # a command line within one
            continue
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", rest))
        subcommand = rest.split()[:1] if command == "ctl" else []
        taken = set(re.findall(r"--[a-z][a-z-]+", _help((*command.split(), *subcommand))))
        if command in ("run-batch", "bench step"):
            taken |= {f"--{option.name}" for option in OPTIONS.values()}
        assert named <= taken, (command, rest)


def _commands() -> list[tuple[str, ...]]:
    orders = re.findall(r"^ {4}([a-z][a-z-]+)", _help(("ctl",)), re.MULTILINE)
    assert "rebalance" in orders
    named = [(command,) for command in COMMANDS if command != "bench"]
    return [*named, *(("bench", bench) for bench in BENCHES), *(("ctl", order) for order in orders)]


def _help(command: tuple[str, ...]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        tokamak([*command, "--help"])
    return shown.getvalue()


# ---------------------------------------------------------------------------------------------- links


def _links(text: str) -> list[str]:
    """Return the targets of links and pictures, without those to other hosts."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE), flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not re.match(r"[a-z]+:", link)]


def _anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    anchors: set[str] = set()
    for heading in headings:
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        count = sum(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", other) is not None for other in anchors)
        anchors.add(f"{anchor}-{count}" if count else anchor)
    return anchors


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in _links(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(REPOSITORY), link
        assert not anchor or anchor in _anchors(target.read_text()), link


def test_every_page_is_found_from_the_readme() -> None:
    linked = {(REPOSITORY / link).resolve() for link in _links(PAGES["README.md"])}
    pages = {*MANUAL.glob("*.md"), *(REPOSITORY / ".github").glob("*.md")}
    assert pages - linked == {REPOSITORY / ".github" / "PULL_REQUEST_TEMPLATE.md"}  # which GitHub shows


def test_screenshots_are_small_and_shown() -> None:
    pictures = set((REPOSITORY / ".github" / "screenshots").iterdir())
    assert sum(path.stat().st_size for path in pictures) <= MAX_SCREENSHOT_BYTES
    assert {(MANUAL / link).resolve() for link in _links(PAGES["page.md"])} >= pictures


def test_the_readme_is_read_in_minutes() -> None:
    assert README.stat().st_size <= MAX_README_BYTES
