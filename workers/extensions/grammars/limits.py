"""Times that masks may take.

Clocks, where all else is bounded by counts: the library has none that bounds what is ambiguous (`s: s s | "Z"` takes 48 ms a
token after 600). A sequence that comes to a limit gets an error (`engine/scheduler/results.py`), never a shorter answer: when
depends on the machine, what an answer says does not. Ordinary grammars take up to 0.3 ms a token, the widest 0.7.
"""

from __future__ import annotations

# Processor time of the helper thread, so that waiting, as under load, is not in it. Drafts have as much to themselves, and none
# when it is spent.
BURST_NS = 200_000_000  # that a sequence's masks may take at once
TOKEN_NS = 3_000_000  # and for each token besides: what is ambiguous takes more with each
SLOW_NS = 2_000_000  # of one mask: a constraint that took more has its work done apart from the others'
# Time that passes.
FAST_NS = 3_000_000  # that a step waits for the others
STEP_NS = 1_000_000  # that it waits for slow ones
ALONE_NS = 50_000_000  # that it waits where nothing else is drawn
