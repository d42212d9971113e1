"""A predicted answer in OpenAI's usage."""

from __future__ import annotations

from array import array

import pytest

from engine.tokenizer.prediction import Prediction, PredictionCount


@pytest.mark.parametrize(
    ("prediction", "answer", "num_accepted"),
    [
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 5),
        ([1, 2, 3, 4, 5], [1, 2, 3], 3),
        ([1, 2, 3, 4, 5], [7, 8, 9], 0),
        ([1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 5, 6], 5),  # one replaced
        ([1, 2, 3, 4], [1, 2, 9, 3, 4], 4),  # one put in
        ([1, 2, 3, 4, 5, 6], [1, 2, 5, 6], 4),  # two left out
        ([1, 2, 1, 2, 1, 2], [1, 2, 9, 1, 2], 4),  # from the next place on, not the first
        ([1], [1], 1),
        ([5, 5, 5], [5, 5, 5, 5, 5], 3),
    ],
)
def test_accepted_prediction_tokens(prediction: list[int], answer: list[int], num_accepted: int) -> None:
    told = array("i", prediction).tobytes()
    at_once, bit_by_bit = PredictionCount(Prediction.of(told)), PredictionCount(Prediction.of(told))
    at_once.push(answer)
    for token_id in answer:
        bit_by_bit.push([token_id])
    assert at_once.num_accepted == bit_by_bit.num_accepted == num_accepted
    assert at_once.num_rejected == len(prediction) - num_accepted


def test_sequences_of_a_request_share_its_prediction() -> None:
    told = array("i", [1, 2, 3]).tobytes()
    first = Prediction.of(told)
    assert Prediction.of(bytes(bytearray(told))) is first
    places = first.places
    del first
    assert Prediction.of(told).places is not places
