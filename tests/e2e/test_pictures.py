"""Vision models over HTTP: golden outputs of a third party for pictures, video and features, the `openai` client, deaths of any
process at any stage of a picture, damaged files, and the cost of a picture.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from engine.checkpoint.model_config import ModelConfig
from tests.api.media.file_server import FileServer
from tests.e2e.engine_process import GOLDEN, OPERATOR, EngineProcess
from tests.e2e.hostile_media import abort_a_third, check_nothing_is_held, statuses_of_damaged
from tests.e2e.test_golden import TOLERANCE, body_of, check_prompt_logprobs, golden_cases, picture_link, with_pictures
from tests.e2e.workload import answers_together, wait_for_waiting
from tests.golden.make_units import pixels_of
from tests.paths import DRAWN
from tests.waiting import WATCHDOG_S, wait_until
from tools.bench.pictures import picture

EVERYONE = ("media0", "scheduler", "worker0", "tokenizer0", "cache")
KILLED = {  # everyone, and while what is done
    "qwen2_5_vl": ("fetching", "answering"),
    "qwen3_vl": ("encoding",),
    "ernie4_5_vl_moe": ("looking", "decoding"),
}
SERVED = [
    ("qwen2_5_vl", ()),
    # a picture is encoded layer by layer, and read in chunks
    ("qwen3_vl", ("--max-num-batched-tokens", "16", "--max-num-seqs", "8", "--max-num-batched-encoder-embeds", "16")),
    ("ernie4_5_vl_moe", ("--block-size", "4", "--num-kv-blocks", "60")),
]
ANSWERS = json.loads((DRAWN / "golden.json").read_text())
LINK_OPTIONS = ("--allowed-media-networks", "127.0.0.0/8", "--restart-limit", "100")


@pytest.fixture(scope="module", params=SERVED, ids=lambda served: served[0])
def seeing(request: pytest.FixtureRequest) -> Iterator[tuple[str, EngineProcess]]:
    architecture, options = request.param
    with EngineProcess(
        GOLDEN / architecture, "--dtype", "float32", "--max-model-len", "400", *options, *LINK_OPTIONS
    ) as engine:
        yield architecture, engine


def test_golden_outputs(seeing: tuple[str, EngineProcess]) -> None:
    """Pictures after runs of placeholders and after single ones; alone, and all at once."""
    architecture, engine = seeing
    cases = golden_cases(architecture)
    for case in cases:
        body = with_pictures(architecture, case) | {"prompt_logprobs": 2}
        choice = (
            httpx.post(f"{engine.url}/v1/completions", json=body, timeout=WATCHDOG_S).raise_for_status().json()["choices"][0]
        )
        assert choice["token_ids"] == case["greedy_token_ids"]
        best = [entry[0][1] for entry in case["top_logprobs"]]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(best, abs=TOLERANCE)
        check_prompt_logprobs(choice["prompt_logprobs"], case)
    bodies = [with_pictures(architecture, case) for case in cases]
    shrunk = [body | {"prompt": [token for token, _ in itertools.groupby(body["prompt"])]} for body in bodies]
    for case, answer in zip(cases * 4, answers_together(engine, (bodies + shrunk) * 2), strict=True):
        assert answer.token_ids == case["greedy_token_ids"]


def ask(engine: EngineProcess, body: dict[str, Any]) -> dict[str, Any]:
    """Return the choice that the engine completes it with."""
    answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=WATCHDOG_S)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def check_golden(choice: dict[str, Any], case: dict[str, Any]) -> None:
    assert choice["token_ids"] == case["greedy_token_ids"]
    best = [entry[0][1] for entry in case["top_logprobs"]]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(best, abs=TOLERANCE)


def test_golden_video(seeing: tuple[str, EngineProcess]) -> None:
    """A picture, another one, and a video in one prompt."""
    architecture, engine = seeing
    check_golden(ask(engine, with_video(architecture)), ANSWERS[architecture])


def with_video(architecture: str) -> dict[str, Any]:
    case = ANSWERS[architecture]
    vision = ModelConfig.read(GOLDEN / architecture).vision
    assert vision is not None
    side = vision.spatial_merge_size
    pictures, frames = [], []
    for unit in case["units"]:
        pixels = pixels_of(unit["frames"], unit["height"] * side, unit["width"] * side, vision.patch_size)
        (pictures if unit["frames"] == 1 else frames).extend(png(frame) for frame in pixels)
    video = "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)
    media = {"image": [picture_link(content) for content in pictures], "video": [video]}
    return body_of(case) | {"multi_modal_data": media, "mm_processor_kwargs": {"min_pixels": 1}}


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_golden_features(seeing: tuple[str, EngineProcess]) -> None:
    """Each picture is given as the output of the encoder."""
    architecture, engine = seeing
    before = engine.metric("encoder_units_total")
    with np.load(GOLDEN / architecture / "features.npz") as features:
        for case in golden_cases(architecture):
            links = []
            for name in case["images"]:
                file = BytesIO()
                np.save(file, features[name])
                links.append(f"data:application/octet-stream;base64,{base64.b64encode(file.getvalue()).decode()}")
            given = {"image_feature_urls": links, "image_grid_thws": case["image_grid_thw"]} if links else {}
            check_golden(ask(engine, body_of(case) | given), case)
    assert engine.metric("encoder_units_total") > before, "they are kept where encoded ones are"


def test_one_picture_is_encoded_once(seeing: tuple[str, EngineProcess]) -> None:
    """All concurrent requests and later ones share one encoding; its stages are counted."""
    architecture, engine = seeing
    side = 56 if architecture != "qwen3_vl" else 64
    names = ("encoder_units_total", "media_units_total", "media_decode_seconds_count", "media_prepare_seconds_count")
    before = {name: engine.metric(name) for name in names}
    encode_s = engine.metric("encoder_seconds_total")
    body = {"prompt": [40, 3, 5, 4, 41], "max_tokens": 4, "ignore_eos": True, "temperature": 0, "logprobs": 1}
    bodies = [body | {"return_token_ids": True, "prompt": [40 + place, *body["prompt"]]} for place in range(6)]
    bodies = [body | {"multi_modal_data": {"image": [picture_link(picture(side, side, 99))]}} for body in bodies]
    first, again = answers_together(engine, bodies), answers_together(engine, bodies)
    assert first == again
    found = {name: engine.metric(name) - before[name] for name in names}
    assert found == {
        "encoder_units_total": 1, "media_units_total": 1, "media_decode_seconds_count": 1, "media_prepare_seconds_count": 12
    }  # fmt: skip
    assert engine.metric("encoder_seconds_total") > encode_s
    assert {answer.num_completion_tokens for answer in first} == {4}


def test_tokens_of_a_picture_that_see_each_other(seeing: tuple[str, EngineProcess]) -> None:
    """Bounds that equal the causal ones change nothing; a span that sees up to its end changes what follows."""
    architecture, engine = seeing
    case = golden_cases(architecture)[0]
    body = with_pictures(architecture, case)
    prompt = case["prompt_token_ids"]
    check_golden(ask(engine, body | {"attention_mask_offset": list(range(len(prompt)))}), case)
    last = max(place for place, token in enumerate(prompt) if token == 5)
    bounds = [last if token == 5 else place for place, token in enumerate(prompt)]
    wide = [ask(engine, body | {"attention_mask_offset": bounds})["logprobs"]["token_logprobs"] for _ in range(2)]
    assert wide[0] == wide[1]
    assert wide[0] != pytest.approx([entry[0][1] for entry in case["top_logprobs"]], abs=TOLERANCE)


def test_damaged_files_and_leaving_clients_hold_nothing(seeing: tuple[str, EngineProcess]) -> None:
    architecture, engine = seeing
    if architecture == "qwen2_5_vl":  # same for every model: it depends on the media process and the api
        assert set(statuses_of_damaged(engine, range(60))) == {200, 400}
    abort_a_third(engine, 18)
    check_nothing_is_held(engine)
    assert engine.is_healthy()


def asking(*parts: str | bytes) -> list[Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": picture_link(part)}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def test_the_openai_client(seeing: tuple[str, EngineProcess]) -> None:
    architecture, engine = seeing
    question = asking("Which? ", picture(60, 90, 1), " or ", picture(90, 60, 2))
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="-", max_retries=0) as client:
        options: dict[str, Any] = {
            "model": architecture,
            "temperature": 0,
            "max_tokens": 12,
            "extra_body": {"ignore_eos": True},
        }
        whole = client.chat.completions.create(messages=question, **options)
        stream = client.chat.completions.create(messages=question, stream=True, **options)
        pieces = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
        assert "".join(pieces) == whole.choices[0].message.content
        assert whole.usage is not None
        counted = (
            httpx.post(f"{engine.url}/tokenize", json={"messages": question}, timeout=WATCHDOG_S).raise_for_status().json()
        )
        assert counted["count"] == whole.usage.prompt_tokens
        swapped = asking("Which? ", picture(60, 90, 3), " or ", picture(90, 60, 2))
        other = client.chat.completions.create(messages=swapped, logprobs=True, **options)
        again = client.chat.completions.create(messages=question, logprobs=True, **options)
        assert _logprobs(other) != _logprobs(again), "another picture, another answer"
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(messages=asking("a", b"no picture"), **options)
        assert (caught.value.code, caught.value.param) == ("unsupported_image_media_type", "messages[0].content[1]")


def _logprobs(answer: Any) -> list[float]:
    return [entry.logprob for entry in answer.choices[0].logprobs.content]


class Held:
    """A request with a link that leads to another picture each time, and to none until the gate opens."""

    def __init__(self, engine: EngineProcess, files: FileServer, actor: str) -> None:
        self.engine, self.files, self.actor = engine, files, actor
        self.begun = threading.Event()

    def ask(self, body: dict[str, Any]) -> str:
        text = ""
        url = f"{self.engine.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=WATCHDOG_S) as stream:
            assert stream.status_code == 200, stream.read()
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    self.begun.set()
                    text += "".join(choice["delta"].get("content", "") for choice in json.loads(line[6:])["choices"])
        return text

    def kill(self) -> None:
        epoch = self.engine.kill(self.actor)
        self.engine.wait_for_restart(self.actor, epoch)

    @contextlib.contextmanager
    def media_stopped(self) -> Iterator[None]:
        """Stop the media process from reading its mailbox."""
        pid = int(self.engine.actors()["media0"]["pid"])
        os.kill(pid, signal.SIGSTOP)
        yield
        with contextlib.suppress(ProcessLookupError):  # it was the one to be killed
            os.kill(pid, signal.SIGCONT)

    def open(self) -> None:
        wait_until(lambda: self.files.num_heard("/held"), what="the link is asked for")
        self.files.gate.set()


def fetching(held: Held) -> None:
    """Stage: the link's server has not answered yet."""
    wait_until(lambda: held.files.num_heard("/held"), what="the link is asked for")
    held.kill()
    held.open()


