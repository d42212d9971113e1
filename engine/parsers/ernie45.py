"""Baidu's ERNIE 4.5 with reasoning: calls are like Hermes's, after the reasoning or beside a content in <response>
(`thinking.py`)."""

from __future__ import annotations

from engine.parsers.hermes import Hermes


class Ernie45(Hermes):
    name = "ernie45"


FAMILY = Ernie45()
