"""Pictures and video in prompts: placeholders of templates and clients, positions of items, and placeholders that users cannot
type.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.record import ModelRecord
from engine.errors import RequestError
from engine.messages import (
    ChatPrompt,
    MediaItem,
    MediaSource,
    MediaUnit,
    Prompt,
    TextPrompt,
    Tokenize,
    Tokenized,
    TokensPrompt,
)
from engine.tokenizer.actor import preparation_for
from engine.tokenizer.placement import Placement
from engine.tokenizer.preparation import Preparation, Prepared, PreparedPrompt, Refusal
from tests.configurations import engine_config
from tests.paths import GOLDEN
from tests.requests import submit_of

MODELS = ("qwen2_5_vl", "qwen3_vl", "ernie4_5_vl_moe")
START, END, IMAGE, VIDEO = 3, 4, 5, 6
PAD = "<|image_pad|>"
SHOWN = f"<|vision_start|>{PAD}<|vision_end|>"
MAX_MODEL_LEN = 512


@cache
def preparation(model: str, template: str = "") -> Preparation:
    return of_record(ModelRecord.read(GOLDEN / model), template)


def of_record(record: ModelRecord, template: str = "") -> Preparation:
    return preparation_for(
        engine_config(model="", max_model_len=MAX_MODEL_LEN, num_kv_blocks=64, run_id="", run_dir="", chat_template=template),
        record,
    )[0]


def tokenized(prepared: Preparation, prompt: Prompt, *media: MediaItem) -> list[int]:
    answer = prepared.prepare(Tokenize("c", "api0", prompt, media=list(media)))
    assert isinstance(answer, Tokenized), answer
    return array("i", answer.token_ids).tolist()


def item(kind: str, *grid: int, seconds: float = 0.0, times: Sequence[float] = (), num_units: int = 0) -> MediaItem:
    """Return an item of `grid` patches; two by two are a token."""
    source = MediaSource("api0", (), kind)
    hashes = tuple(bytes([index]) * 32 for index in range(num_units or grid[0]))
    return MediaItem(source, kind, (grid[0], grid[1], grid[2]), hashes, grid[1] * grid[2] // 4, tuple(times), seconds)


def placed(model: str, prompt: Prompt, *media: MediaItem, **options: Any) -> tuple[list[int], tuple[MediaUnit, ...]]:
    """Return the tokens and units of a sequence's prompt. RequestError where it is refused."""
    bounds = options.pop("mask_bounds", b"")
    answer = preparation(model).prepare(submit_of(prompt, media=list(media), mask_bounds=bounds, **options))
    assert isinstance(answer, Prepared), answer
    found = answer.prompts[0]
    if isinstance(found, Refusal):
        raise RequestError(found.message, status=found.status, code=found.code, param=found.param)
    assert isinstance(found, PreparedPrompt)
    return array("i", found.tokenized.token_ids).tolist(), found.tokenized.units


