"""Counts accepted tokens of a predicted answer, as in OpenAI's usage. Pure: it depends only on the two texts, not on what was
drafted.

Used by the tokenizer processes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from weakref import WeakValueDictionary


class Prediction:
    """The tokens of a prediction, and the places of each pair; shared by all sequences of a request."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    @staticmethod
    def of(token_ids: bytes) -> Prediction:
        """Return the same object for the same tokens while it is in use. `token_ids`: int32."""
        found = _living.get(token_ids)
        if found is None:
            found = _living[token_ids] = Prediction(array("i", token_ids).tolist())
        return found

    @cached_property
    def places(self) -> dict[tuple[int, int], list[int]]:
        """Places of each pair of consecutive tokens, ascending."""
        found: dict[tuple[int, int], list[int]] = {}
        for place, pair in enumerate(pairwise(self.token_ids)):
            found.setdefault(pair, []).append(place)
        return found


_living: WeakValueDictionary[bytes, Prediction] = WeakValueDictionary()


class PredictionCount:
    """Counts the answer token by token. While the answer agrees with the prediction it continues there, otherwise from the next
    place with the answer's last two tokens."""

    __slots__ = ("_before", "_next", "_prediction", "_was_accepted", "num_accepted")

    def __init__(self, prediction: Prediction) -> None:
        self.num_accepted = 0
        self._prediction = prediction
        self._next = 0  # the expected place
        self._before = -1  # the previous token
        self._was_accepted = False

    @property
    def num_rejected(self) -> int:
        return len(self._prediction.token_ids) - self.num_accepted

    def push(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self._push(token_id)
            self._before = token_id

    def _push(self, token_id: int) -> None:
        token_ids = self._prediction.token_ids
        if self._next < len(token_ids) and token_ids[self._next] == token_id:
            self.num_accepted += 1
            self._next += 1
            self._was_accepted = True
            return
        places = self._prediction.places.get((self._before, token_id), [])
        index = bisect_left(places, self._next)
        if index == len(places):
            self._was_accepted = False
            return
        self.num_accepted += 1 if self._was_accepted else 2
        self._next = places[index] + 2
        self._was_accepted = True
