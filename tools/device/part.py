"""Process that runs one part of `tools/device/card`: `python -m tools.device.part PART FIRST PLAN`. Started by `evidence.py`.

A part has items, each a check or a few. A kernel that fails takes the process's context on the card with it, so after a failed
item the process ends, and another one continues with the next. Each line of stdout is a `Said`.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from engine.process.main import die_with_parent
from tools.device.findings import Finding, Findings, Outcome

PARTS = ("machine", "operators", "graphs", "served", "speed")  # modules with `items`
EXIT_FAILED = 3


class Plan(msgspec.Struct, frozen=True):
    """Orders for a part."""

    parent: int  # process that this part ends with
    driver: str
    is_small: bool
    until: float  # time.monotonic() at which the part ends
    kernels: str = ""  # folder of kernels that were compiled elsewhere


class Item(NamedTuple):
    what: str
    run: Callable[[], Findings]


class Said(msgspec.Struct, omit_defaults=True):
    items: list[str] | None = None
    begun: int | None = None  # number of an item
    done: int | None = None
    finding: Finding | None = None
    is_end: bool = False


def main(part: str, first: int, plan: Plan) -> int:
    die_with_parent(plan.parent)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what others print is no finding

    def say(said: Said) -> None:
        out.write(msgspec.json.encode(said) + b"\n")
        out.flush()

    items: list[Item] = importlib.import_module(f"tools.device.{part}").items(plan)
    say(Said(items=[item.what for item in items]))
    for number, item in enumerate(items[first:], first):
        if time.monotonic() > plan.until:
            return 0
        say(Said(begun=number))
        try:
            for finding in item.run():
                say(Said(finding=finding))
        except Exception as error:  # the other items are to run whatever it is
            text = f"it ended with {type(error).__name__}: {error}"
            say(Said(finding=Finding(item.what, Outcome.MISSED, text)))
            return EXIT_FAILED
        say(Said(done=number))
    say(Said(is_end=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], int(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=Plan)))