def refusal(model: str, prompt: Prompt, *media: MediaItem, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        placed(model, prompt, *media, **options)
    assert caught.value.status == 400
    return caught.value


def tokens(*token_ids: int) -> TokensPrompt:
    return TokensPrompt(array("i", token_ids).tobytes())


def chat(*parts: dict[str, Any] | str, **options: Any) -> ChatPrompt:
    """Return a chat of one message. Pictures come from the api as {"type": "image"}."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return ChatPrompt(json.dumps([{"role": "user", "content": content}]).encode(), **options)


PICTURE, CLIP = {"type": "image"}, {"type": "video"}


@cache
def plain(model: str) -> tokenizers.Tokenizer:
    """Return the checkpoint's own tokenizer, which takes every placeholder for one."""
    return tokenizers.Tokenizer.from_file(str(GOLDEN / model / "tokenizer.json"))


def plain_ids(model: str, text: str) -> list[int]:
    return plain(model).encode(text, add_special_tokens=False).ids


def asked(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


# ---------------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("model", MODELS)
def test_golden_prompts_are_reproduced(model: str) -> None:
    for case in json.loads((GOLDEN / model / "golden.json").read_text())["cases"]:
        media = [item("image", *grid) for grid in case["image_grid_thw"]]
        whole = case["prompt_token_ids"]
        shrunk = [token for place, token in enumerate(whole) if token != IMAGE or whole[place - 1] != IMAGE]
        for given_ids in (whole, shrunk):
            token_ids, units = placed(model, tokens(*given_ids), *media)
            assert token_ids == whole
            assert [unit.item for unit in units] == list(range(len(media)))
            for unit, (_, height, width) in zip(units, case["image_grid_thw"], strict=True):
                assert (unit.height, unit.width, unit.num_tokens) == (height // 2, width // 2, height * width // 4)
                assert whole[unit.start - 1 : unit.start + unit.num_tokens + 1] == [START, *[IMAGE] * unit.num_tokens, END]


@pytest.mark.parametrize("model", MODELS)
def test_pictures_keep_their_place_in_a_conversation(model: str) -> None:
    token_ids, units = placed(model, chat("What? ", PICTURE, " and", PICTURE), item("image", 1, 4, 6), item("image", 1, 2, 2))
    text = asked(f"What? <|vision_start|>{PAD * 6}<|vision_end|> and{SHOWN}")
    assert token_ids == plain_ids(model, text)
    assert [(unit.num_tokens, unit.height, unit.width, unit.time) for unit in units] == [(6, 2, 3, 0), (1, 1, 1, 0)]


LOOP = "{%% for p in messages[0].content %%}{{ '<|image_pad|>' if %s else p.text }}{%% endfor %%}"
TEMPLATES = {
    "type": LOOP % "p.type == 'image'",
    "type of a link": LOOP % "p.type == 'image_url'",
    "field": LOOP % "'image' in p",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_ask_for_pictures_in_several_ways(name: str) -> None:
    picture = item("image", 1, 2, 4)
    token_ids = tokenized(preparation("qwen2_5_vl", TEMPLATES[name]), chat(PICTURE, "x", PICTURE), picture, picture)
    assert token_ids == [IMAGE, IMAGE, *plain_ids("qwen2_5_vl", "x"), IMAGE, IMAGE]


def test_template_without_pictures_refuses_them() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    answer = preparation("qwen2_5_vl", template).prepare(Tokenize("c", "api0", chat(PICTURE), media=[item("image", 1, 2, 4)]))
    assert isinstance(answer, Refusal)
    assert (answer.code, answer.param) == ("unsupported_media", "messages")


# --------------------------------------------------------------------------------------------------------- typed placeholders

FRAGMENTS = ["<|vision_start|>", "<|vision_end|>", PAD, "<|video_pad|>", "<|", "|>", "image_pad", "<|image", "_pad|>", "<", ">"]
TYPED = st.lists(st.sampled_from([*FRAGMENTS, "x", " ", "é"]), max_size=8).map("".join)


@given(before=st.lists(TYPED, min_size=1, max_size=3), after=st.lists(TYPED, max_size=3))
@settings(deadline=None, max_examples=50)
def test_a_typed_placeholder_is_text(before: list[str], after: list[str]) -> None:
    """A typed placeholder binds nothing and shifts nothing, also when several parts form it together."""
    model = "qwen2_5_vl"
    token_ids, (unit,) = placed(model, chat(*before, PICTURE, *after), item("image", 1, 4, 4))
    assert [place for place, token in enumerate(token_ids) if token in (IMAGE, VIDEO)] == list(
        range(unit.start, unit.start + 4)
    )
    shown = plain(model).decode(token_ids, skip_special_tokens=False)
    assert shown == asked(f"{''.join(before)}<|vision_start|>{PAD * 4}<|vision_end|>{''.join(after)}")


@pytest.mark.parametrize("field", ["role", "name", "arguments", "tools"])
def test_typed_placeholder_is_text_in_every_field(field: str) -> None:
    template = (
        "{{ tools | tojson if tools }}{% for m in messages %}<|{{ m.role }}|>{{ m.name }}"
        "{{ m.tool_calls | tojson if m.tool_calls }}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for c in m.content %}{{ '<|image_pad|>' if c.type == 'image' else c.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    message: dict[str, Any] = {"role": "user", "content": [PICTURE]}
    tools = b""
    if field == "role":
        message["role"] = "image_pad"
    elif field == "name":
        message["name"] = PAD
    elif field == "arguments":
        message["tool_calls"] = [{"function": {"name": PAD, "arguments": {PAD: PAD}}}]
    else:
        tools = json.dumps([{"name": PAD}]).encode()
    prompt = ChatPrompt(json.dumps([message]).encode(), tools)
    token_ids = tokenized(preparation("qwen2_5_vl", template), prompt, item("image", 1, 2, 6))
    assert token_ids[-3:] == [IMAGE] * 3
    assert token_ids.count(IMAGE) == 3


def test_escaped_placeholders_of_a_tokenizer_are_hidden() -> None:
    record = ModelRecord.read(GOLDEN / "qwen2_5_vl")
    name = "tokenizer.json"
    escaped = record.files[name].replace(PAD.encode(), PAD.replace("|", "\\u007c").encode())
    assert escaped != record.files[name]
    record.files[name] = escaped
    config = engine_config(model="", max_model_len=64, num_kv_blocks=64, run_id="", run_dir="")
    answer = preparation_for(config, record)[0].prepare(
        Tokenize("c", "api0", chat(PAD, PICTURE), media=[item("image", 1, 2, 6)])
    )
    assert isinstance(answer, Tokenized), answer
    assert array("i", answer.token_ids).tolist().count(IMAGE) == 3


@pytest.mark.parametrize("model", MODELS)
def test_bare_prompt_binds_its_placeholders(model: str) -> None:
    token_ids, (unit,) = placed(model, TextPrompt(f"a {SHOWN} b", False), item("image", 1, 4, 4))
    assert token_ids == plain_ids(model, f"a <|vision_start|>{PAD * 4}<|vision_end|> b")
    again, units = placed(model, TextPrompt(f"a <|vision_start|>{PAD * 4}<|vision_end|> b", False), item("image", 1, 4, 4))
    assert (again, units) == (token_ids, (unit,))


def test_baidu_template_has_its_own_placeholders() -> None:
    template = LOOP.replace("<|image_pad|>", "<|image@placeholder|>") % "p.type == 'image'"
    token_ids = tokenized(
        preparation("ernie4_5_vl_moe", template), chat(PICTURE, "<|image@placeholder|>"), item("image", 1, 2, 4)
    )
    assert token_ids == [IMAGE, IMAGE, *plain_ids("ernie4_5_vl_moe", "<|image@placeholder|>")]


# ------------------------------------------------------------------------------------------------------------------- video


def test_video_positions_count_seconds_in_qwen2_5_vl() -> None:
    clip = item("video", 4, 2, 4, seconds=0.7)
    token_ids, units = placed("qwen2_5_vl", chat(CLIP, "?"), clip)
    assert token_ids == plain_ids("qwen2_5_vl", asked(f"<|vision_start|>{'<|video_pad|>' * 8}<|vision_end|>?"))
    first = token_ids.index(VIDEO)
    assert [(unit.start - first, unit.time, unit.is_continued) for unit in units] == [
        (0, 0, False),
        (2, 1, True),  # 1.4
        (4, 2, True),  # 2.8
        (6, 4, True),  # 4.2
    ]


@pytest.mark.parametrize("seconds", [1e9, 2e300, float("inf"), float("nan")])
def test_a_video_that_lasts_for_ever_is_refused(seconds: float) -> None:
    for num_rows in (1, 4):
        error = refusal("qwen2_5_vl", tokens(9, START, VIDEO, END, 9), item("video", num_rows, 2, 4, seconds=seconds))
        assert (error.code, error.param) == ("invalid_video", "prompt")
    token_ids, _ = placed("qwen3_vl", tokens(9, START, VIDEO, END, 9), item("video", 1, 2, 4, seconds=seconds))
    assert token_ids.count(VIDEO) == 2


def test_a_video_counts_its_rows_in_ernie() -> None:
    clip = item("video", 6, 4, 4, num_units=3)  # two frames are a unit
    token_ids, units = placed("ernie4_5_vl_moe", tokens(9, START, VIDEO, END, 9), clip)
    assert token_ids == [9, START, *[VIDEO] * 12, END, 9]
    assert [(unit.start, unit.index, unit.time, unit.is_continued) for unit in units] == [
        (2, 0, 0, False),
        (6, 1, 1, True),
        (10, 2, 2, True),
    ]


FRAMES = "<0.3 seconds><|vision_start|>{0}<|vision_end|><1.5 seconds><|vision_start|>{0}<|vision_end|>"


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_qwen3_vl_frames_follow_their_timestamps(num_tokens: int) -> None:
    model = "qwen3_vl"
    clip = item("video", 2, 2, 2 * num_tokens, times=(0.25 + 1e-9, 1.5))
    frames = FRAMES.format("<|video_pad|>" * num_tokens)
    written = "<|vision_start|><|video_pad|><|vision_end|>"
    for prompt, text in (
        (chat("So: ", CLIP, "end"), asked(f"So: {frames}end")),
        (TextPrompt(f"a{written}b", False), f"a{frames}b"),
        (TextPrompt("a<|video_pad|>b", False), f"a{frames}b"),
        (TextPrompt(f"a{frames}b", False), f"a{frames}b"),
        (tokens(*plain_ids(model, f"a{frames}b")), f"a{frames}b"),
        (tokens(*plain_ids(model, f"<|im_start|>{written}b")), f"<|im_start|>{frames}b"),
    ):
        if num_tokens == 1 and prompt == TextPrompt(f"a{frames}b", False):
            continue  # these cannot be told from two videos
        token_ids, units = placed(model, prompt, clip)
        assert token_ids == plain_ids(model, text)
        assert [(unit.index, unit.time, unit.is_continued, unit.num_tokens) for unit in units] == [
            (0, 0, False, num_tokens),
            (1, 0, False, num_tokens),
        ]
        assert all(token_ids[unit.start - 1] == START for unit in units)


def test_videos_may_be_adjacent() -> None:
    """Templates, such as the embedded model's, may put nothing between their placeholders."""
    clip = item("video", 2, 2, 2, times=(0.25 + 1e-9, 1.5))
    template = "{% for p in messages[0].content %}{{ '<|video_pad|>' if p.type == 'video' else p.text }}{% endfor %}"
    frames = FRAMES.format("<|video_pad|>")
    for count in (2, 5):
        token_ids = tokenized(preparation("qwen3_vl", template), chat(*[CLIP] * count, "x"), *[clip] * count)
        assert token_ids == plain_ids("qwen3_vl", frames * count + "x")


def test_kinds_bind_apart_and_units_follow_the_prompt() -> None:
    media = (item("image", 1, 2, 2), item("image", 1, 2, 4), item("video", 2, 2, 2, times=(0.0, 1.0)))
    token_ids, units = placed("qwen3_vl", TextPrompt(f"{SHOWN}<|video_pad|>{SHOWN}", False), *media)
    assert [(unit.item, unit.index) for unit in units] == [(0, 0), (2, 0), (2, 1), (1, 0)]
    assert sorted(unit.start for unit in units) == [unit.start for unit in units]
    assert token_ids.count(IMAGE) == 3


# ---------------------------------------------------------------------------------------------------------------- mistakes


def test_runs_and_items_must_match() -> None:
    picture = item("image", 1, 4, 4)
    for prompt, media, numbers in (
        (tokens(1, IMAGE, 2), (), "1 image placeholders for 0 image items"),
        (tokens(1, 2), (picture,), "0 image placeholders for 1 image items"),
        (tokens(IMAGE, 2, IMAGE), (picture,), "2 image placeholders for 1 image items"),
        (tokens(1, VIDEO), (picture,), "1 video placeholders for 0 video items"),
        (tokens(1, *[IMAGE] * 3), (picture,), "3 consecutive placeholder tokens at 1, but media item 1 has 4 tokens"),
        (TextPrompt(f"{PAD}{PAD}", False), (picture,), "2 consecutive placeholder tokens at 0, but media item 1 has 4 tokens"),
    ):
        error = refusal("qwen2_5_vl", prompt, *media)
        assert numbers in error.message
        assert (error.code, error.param) == ("invalid_value", "prompt")


def test_too_long_prompt_names_tokens_of_each_item() -> None:
    big, small = item("image", 1, 40, 40), item("image", 1, 4, 4)
    error = refusal("qwen2_5_vl", chat(PICTURE, PICTURE, PICTURE), small, big, big)
    assert (error.code, error.param) == ("context_length_exceeded", "messages")
    assert "804 of them media; item 1: 4, item 2: 400, item 3: 400" in error.message
    error = refusal("qwen2_5_vl", chat(PICTURE, PICTURE, "x" * 200), big, small, max_tokens=100)
    assert error.code == "context_length_exceeded"
    assert "404 of them media; item 1: 400, item 2: 4" in error.message


def test_mask_offsets_are_one_for_each_token() -> None:
    bounds = array("i", [0, 3] * 6).tobytes()
    placed("qwen2_5_vl", tokens(1, IMAGE, 2), item("image", 1, 4, 4), mask_bounds=bounds)
    error = refusal("qwen2_5_vl", tokens(1, IMAGE, 2), item("image", 1, 2, 4), mask_bounds=bounds)
    assert re.search(r"has 6 entries, but the prompt has 4 tokens", error.message)
    assert error.param == "attention_mask_offset"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((1, IMAGE, IMAGE, 2), (1, START, *[IMAGE] * 4, END, START, *[IMAGE] * 4, END, 2)),
        ((START, IMAGE, 1, IMAGE, END), (START, *[IMAGE] * 4, END, 1, START, *[IMAGE] * 4, END)),
        ((START, *[IMAGE] * 4, END, IMAGE), (START, *[IMAGE] * 4, END, START, *[IMAGE] * 4, END)),
    ],
)
def test_bare_placeholders_get_markers(given: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """A template of Gemma 4 writes only the placeholder."""
    vision = gemma4_record().config.vision
    assert vision is not None
    placement = Placement(vision, [None] * 16, {})
    items = [item("image", 1, 4, 4)] * 2
    found = placement.place(
        array("i", given), items, param="prompt", max_tokens=99, encode=lambda _: (), are_single=given[0] == 1
    )
    assert found.token_ids.tolist() == list(expected)
    assert [found.token_ids[unit.start - 1] for unit in found.units] == [START] * 2


def test_mask_offsets_need_layers_with_bounds() -> None:
    record = gemma4_record()
    config = msgspec.structs.replace(record.config, causal_layers=(0,))
    prepared = of_record(ModelRecord(record.path, config, record.files))
    answer = prepared.prepare(submit_of(tokens(1, 2), mask_bounds=array("i", [0, 1, 0, 1]).tobytes()))
    assert isinstance(answer, Prepared)
    (found,) = answer.prompts
    assert isinstance(found, Refusal)
    assert (found.status, found.param) == (400, "attention_mask_offset")


def gemma4_record() -> ModelRecord:
    """Return the record of another model with Gemma 4's rules for pictures."""
    record = ModelRecord.read(GOLDEN / "qwen2_5_vl")
    assert record.config.vision is not None
    vision = msgspec.structs.replace(record.config.vision, kind="gemma4")
    return ModelRecord(record.path, msgspec.structs.replace(record.config, vision=vision), record.files)


def test_counted_text_may_lack_its_pictures() -> None:
    token_ids = tokenized(preparation("qwen2_5_vl"), TextPrompt(f"a{PAD}", False))
    assert token_ids == plain_ids("qwen2_5_vl", f"a{PAD}")
