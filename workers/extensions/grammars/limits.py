"""Time limits of masks.

Time is limited, although everything else is limited by counts, because the library has no count that bounds ambiguous grammars
(`s: s s | "Z"` takes 48 ms per token after 600 tokens). A sequence that hits a limit gets an error
(`engine/scheduler/results.py`), never a shorter answer: the machine decides when, but not what an answer says. Ordinary
grammars take up to 0.3 ms per token, the widest 0.7 ms.
"""

from __future__ import annotations

# Processor time of the helper thread, which excludes waiting under load. Drafts have a separate limit of the same
# size, after which the sequence has none.
BURST_NS = 200_000_000  # burst of one sequence
TOKEN_NS = 3_000_000  # added per token: ambiguous grammars get slower with each token
SLOW_NS = 2_000_000  # per mask: a slower constraint moves to the thread for slow ones
# Wall-clock time.
FAST_NS = 3_000_000  # a step's wait for fast masks
STEP_NS = 1_000_000  # a step's wait for slow masks
ALONE_NS = 50_000_000  # a step's wait if no other row is sampled
