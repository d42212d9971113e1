"""For all tests: what engines keep, for later or while they run, goes to directories of this session, not to the user's. What
dead engines left in shared memory before is cleared away first, and the session's own signals are not ignored."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from engine.process.run_directory import runs_root
from engine.supervisor.reaper import reap

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def signals() -> None:
    """Engines inherit what is ignored, as behind `nohup` or in the background of a script; tests end them by these signals."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def runtime() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="tokamak-") as directory, pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_RUNTIME_DIR", directory)  # short: it has sockets
        reap(runs_root())
        yield
