"""The command-line parser of all tools: argparse with suggestions for mistyped options and commands.

Used by `read.py` for the options of the engine, and by the tools.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import NoReturn

from engine.options.nearest import nearest

_CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<known>.*)\)")


class ArgumentParser(argparse.ArgumentParser):
    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse as argparse does. An unknown argument ends the process with exit code 2."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown[0])
        return found

    def refuse(self, argument: str) -> NoReturn:
        """Suggest what an unknown argument may have meant, and end the process with exit code 2."""
        self.error(self._unknown(argument))

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and end the process with exit code 2."""
        choice = _CHOICE.search(message)
        close = nearest(choice["given"], re.findall(r"[\w-]+", choice["known"])) if choice else ""
        super().error(f"{message}; did you mean {close}?" if close else message)

    def _unknown(self, argument: str) -> str:
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            return f"unexpected argument {argument[:100]!r}; run {self.prog} --help for a list of options"
        close = nearest(name, _option_strings(self))
        return f"unknown option {name[:100]}; " + (
            f"did you mean {close}?" if close else f"run {self.prog} --help for a list of options"
        )


def _option_strings(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options that help shows, of the parser and of its commands."""
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _option_strings(each)
