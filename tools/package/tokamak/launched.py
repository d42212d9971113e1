"""An engine as a child of this process: started with the options of `tokamak serve`, reached on a UNIX socket in its run
directory, and stopped after use. It ends with this process in any case (`--end-with`).

Used by `llm.py` in a user's process, and by `tokamak run-batch`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from typing import IO, Any

import orjson

# The program `tokamak`: by path, because `-m` looks first in the current directory.
COMMAND = (sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py"))

QUIET_S = 5.0  # progress of longer starts is shown
STOP_TIMEOUT_S = 30.0  # the engine's own limits are shorter
_READY = "ready "
_ERRORS = ("tokamak: error: ", "tokamak serve: error: ")
_SOURCE = "/dev/stdin: "  # source of options in error messages
# set here, or only for servers
_OWN = ("uds", "end_with", "api_key", "admin_key", "ssl_certfile", "ssl_keyfile", "root_path", "print_client", "config")
_NOT_INHERITED = (*_OWN, "host", "port", "run_dir")  # of the environment


class EngineDeadError(RuntimeError):
    """The engine has ended or cannot start."""


class LaunchedEngine:
    """Engine process. The constructor starts it and waits until it is ready; `stop` ends it. `url` is `unix:PATH`."""

    def __init__(self, options: Mapping[str, Any], arguments: list[str] | None = None) -> None:
        """`options`: those of `tokamak serve`, with underscores; None values are left out. `arguments`: the same as a command
        line; they take precedence. ValueError for a wrong value, TypeError for an unknown name, EngineDeadError if the engine
        does not start."""
        self.key = secrets.token_hex(16)  # in total
        self.url = ""
        for name in _OWN:
            if options.get(name) is not None:
                raise ValueError(f"{name} is of servers that others use; leave it out, or start one by `tokamak serve`")
        document = orjson.dumps({name: _plain(name, value) for name, value in options.items() if value is not None})
        command = [*COMMAND, "serve", "--config", "/dev/stdin", *(arguments or ())]
        command += ["--uds", "auto", "--end-with", str(os.getpid())]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment(options),
            start_new_session=True,  # Ctrl+C is handled by the parent process
        )
        self._owner = os.getpid()
        self.stop = weakref.finalize(self, _end, self.process, self._owner)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._messages = _Messages(self.process.stderr)
        try:
            with contextlib.suppress(BrokenPipeError), self.process.stdin as stdin:
                stdin.write(document)
            self._wait(self.process.stdout)
            self._messages.is_starting = False
        except BaseException:
            self.stop()
            raise

    def is_alive(self) -> bool:
        if self._owner == os.getpid():
            return self.process.poll() is None
        try:  # a fork cannot wait for a process that is not its child
            os.kill(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def cause_of_death(self) -> str:
        """Return the engine's last error."""
        code = self.process.wait(STOP_TIMEOUT_S)
        if code < 0:
            return f"killed by signal {-code}"
        return self._messages.last() or f"exit code {code}"

    def _environment(self, options: Mapping[str, Any]) -> dict[str, str]:
        """Return this process's environment without options that are given here or apply only to servers. It contains the keys,
        since other users can see the command line."""
        hidden = {f"TOKAMAK_{name.upper()}" for name in (*options, *_NOT_INHERITED)}
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        return {**kept, "TOKAMAK_API_KEY": self.key, "TOKAMAK_ADMIN_KEY": self.key}

    def _wait(self, stdout: IO[bytes]) -> None:
        """Wait for the line with the engine's address."""
        with stdout:
            line = stdout.readline().decode(errors="replace")
        if line.startswith(_READY):
            self.url = line.removeprefix(_READY).strip()
            return
        cause = self.cause_of_death()
        if self.process.returncode != 2:
            raise EngineDeadError(f"the engine cannot start: {cause}")
        raise (TypeError if "unknown option " in cause else ValueError)(cause.removeprefix(_SOURCE))


class _Messages:
    """Reader of an engine's stderr: keeps the last lines, and shows notes and the progress of a long start. Holds no reference
    to the engine, which ends with its last reference."""

    def __init__(self, stderr: IO[bytes]) -> None:
        self.is_starting = True
        self._lines: deque[str] = deque(maxlen=200)
        self._start_s = time.monotonic()
        self._thread = threading.Thread(target=self._read, args=(stderr,), name="tokamak messages", daemon=True)
        self._thread.start()

    def last(self) -> str:
        """Return the error of an engine that has ended, or its last lines."""
        self._thread.join(STOP_TIMEOUT_S)
        errors = [line for line in self._lines if line.startswith(_ERRORS)]
        return errors[-1].partition("error: ")[2] if errors else "; ".join(list(self._lines)[-5:])

    def _read(self, stderr: IO[bytes]) -> None:
        with stderr:
            for raw in stderr:
                line = raw.decode(errors="replace").rstrip("\n")
                self._lines.append(line)
                is_late = self.is_starting and time.monotonic() - self._start_s > QUIET_S
                if line.startswith("note: ") or is_late:
                    print(f"tokamak: {line.replace(_SOURCE, '')}", file=sys.stderr)


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Ask the engine to end, and kill it if it does not."""
    if os.getpid() != owner or process.poll() is not None:  # forks of the owner do not stop it
        return
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _plain(name: str, value: Any) -> Any:
    """Return the value as in a configuration file, objects as JSON text. TypeError for values that cannot be in one."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(name, part) for part in value]
    if isinstance(value, dict):
        return orjson.dumps(value).decode()
    if str(value).startswith("torch."):  # a dtype
        return str(value).removeprefix("torch.")
    raise TypeError(f"{name} is a {type(value).__name__}; expected a text, a number, or a dictionary of such")
