"""The line that a user types in the terminal: editing and history, by prompt_toolkit where the terminal can show it.

Used by `tokamak chat`, in its process. The history is in `chat_history` of the user's cache, readable only by this user.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from engine.checkpoint.files import make_directory, user_cache

HISTORY = "chat_history"


def line_reader(mark: str, commands: Sequence[str]) -> Callable[[], str]:
    """Return a function that reads a line after `mark`; Alt+Enter adds a line break. EOFError: Ctrl+D. KeyboardInterrupt:
    Ctrl+C."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    class History(FileHistory):
        """History file; if it cannot be read or written, the history is that of this conversation."""

        def load_history_strings(self) -> Iterable[str]:
            with contextlib.suppress(OSError):
                return list(super().load_history_strings())
            return []

        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):
                super().store_string(string)

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        history=History(_history_file()),
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
        key_bindings=keys,
        enable_open_in_editor=True,
    )
    return lambda: session.prompt(FormattedText([("bold", mark)]))


def _history_file() -> Path:
    path = user_cache() / HISTORY
    with contextlib.suppress(OSError):
        make_directory(path.parent)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return path
