"""The way from pixels in a slab to answers on the runner: calls of the model's encoder within steps, and reports of failed
ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from engine.checkpoint.model_config import ModelConfig
from engine.messages import Encode, Step
from shm.encoder_arena import EncoderArena
from tests.workers.encoding import make_slab, steps_of, units_of
from tests.workers.seeing import ARCHITECTURES, make_arena, picture_sequences
from tests.workers.serving import GOLDEN, ServedSequence, Serving, encoder_of, golden_cases, make_runner
from workers.engine.runner import ModelRunner
from workers.extensions.media.features import Features

FEW = 4  # outputs, if only the picture matters
BACKENDS = {"reference": {"ops": "reference", "plan": "eager"}, "native": {"threads": 2}}


class Encoding:
    """A runner with a pixel slab that the test fills, and units of golden pictures in it."""

    def __init__(self, name: str, **options: object) -> None:
        self.name = name
        self.slab = make_slab()
        self.arena: EncoderArena = make_arena(GOLDEN / name)
        self.runner: ModelRunner = make_runner(GOLDEN / name, features=Features(self.arena, lambda _: self.slab), **options)
        vision = ModelConfig.read(GOLDEN / name).vision
        assert vision is not None
        self.vision = vision

    def sequences(self, num_outputs: int = 24) -> list[ServedSequence]:
        """Return prompts without their features."""
        sequences = self.seeing(num_outputs)
        for sequence in sequences:
            for row in sequence.unit_rows:
                self.arena.begin(row)
        self.arena.rows[:] = np.nan
        return sequences

    def seeing(self, num_outputs: int) -> list[ServedSequence]:
        """Return prompts with their features in the arena."""
        sequences = picture_sequences(self.name, self.arena)
        for sequence in sequences:
            sequence.num_outputs = num_outputs
        return sequences

    def units(self, sequence: ServedSequence, case: int, features: dict[str, np.ndarray] | None = None) -> list[Encode]:
        return units_of(self.name, sequence, case, self.slab, features)

    def encode(self, units: Sequence[Encode], cuts: Sequence[int] = ()) -> list[Step]:
        return steps_of(units, self.vision.num_passes, cuts)

    def answer(self, sequence: ServedSequence, chunk: int = 512) -> ServedSequence:
        serving = Serving(self.runner, chunk=chunk)
        serving.place(sequence, 5)
        serving.run([sequence])
        return sequence


@pytest.fixture(scope="module", params=[(name, backend) for name in ARCHITECTURES for backend in BACKENDS], ids="-".join)
def encoding(request: pytest.FixtureRequest) -> Encoding:
    return Encoding(request.param[0], **BACKENDS[request.param[1]])


def test_pixels_give_the_golden_answers(encoding: Encoding) -> None:
    """Encoded in one step or in several, each with its own passes; then prompts whole and in chunks of 16."""
    cases = golden_cases(encoding.name)
    answers = []
    for cuts, chunk, num_outputs in (((), 512, 24), ((1, 2), 16, FEW)):
        sequences = encoding.sequences(num_outputs)
        for index, sequence in enumerate(sequences):
            units = encoding.units(sequence, index)
            *others, last = (encoding.runner.run(step) for step in encoding.encode(units, cuts))
            assert [(each.encoded, each.missing) for each in others] == [([], {})] * len(cuts)
            assert (last.encoded, last.missing) == (list(sequence.unit_hashes), {})
            encoding.answer(sequence, chunk)
            assert sequence.outputs == cases[index]["greedy_token_ids"][:num_outputs]
            for (_, values), expected in zip(sequence.tops, cases[index]["top_logprobs"][:num_outputs], strict=True):
                np.testing.assert_allclose(values, [value for _, value in expected], atol=1e-3)
            for position, value in enumerate(cases[index]["prompt_logprobs"]):
                assert value is None or sequence.prompt_logprobs[position] == pytest.approx(value, abs=1e-3)
            for unit in units:
                encoding.slab.release(unit.handle)
        answers.append([sequence.answer(FEW) for sequence in sequences])
    assert answers[0] == answers[1]


def test_rows_read_features_of_their_own_step(encoding: Encoding) -> None:
    """A step encodes before its prompts are computed: the same bits as from an earlier step."""
    first = encoding.sequences(FEW)[0]
    for step in encoding.encode(encoding.units(first, 0)):
        encoding.runner.run(step)
    encoding.answer(first)
    second = encoding.sequences(FEW)[0]
    serving = Serving(encoding.runner)
    serving.place(second, 6)
    step = serving._message([(second, len(second.prompt))])
    step.encoder = encoding.encode(encoding.units(second, 0))[0].encoder
    result = encoding.runner.run(step)
    assert result.encoded == list(second.unit_hashes)
    serving._apply([(second, len(second.prompt))], result)
    serving.run([second])
    assert second.answer() == first.answer()


def test_client_features_are_copied(encoding: Encoding) -> None:
    """Features are copied where pixels would be encoded."""
    features = dict(np.load(GOLDEN / encoding.name / "features.npz"))
    expected = [encoding.answer(sequence).answer() for sequence in encoding.seeing(FEW)]
    for index, sequence in enumerate(encoding.sequences(FEW)):
        for step in encoding.encode(encoding.units(sequence, index, features), (1,)):
            assert not encoding.runner.run(step).missing
        assert encoding.answer(sequence).answer() == expected[index]


def test_missing_pixels_name_their_units(encoding: Encoding) -> None:
    """The producer released them, or died: nothing is run, and the units are named."""
    sequence = encoding.sequences()[2]
    units = encoding.units(sequence, 2)
    encoding.slab.release(units[1].handle)
    (step,) = encoding.encode(units)
    result = encoding.runner.run(step)
    assert (list(result.missing), result.encoded) == ([units[1].unit_hash], [])
    assert "released it or died" in result.missing[units[1].unit_hash]
    assert not encoding.arena.is_valid(units[0].first_row, units[0].unit_hash, units[0].num_rows, 1)


def test_call_of_a_previous_worker_starts_over(encoding: Encoding) -> None:
    """The units are encoded from their beginning. A step that is sent again is such a call too."""
    sequence = encoding.sequences()[0]
    begin, end = encoding.encode(encoding.units(sequence, 0), (2,))
    assert list(encoding.runner.run(end).missing) == list(sequence.unit_hashes)
    assert not encoding.runner.run(begin).missing
    assert encoding.runner.run(end).encoded == list(sequence.unit_hashes)
    assert list(encoding.runner.run(end).missing) == list(sequence.unit_hashes)


def test_reload_invalidates_features(encoding: Encoding) -> None:
    """Features of other weights are not read; those of the new ones equal those of a fresh start."""
    sequence = encoding.sequences(FEW)[0]
    expected = encoding.runner.run(encoding.encode(encoding.units(sequence, 0))[0])
    before = encoding.answer(sequence).answer()
    version = encoding.runner.weights.version + 1
    encoding.runner.clear()
    assert encoder_of(encoding.runner) is None
    encoding.runner.load(str(GOLDEN / encoding.name), version, lambda num_done, num_bytes: None)
    again = encoding.seeing(FEW)[0]
    serving = Serving(encoding.runner)
    serving.place(again, 5)
    step = serving._message([(again, len(again.prompt))])
    assert list(encoding.runner.run(step).missing) == expected.encoded
    encoding.runner.run(encoding.encode(encoding.units(again, 0))[0])
    again.is_started = False
    serving.run([again])
    assert again.answer() == before