def looking(held: Held) -> None:
    """Stage: the file waits for a media process that does not read it."""
    with held.media_stopped():
        held.open()
        wait_until(lambda: held.engine.metric("media_held_bytes") > 0, what="the file is there")
        held.kill()


def decoding(held: Held) -> None:
    """Stage: the item is known; its pixels are requested and do not come."""
    pause = held.engine.url + "/admin/pause"
    httpx.post(pause, json={"mode": "abort"}, timeout=WATCHDOG_S, headers=OPERATOR).raise_for_status()
    held.open()
    wait_for_waiting(held.engine, 1)
    with held.media_stopped():
        httpx.post(f"{held.engine.url}/admin/resume", json={}, timeout=WATCHDOG_S, headers=OPERATOR).raise_for_status()
        held.kill()


def encoding(held: Held) -> None:
    """Stage: the encoder's first layers are dispatched: between them, or between two chunks of the picture."""
    before = held.engine.metric("encoder_calls_total")
    held.open()
    wait_until(lambda: held.engine.metric("encoder_calls_total") > before, what="a call of the encoder")
    held.kill()


def answering(held: Held) -> None:
    """Stage: some text is there."""
    held.open()
    assert held.begun.wait(WATCHDOG_S)
    held.kill()


STATIONS: dict[str, Callable[[Held], None]] = {
    station.__name__: station for station in (fetching, looking, decoding, encoding, answering)
}


