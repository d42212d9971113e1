"""Hooks and fixtures for all tests.

What engines keep, for later or while they run, goes to directories of this session, not to the user's. Shared memory of dead
engines is removed first, and the session's own signals are not ignored. A test with three lists of parameters or more runs
cases with every pair of values (`pairs.py`), with `--all-cases` every combination. `--fast` skips slow tests, and most cases
of tests with many. The summary names what this machine could not test: kernel variants, the page, dashboards, and skipped
tests, one line for each cause.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

from engine.process.run_directory import runs_root
from engine.supervisor.reaper import reap
from shm.segment import DIRECTORY, NAMESPACE_VARIABLE
from tests.complete_run import CompleteRun
from tests.pairs import pairwise
from tests.paths import REPOSITORY
from tests.published_files import published_templates

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

_NAMESPACE = "test"  # of shared memory, with the pid: sessions side by side leave each other's engines alone
_MANY_CASES = 5  # more cases of one test are variants of the kernels by shapes by precisions by numbers of rows
_STRIDE = 29  # `--fast` takes every twenty-ninth of those: with lists of two to six entries, in the end every entry of each
REFERENCE = "reference"  # whole models through Paddle's ops take seconds; the ops alone stay
LIMIT_S, ENGINE_LIMIT_S = 120, 300  # of a test that would hang: far beyond what any takes on a busy machine
ENGINE_FOLDERS = ("devices", "e2e", "page")  # every test in them starts engines, or is marked as slow
ENGINES = ("tests.e2e.engine_process", "tests.engine.echo_engine")  # a test file that uses one of them starts engines


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", type=Path, metavar="DIR", help="keep pictures of the page's main states (tests/page)")
    parser.addoption("--fast", action="store_true", help="no test that starts engines or is slow, a twenty-ninth of many cases")
    parser.addoption("--streams", type=int, default=1000, help="streams of tests/e2e/check_router.py (tools/test-cluster)")
    parser.addoption("--seed", type=int, default=1, help="of its faults")
    parser.addoption("--all-cases", action="store_true", help="every combination of parameters, not only every pair of values")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # a third of the time that it takes to collect the tests, which leave no garbage until then
    if not hasattr(config, "workerinput"):  # a worker of xdist, which sees its share of the tests
        config.pluginmanager.register(CompleteRun())


@pytest.hookimpl(trylast=True)  # of the tests that -k has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.timeout(ENGINE_LIMIT_S if is_slow(item) else LIMIT_S))
    chosen = items if config.getoption("--all-cases") else pairwise(items)
    if config.getoption("--fast"):
        indices = zip(chosen, _case_indices(chosen), strict=True)
        chosen = [item for item, index in indices if index % _STRIDE == 0 and not is_slow(item)]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    slow_files = {item.path for item in chosen if is_slow(item)}  # the quick ones are left for whichever process is done first
    items[:] = sorted(chosen, key=lambda item: item.path not in slow_files)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _case_indices(items: list[pytest.Item]) -> Iterator[int]:
    """Yield for each item the index of its case within its test; 0 where the test has few cases."""
    names = [item.nodeid.partition("[")[0] for item in items]
    counts, met = Counter(names), Counter[str]()
    for name in names:
        yield met[name] if counts[name] > _MANY_CASES else 0
        met[name] += 1


def is_slow(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    if starts_engines(item.module) or item.get_closest_marker("slow") is not None:
        return True
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return item.module.__name__.startswith("tests.workers") and any(
        isinstance(value, str) and value == REFERENCE for value in params
    )


@functools.cache
def starts_engines(module: ModuleType) -> bool:
    used = {getattr(value, "__module__", None) for value in vars(module).values()}
    return "tests.e2e" in module.__name__ or not used.isdisjoint(ENGINES)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which kernels of this machine were tested, and which were not."""
    from ops import _cpu

    named: dict[bool, list[str]] = {True: [], False: []}
    for name, is_built, is_runnable in _cpu.known_variants():
        cause = "" if is_built else " (not built)" if is_runnable else " (not of this processor)"
        named[is_built and is_runnable].append(name + cause)
    missing = []
    if not has_browser():
        missing.append("the page: chromium or chromedriver is missing (Debian: chromium-driver)")
    if not has_prometheus():
        missing.append("dashboards and alerts: prometheus or promtool is missing (Debian: prometheus)")
    if not published_templates():
        missing.append(
            "templates and vocabularies that models were published with: they are missing (`python -m tests.published_files`)"
        )
    skipped = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    missing += [f"{count} {'test' if count == 1 else 'tests'}: {cause}" for cause, count in sorted(skipped.items())]
    if missing:
        terminalreporter.section("not tested here")
        terminalreporter.write_line("\n".join(missing))
    terminalreporter.section("kernels")
    terminalreporter.write_line(f"tested: {', '.join(named[True])}; not tested: {', '.join(named[False]) or 'none'}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.parent.name != "tests":
        return None
    if config.getoption("--fast") and collection_path.name in ENGINE_FOLDERS:
        return True
    is_missing = {"page": not has_browser(), "grafana": not has_prometheus()}
    return True if is_missing.get(collection_path.name) else None


def has_prometheus() -> bool:
    return shutil.which("prometheus") is not None and shutil.which("promtool") is not None


def has_browser() -> bool:
    return shutil.which("chromium") is not None and shutil.which("chromedriver") is not None


@pytest.fixture(scope="session", autouse=True)
def signals() -> None:
    """Reset ignored signals, which engines would inherit, as behind `nohup` or in the background of a script: tests end engines
    by these signals."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines keep what they make in a directory of this session, but share the emulated card's kernels, which take long to
    compile."""
    cache = tmp_path_factory.mktemp("user-cache")
    compiled = REPOSITORY / "build" / "cuda"
    compiled.mkdir(parents=True, exist_ok=True)
    (cache / "tokamak").mkdir()
    (cache / "tokamak" / "cuda").symlink_to(compiled)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(cache))
        yield


@pytest.fixture(scope="session", autouse=True)
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trust no certificate authorities: tests call no outside servers, and loading the system ones takes 40 ms of CPU time in
    each HTTP client, such as each `httpx.get`."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("no-authorities")))
        environment.delenv("SSL_CERT_FILE", raising=False)  # comes before it
        yield


@pytest.fixture(scope="session", autouse=True)
def runtime() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="tokamak-") as directory, pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_RUNTIME_DIR", directory)  # short: it has sockets
        environment.setenv(NAMESPACE_VARIABLE, f"{_NAMESPACE}{os.getpid()}")
        _remove_what_dead_sessions_left()
        yield
        reap(runs_root())
        left = sorted(path.name for path in DIRECTORY.glob(f"tokamak{_NAMESPACE}{os.getpid()}.*"))
        assert not left, f"tests of this session left in {DIRECTORY}: {', '.join(left)}"


def _remove_what_dead_sessions_left() -> None:
    for path in DIRECTORY.glob(f"tokamak{_NAMESPACE}*"):
        pid = path.name.removeprefix(f"tokamak{_NAMESPACE}").split(".")[0]
        if not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                path.unlink()
