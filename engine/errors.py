"""The one exception tree. A message says what is wrong, the value, the limit and the remedy."""

from __future__ import annotations

from shm.errors import SharedMemoryError as SharedMemoryError
from shm.errors import TokamakError as TokamakError

EXIT_FAILED = 1
EXIT_BAD_OPTIONS = 2  # or another mistake of the user: the same command fails again


class OptionError(TokamakError):
    """A command-line option, environment variable or configuration file is wrong: exit code 2."""


class TooLargeError(OptionError):
    """Memory needs of an engine with these options exceed what is available."""


def exit_code_of(error: TokamakError) -> int:
    """Return the exit code of a command that ends with `error`."""
    return EXIT_BAD_OPTIONS if isinstance(error, OptionError) else EXIT_FAILED


class MissingExtraError(OptionError):
    """The options need packages of an extra that is not installed."""

    def __init__(self, message: str, extra: str) -> None:
        super().__init__(message)
        self.extra = extra


class StartError(TokamakError):
    """The engine cannot start (a busy port, no room in shared memory, an actor that failed): exit code 1."""


MAX_MESSAGE_BYTES = 8192


def sayable(message: str) -> str:
    """Make a message, which may quote files of strangers, fit for a record: keep both ends of a long one, and drop text that
    cannot be sent (JSON may hold halves of surrogate pairs)."""
    data = message.encode(errors="backslashreplace")
    if len(data) > MAX_MESSAGE_BYTES:
        end = MAX_MESSAGE_BYTES // 2 - 3
        data = data[:end] + b" ... " + data[-end:]
    return data.decode(errors="ignore")


class CheckpointError(TokamakError):
    """A checkpoint is missing, unreadable or does not match its config. Its message is `sayable`."""

    def __init__(self, message: str) -> None:
        super().__init__(sayable(message))


class ContentsError(CheckpointError):
    """A checkpoint no longer holds the weights that are in use under its name."""


class OutsideError(TokamakError):
    """Something outside the engine took away a resource of an actor. The actor is restarted, which does not count for
    --restart-limit."""


class RequestError(TokamakError):
    """A user's mistake: fails that request with an HTTP status and OpenAI's error fields. Its message is `sayable`."""

    def __init__(self, message: str, *, status: int = 400, code: str = "", param: str = "", retry_after_s: int = 0) -> None:
        self.message = sayable(message)
        super().__init__(self.message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


class ControlError(TokamakError):
    """An operator's command failed or got no reply."""
