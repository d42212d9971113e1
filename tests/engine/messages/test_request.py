"""Messages that carry a part of a request's sequences."""

from __future__ import annotations

from engine.messages import SequencePart, encoded_part
from engine.messages.request import with_prompts


def test_message_carries_only_its_prompts_once() -> None:
    """Prompts may be encoded already, so identity counts."""
    prompts = [encoded_part(text)[0] for text in ("a", "b", "b", "c")]
    sequences = [SequencePart(f"{index}~{number}", prompt_index=index) for index in (3, 1, 2, 3) for number in range(2)]
    carried, parts = with_prompts((own, prompts[own.prompt_index]) for own in sequences)
    assert list(map(id, carried)) == [id(prompts[index]) for index in (3, 1, 2)]
    assert [own.prompt_index for own in parts] == [0, 0, 1, 1, 2, 2, 0, 0]
    assert [own.request_id for own in parts] == [own.request_id for own in sequences]
    again, same = with_prompts((own, carried[own.prompt_index]) for own in parts)
    assert all(one is other for one, other in zip(same, parts, strict=True))  # nothing to renumber
    assert len(again) == 3
