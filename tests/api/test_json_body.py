"""Bodies decoded in parts: the same object as at once, invalid JSON refused, and the event loop blocked only for bounded
work."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.json_body import BodyDecoder, DecodingLimits
from engine.errors import RequestError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(st.sampled_from('ab"\\\n,:[]{}é😀')),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(st.sampled_from('a"\\é:,'), max_size=3), inner),
    max_leaves=20,
)


def decode(body: bytes, limits: DecodingLimits) -> dict[str, Any]:
    return asyncio.run(BodyDecoder(limits).decode(body))


@given(st.dictionaries(st.sampled_from(["a", "prompt", "b\\", '"', ""]), JSON), st.booleans(), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_parts_make_the_whole(fields: dict[str, Any], is_wide: bool, part_bytes: int) -> None:
    body = orjson.dumps(fields, option=orjson.OPT_INDENT_2 if is_wide else None)
    limits = DecodingLimits(whole_bytes=0, slice_bytes=1 + part_bytes // 3, part_bytes=part_bytes)
    assert decode(body, limits) == fields


@given(st.text(st.sampled_from('{}[]:,"\\ a1\n'), max_size=40), st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_invalid_json_is_invalid_in_parts_too(text: str, part_bytes: int) -> None:
    for body in (text.encode(), b'{"prompt":[' + text.encode() + b"]}"):
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            value = None
        limits = DecodingLimits(whole_bytes=0, slice_bytes=7, part_bytes=part_bytes)
        if isinstance(value, dict):
            assert decode(body, limits) == value
        else:
            with pytest.raises(RequestError, match="not valid JSON"):
                decode(body, limits)


def test_limits() -> None:
    limits = DecodingLimits(0, 0, 0, 64, 64, max_element_bytes=100, max_values=9, max_names=5, max_containers=4)
    for body in (
        b'{"prompt":[' + b"1," * 10 + b"1]}",
        b"{" + b'"a":1,' * 5 + b'"a":1}',
        b'{"a":[[],[],[]]}',
        b'{"a":' + b'""' * 15,
    ):
        with pytest.raises(RequestError, match="send less") as raised:
            decode(body, limits)
        assert raised.value.code == "body_too_complex"
    with pytest.raises(RequestError, match="prompt: a value has") as raised:
        decode(b'{"x":1,"prompt":["%b"]}' % (b"a" * 100), limits)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "prompt")
    assert decode(b'{"prompt":["%b","%b"]}' % (b"a" * 90, b"b" * 90), limits) == {"prompt": ["a" * 90, "b" * 90]}


SIZE = 4 << 20
HOSTILE = {
    "lists": b'{"prompt":[' + b"[1]," * (SIZE // 4) + b"[1]]}",
    "objects": b'{"messages":[' + b'{"a":1},' * (SIZE // 8) + b"{}]}",
    "names": b'{"logit_bias":{' + b",".join(b'"%d":1' % index for index in range(SIZE // 10)) + b"}}",
    "nothing but quotes": b'{"a":' + b'""' * (SIZE // 2),
    "commas": b"{" + b"," * SIZE,
    "nested": b'{"a":' * (SIZE // 5),
}


@pytest.fixture(scope="module")
def parser_s() -> float:
    """Return the CPU time of the parser for as many bytes in one call."""
    start = time.thread_time()
    orjson.loads(HOSTILE["lists"])
    return time.thread_time() - start


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_the_loop_gets_turns(body: bytes, parser_s: float) -> None:
    """The CPU time between two turns is compared with that of one call of the parser."""
    longest = 0.0

    async def run() -> None:
        nonlocal longest
        decoding = asyncio.create_task(BodyDecoder(DecodingLimits()).decode(body))
        last = time.thread_time()
        while not decoding.done():
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, last = max(longest, now - last), now
        with pytest.raises(RequestError):
            await decoding

    asyncio.run(run())
    assert longest < parser_s / 5
