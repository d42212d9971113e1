"""Time of a step, learned from results, and the time that prompts of the next step may take. Pure decisions.

Used by the scheduler process. A step's time is modelled as

    base_ns + token_ns * prompt tokens + pair_ns * (query, key) pairs of the prompt tokens

`base_ns` is the time of a step without prompts, and is measured in such steps alone; while streams and prompts share steps, one
step of `PROBE_STEPS` is without prompts, to keep it current. The two rates are corrected with each step that has prompt tokens,
in proportion to their part of it (normalised least mean squares): what was learned from short prompts is not forgotten with
long ones.

Estimates only decide where prompts are cut; results do not depend on that.
"""

from __future__ import annotations

import math

import msgspec

PROBE_STEPS = 32
STREAM_RATIO = 1.0  # while streams run: time for a step's long prompts, as a multiple of a step without prompts
LONE_RATIO = 8  # the same without streams: then the overhead of a step is small
_KEYS = 4096.0  # the unit of keys in which both rates have the same weight
_MAX_ERROR = 3.0  # a step that took much longer was disturbed: its error counts as at most this multiple of the estimate
_STEP_SIZE = 0.5
_BASE_WEIGHT = 0.3


class StepLoad(msgspec.Struct):
    """Load of a step. `num_pairs`: total of keys that the prompt tokens see."""

    num_decodes: int = 0
    num_prompt_tokens: int = 0
    num_pairs: float = 0.0

    def add_prompt(self, start: int, num_tokens: int) -> None:
        """Add prompt tokens [start, start + num_tokens) of a sequence."""
        self.num_prompt_tokens += num_tokens
        self.num_pairs += pairs(start, num_tokens)


def pairs(start: int, num_tokens: int) -> float:
    """Return the (query, key) pairs of prompt tokens [start, start + num_tokens)."""
    return num_tokens * (start + num_tokens / 2)


class StepCost:
    """Estimates in nanoseconds; `max_step_ns` 0: steps are limited only by tokens."""

    def __init__(self, max_step_ns: int) -> None:
        self._max_step_ns = max_step_ns
        self.base_ns = 0.0  # 0: not measured yet
        self._token_ns = 0.0
        self._pair_ns = 0.0  # of _KEYS pairs
        self._num_since_probe = PROBE_STEPS

    @property
    def has_rates(self) -> bool:
        return self._token_ns > 0 or self._pair_ns > 0

    def dispatched(self, load: StepLoad) -> None:
        """Note that a step is in flight."""
        if load.num_decodes:
            self._num_since_probe = self._num_since_probe + 1 if load.num_prompt_tokens else 0

    def measured(self, load: StepLoad, step_ns: int) -> None:
        """Learn from a step that took `step_ns`; 0: it was not measured."""
        if step_ns <= 0:
            return
        if not load.num_prompt_tokens:
            near_ns = min(step_ns, self.base_ns * _MAX_ERROR) if self.base_ns else step_ns
            self.base_ns += (near_ns - self.base_ns) * (_BASE_WEIGHT if self.base_ns else 1)
            return
        tokens, keys = float(load.num_prompt_tokens), load.num_pairs / _KEYS
        found_ns = max(step_ns - (self.base_ns if load.num_decodes else 0), step_ns / 8)
        if not self.has_rates:
            self._token_ns = found_ns / tokens
            return
        estimate_ns = self._token_ns * tokens + self._pair_ns * keys
        error_ns = min(found_ns - estimate_ns, _MAX_ERROR * estimate_ns) * _STEP_SIZE / (tokens * tokens + keys * keys)
        self._token_ns = max(0.0, self._token_ns + error_ns * tokens)
        self._pair_ns = max(0.0, self._pair_ns + error_ns * keys)
        if not self.has_rates:
            self._token_ns = found_ns / tokens

    def prompt_ns(self, start: int, num_tokens: int) -> float:
        """Return the nanoseconds that prompt tokens [start, start + num_tokens) add to a step."""
        return self._token_ns * num_tokens + self._pair_ns / _KEYS * pairs(start, num_tokens)

    def num_tokens_within(self, start: int, time_ns: float) -> int:
        """Return how many prompt tokens from `start` on take `time_ns`."""
        if math.isinf(time_ns):
            return 1 << 31
        linear, square = self._token_ns + self._pair_ns / _KEYS * start, self._pair_ns / _KEYS / 2
        if linear <= 0 and square <= 0:
            return 1 << 31
        # exact even if the square term is nearly 0
        return int(min(1 << 31, 2 * time_ns / (linear + math.sqrt(linear * linear + 4 * square * time_ns))))

    def prompt_budget_ns(self, *, has_streams: bool) -> float:
        """Return the nanoseconds that all prompts of the next step may take; infinity: limited only by tokens. `has_streams`:
        running answers wait for the step."""
        if not self._is_bounding or not has_streams:
            return math.inf
        return 0.0 if self._num_since_probe >= PROBE_STEPS else self._spare_ns

    def long_budget_ns(self, *, has_streams: bool) -> float:
        """Return the nanoseconds that the long prompts of the step may take. A long prompt takes many steps, and streams and
        short prompts that arrive meanwhile wait for each."""
        if not self._is_bounding:
            return math.inf
        if has_streams:
            return min(STREAM_RATIO * self.base_ns, self._spare_ns) if self.base_ns else self._spare_ns
        return max(self._max_step_ns / 4, LONE_RATIO * self.base_ns) if self.base_ns else self._max_step_ns

    @property
    def _is_bounding(self) -> bool:
        return bool(self._max_step_ns) and self.has_rates

    @property
    def _spare_ns(self) -> float:
        """Return the nanoseconds that a step without prompts leaves of the longest step, at least twice its own: otherwise
        prompts would hardly progress when streams take nearly all of it."""
        return max(self._max_step_ns - self.base_ns, 2 * self.base_ns)
