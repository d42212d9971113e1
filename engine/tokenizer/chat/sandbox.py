"""Compiles and runs untrusted chat templates.

Called by `template.py` in the tokenizer's helper processes. A template comes with the model or even with a request, so it runs
in jinja2's immutable sandbox, without a loader, and within limits of CPU time, memory and output size. The kernel enforces time
and memory (a timer signal and RLIMIT_DATA), whatever the template does. The timer cannot interrupt a single call into C (`x in
[y, y, ...]` with huge strings); then the helper itself is ended.
"""

from __future__ import annotations

import gc
import json
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CPU_SECONDS = 0.5
MAX_MEMORY_BYTES = 256 << 20  # in addition to the process's
MAX_GARBAGE_BYTES = 16 << 20  # that a template may leave behind
MAX_TEMPLATE_CHARACTERS = 256 << 10
MAX_INTEGER_BITS = 4096
MAX_ERROR_CHARACTERS = 1000

_NEXT_FIRE_SECONDS = 0.05  # the timer repeats: an `except` inside jinja2 may swallow the first error
_PAGE_BYTES = resource.getpagesize()


class TemplateBoundError(Exception):
    """A template exceeds its limits."""


class Template:
    """A compiled template. Compiling and rendering raise jinja2's errors, `TemplateBoundError`, `MemoryError`, and Python's
    errors for wrong types or missing keys."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise TemplateBoundError(f"it has {len(source)} characters, the limit is {MAX_TEMPLATE_CHARACTERS}")
        self.source = source
        with _bounds():
            self._compiled = _ENVIRONMENT.from_string(source)

    def render(self, variables: dict[str, Any], max_characters: int) -> str:
        """Return the template's output."""
        parts: list[str] = []
        num_characters = 0
        with _bounds():
            for part in self._compiled.generate(variables):
                num_characters += len(part)
                if num_characters > max_characters:
                    raise TemplateBoundError(f"its output exceeds {max_characters} characters")
                parts.append(part)
            return "".join(parts)


def failure_text(error: BaseException) -> str:
    """Return the part of a template's error for the user: short and valid Unicode."""
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    text = str(error) or type(error).__name__
    return text[:MAX_ERROR_CHARACTERS].encode(errors="backslashreplace").decode()


class _GenerationTag(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks the assistant's text for training; here it only yields its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line_number = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line_number)


class _Environment(ImmutableSandboxedEnvironment):
    """Environment with the settings of transformers, so that templates render the same."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        del self.globals["lipsum"]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow `append` to lists, with which Kimi-K2's template sorts messages; all others change nothing."""
        return (type(obj) is list and attr == "append") or super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Limit integers: arithmetic on huge ones is one call, which the timer cannot interrupt."""
        if isinstance(left, int) and isinstance(right, int):
            num_bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if num_bits > MAX_INTEGER_BITS:
                raise TemplateBoundError(f"it computes an integer of {num_bits} bits, the limit is {MAX_INTEGER_BITS}")
        return super().call_binop(context, operator, left, right)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as in the models' training: jinja2's own filter escapes HTML and sorts keys. The result of `map` becomes a
    list."""
    value = list(value) if isinstance(value, Iterator) else value
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message)[:MAX_ERROR_CHARACTERS])  # converted to text here, within the limits


_ENVIRONMENT = _Environment()


@contextmanager
def _bounds() -> Iterator[None]:
    """Limit the CPU time and memory of the body. Signals reach only the main thread, in which an actor runs; in another thread
    (of a test) only memory is limited. Garbage collection is off meanwhile: collecting everything that the process holds would
    count as the template's time, and an error raised by the timer in a collector's callback would be lost."""
    timer = _Timer() if threading.current_thread() is threading.main_thread() else None
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    num_bytes = _data_bytes()
    bound = num_bytes + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (bound if soft == resource.RLIM_INFINITY else min(bound, soft), hard))
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        if timer:
            timer.start()
        yield
    finally:
        try:
            if timer:
                timer.is_over = True
        finally:  # the timer may have fired in the line above
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
            if timer:
                timer.stop()
            if is_collecting:
                gc.enable()
                if _data_bytes() > num_bytes + MAX_GARBAGE_BYTES:
                    gc.collect()


class _Timer:
    """Raises TemplateBoundError in the main thread once it has used up its CPU time."""

    def __init__(self) -> None:
        self.is_over = False
        self._previous = signal.getsignal(signal.SIGPROF) or signal.SIG_DFL

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._fire)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS, _NEXT_FIRE_SECONDS)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self._previous)

    def _fire(self, signal_number: int, frame: FrameType | None) -> None:
        if not self.is_over:
            raise TemplateBoundError(f"it takes more than {MAX_CPU_SECONDS} s of CPU time")


def _data_bytes() -> int:
    """Return the bytes that count against RLIMIT_DATA, plus the stack, which does not."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[5]) * _PAGE_BYTES