def test_picture_survives_any_death(seeing: tuple[str, EngineProcess]) -> None:
    """The link leads to another picture each time; the answer is that of the first fetch, before and after the death."""
    architecture, engine = seeing
    for station, actor in itertools.product(KILLED[architecture], EVERYONE):
        outlives(engine, actor, STATIONS[station])


def outlives(engine: EngineProcess, actor: str, station: Callable[[Held], None]) -> None:
    options = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    files = FileServer()
    files.make = lambda number: picture(168 + 28 * number, 140, zlib.crc32(f"{actor} {station.__name__} {number}".encode()))
    held = Held(engine, files, actor)
    with files.running(), ThreadPoolExecutor(1) as pool:
        link = {"type": "image_url", "image_url": {"url": f"{files.url}/held/{actor}"}}
        body = {"messages": [{"role": "user", "content": [link, {"type": "text", "text": "?"}]}], **options}
        asked = pool.submit(held.ask, body)
        station(held)
        text = asked.result(WATCHDOG_S)
    wait_until(engine.is_healthy, what="all ready again")
    (fetched,) = files.served
    url = f"{engine.url}/v1/chat/completions"
    expected = httpx.post(url, json={"messages": asking(fetched, "?"), **options}, timeout=WATCHDOG_S).raise_for_status()
    assert text == expected.json()["choices"][0]["message"]["content"], (actor, station.__name__)
    assert engine.metric("media_held_bytes") == 0
