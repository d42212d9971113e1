"""Pictures and video in HTTP requests: which items there are, where and how long their bytes are held, and refusals."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.messages import MediaItem, Tokenize
from shm.extent_slab import GRANULE_BYTES
from tests.api.api_server import ApiServer
from tests.api.media.file_server import CONTENT, SLOW, FileServer
from tests.paths import GOLDEN
from tests.waiting import wait_until

LIMIT = 64 << 10
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


SEEING: dict[str, Any] = {
    "model": str(GOLDEN / "qwen2_5_vl"),
    "max_model_len": 1024,
    "num_kv_blocks": 64,
    "media_processes": 1,
    "encoder_cache_size": 64,
    "encoder_row_width": 64,
    "max_media_bytes": LIMIT,
    "media_memory": 8 * LIMIT,
    "mm_processor_cache_gb": 0.01,
    "limit_mm_per_prompt": {"image": 5, "video": 1},
    "allowed_media_networks": ("127.0.0.0/8",),
    "media_fetch_timeout_s": 5.0,
}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(tmp_path_factory.mktemp("seeing"), **SEEING) as running:
        yield running


@pytest.fixture(scope="module")
def files() -> Iterator[FileServer]:
    with FileServer().running() as server:
        yield server


@pytest.fixture(autouse=True)
def gate_is_closed(files: FileServer) -> None:
    """Close the gate before each test."""
    files.gate.clear()


@pytest.fixture(autouse=True)
def nothing_is_held_in_the_end(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "seeing" in request.fixturenames:
        server: ApiServer = request.getfixturevalue("seeing")
        wait_until(lambda: server.count("media_held_bytes") == 0, what="the media slab empty")


def data(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image(link: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": link}}


def asking(*parts: dict[str, Any] | str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


def media_of(server: ApiServer, answer: httpx.Response) -> list[MediaItem]:
    """Return the media that the tokenizer got with an answered request."""
    assert answer.status_code == 200, answer.text
    (submit,) = server.peer.submits(answer.headers["x-request-id"])
    return submit.media


def contents_of(server: ApiServer, items: list[MediaItem]) -> list[tuple[bytes, ...]]:
    found = {message.source.parts: content for message, content in zip(*_received(server), strict=True)}
    return [found[item.source.parts] for item in items]


def _received(server: ApiServer) -> tuple[list[Any], list[tuple[bytes, ...]]]:
    (peer,) = server.media_peers
    return peer.received, peer.contents


def refusal(server: ApiServer, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


# -------------------------------------------------------------------------------------------------------------------- items


def test_items_of_a_conversation_keep_their_order(seeing: ApiServer, files: FileServer) -> None:
    linked, given, clip = f"{files.url}/file/a", data(b"picture " * 5000), data(b"clip", "video/mp4")
    body = asking(
        "What?", image(linked), image(given), "and", {"type": "video_url", "video_url": clip, "uuid": "x"}, image(linked)
    )
    num_heard = files.num_heard("/file/a")
    answer = seeing.post(CHAT, body)
    media = media_of(seeing, answer)
    assert [item.kind for item in media] == ["image", "image", "video", "image"]
    assert contents_of(seeing, media) == [(CONTENT,), (b"picture " * 5000,), (b"clip",), (CONTENT,)]
    assert media[0] == media[3]
    assert files.num_heard("/file/a") == num_heard + 1, "a link is fetched once a request"
    (submit,) = seeing.peer.submits(answer.headers["x-request-id"])
    content = json.loads(submit.prompt.messages)[0]["content"]  # type: ignore[union-attr]
    kinds = [{"type": kind} for kind in ("image", "image", "video", "image")]
    assert [part for part in content if part["type"] != "text"] == kinds, "no bytes, no links"


def test_a_bare_prompt_brings_its_items_by_kind(seeing: ApiServer, files: FileServer) -> None:
    body = {
        "prompt": [1, 3, 5, 4, 2],
        "multi_modal_data": {"image": [data(b"a"), f"{files.url}/file/x"], "video": data(b"v", "video/mp4")},
        "image_feature_urls": [f"{files.url}/file/features"],
        "image_grid_thws": [[1, 2, 4]],
        "mm_processor_kwargs": {"max_pixels": 3136},
    }
    media = media_of(seeing, seeing.post(COMPLETION, body))
    assert [(item.kind, item.source.is_features, item.source.grid_thw) for item in media] == [
        ("image", False, None),
        ("image", False, None),
        ("image", True, (1, 2, 4)),
        ("video", False, None),
    ]
    assert contents_of(seeing, media) == [(b"a",), (CONTENT,), (CONTENT,), (b"v",)]
    assert {item.source.settings for item in media} == {b'{"mm_processor_kwargs":{"max_pixels":3136}}'}


def test_single_feature_link_may_be_a_text(seeing: ApiServer, files: FileServer) -> None:
    body = {"prompt": [1, 3, 2], "image_feature_urls": f"{files.url}/file/features", "image_grid_thws": [[1, 2, 4]]}
    media = media_of(seeing, seeing.post(COMPLETION, body))
    assert [(item.source.is_features, item.source.grid_thw) for item in media] == [(True, (1, 2, 4))]


def test_features_by_link_or_base64_with_grid(seeing: ApiServer, files: FileServer) -> None:
    encoded = base64.b64encode(b"rows").decode()
    nested = {"type": "image_embeds", "image_embeds": {"image_embeds": encoded, "image_grid_thw": [1, 4, 2]}}
    flat = {"type": "video_embeds", "video_embeds": f"{files.url}/file/f", "video_grid_thw": [2, 4, 4]}
    media = media_of(seeing, seeing.post(CHAT, asking(nested, flat)))
    assert [(item.kind, item.source.is_features, item.source.grid_thw) for item in media] == [
        ("image", True, (1, 4, 2)),
        ("video", True, (2, 4, 4)),
    ]
    assert contents_of(seeing, media) == [(b"rows",), (CONTENT,)]
    error = refusal(seeing, CHAT, asking({"type": "image_embeds", "image_embeds": encoded}))
    assert (error["code"], error["param"]) == ("invalid_features", "messages[0].content[0]")


def test_video_may_be_sent_as_frames(seeing: ApiServer) -> None:
    frames = ",".join(base64.b64encode(frame).decode() for frame in (b"one", b"two", b"three"))
    (item,) = media_of(
        seeing, seeing.post(CHAT, asking({"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}}))
    )
    assert contents_of(seeing, [item]) == [(b"one", b"two", b"three")]


def test_tokenize_brings_items_too(seeing: ApiServer) -> None:
    assert seeing.post("/tokenize", {"prompt": "x", "multi_modal_data": {"image": data(b"a")}}).status_code == 200
    assert seeing.post("/tokenize", asking(image(data(b"b")))).status_code == 200
    calls = [message for message in seeing.peer.received if isinstance(message, Tokenize)][-2:]
    assert [contents_of(seeing, call.media) for call in calls] == [[(b"a",)], [(b"b",)]]


def test_mask_offsets_become_bounds(seeing: ApiServer) -> None:
    answer = seeing.post(COMPLETION, {"prompt": [7, 8, 9, 9], "attention_mask_offset": [0, 3, [1, 3], [2, 3]]})
    (submit,) = seeing.peer.submits(answer.headers["x-request-id"])
    assert list(memoryview(submit.mask_bounds).cast("i")) == [0, 0, 0, 3, 1, 3, 2, 3]
    for wrong, place in (([0, 0], 1), ([0, 2], 1), ([[1, 1], 1], 0), ([0, [1, 0]], 1)):
        error = refusal(seeing, COMPLETION, {"prompt": [7, 8], "attention_mask_offset": wrong})
        assert error["param"] == f"attention_mask_offset[{place}]"


def test_the_openai_client_sends_pictures(seeing: ApiServer) -> None:
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as client:
        parts: Any = [{"type": "text", "text": "?"}, image(data(b"p"))]
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": parts}],
            max_tokens=5,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        assert sum(len(chunk.choices) for chunk in stream) >= 1
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [image(data(b"bad"))]}])  # type: ignore[list-item,misc]
        assert (caught.value.code, caught.value.param) == ("image_parse_error", "messages[0].content[0]")


# ----------------------------------------------------------------------------------------------------------------- refusals

MISTAKES: dict[str, tuple[str, str]] = {
    "ftp://a/b": ("invalid_image_url", "scheme"),
    "http://10.0.0.1/x": ("invalid_image_url", "public"),
    "file:///etc/passwd": ("invalid_image_url", "--allowed-local-media-path"),
    "s3://bucket/key": ("invalid_image_url", "keys"),
    "{files}/status/404": ("failed_to_download_image", "404"),
    "{files}/endless": ("image_file_too_large", str(LIMIT)),
    "data:image/png;base64,!!!!": ("invalid_base64_image", "base64"),
    "data:image/png;base64,AAAAA": ("invalid_base64_image", "base64"),
    "data:image/png;base64,AA==AAAA": ("invalid_base64_image", "base64"),
    "data:image/png;base64,%41%41%41%41": ("invalid_base64_image", "base64"),
    "data:image/png,abc": ("invalid_base64_image", "base64"),
    "data:image/png;base64," + "A" * (2 * LIMIT): ("image_file_too_large", str(LIMIT)),
    "data:image/png;base64,": ("image_parse_error", "empty"),
    data(b"bad"): ("image_parse_error", "no picture"),
}


@pytest.mark.parametrize("link", MISTAKES, ids=lambda link: link[:30])
def test_a_mistake_names_its_part(seeing: ApiServer, files: FileServer, link: str) -> None:
    code, fragment = MISTAKES[link]
    error = refusal(seeing, CHAT, asking("a", image(data(b"fine")), "b", image(link.format(files=files.url))))
    assert (error["code"], error["param"]) == (code, "messages[0].content[3]")
    assert fragment in error["message"]
    assert len(error["message"]) < 400
    error = refusal(seeing, COMPLETION, {"prompt": "x", "multi_modal_data": {"image": [link.format(files=files.url)]}})
    assert (error["code"], error["param"]) == (code, "multi_modal_data.image[0]")


def test_links_are_fetched_eight_at_a_time(tmp_path: Path, files: FileServer) -> None:
    """Eight is the default. Of several failures the first in order is reported, and links that have not begun never begin."""
    assert "media_download_parallel" not in SEEING
    with ApiServer(tmp_path, **(SEEING | {"limit_mm_per_prompt": {"image": 99}})) as server:
        files.max_at_once = 0
        answers: list[httpx.Response] = []
        links = [f"{files.url}/gate/order{index:02}" for index in range(20)]
        asking_them = threading.Thread(target=lambda: answers.append(server.post(CHAT, asking(*map(image, links)))))
        asking_them.start()
        wait_until(lambda: files.num_heard("/gate/order") == 8, what="eight links under way")
        heard = [path for path, _ in files.heard if path.startswith("/gate/order")]
        assert sorted(heard) == [f"/gate/order{index:02}" for index in range(8)]
        files.gate.set()
        asking_them.join()
        assert len(media_of(server, answers[0])) == 20
        assert files.max_at_once == 8

        links = [f"{files.url}/file/first", *(f"{files.url}/status/{status}" for status in (404, 410, 500))]
        late = [f"{files.url}/file/late{index}" for index in range(20)]
        error = refusal(server, CHAT, asking(*map(image, links + late)))
        assert "404" in error["message"]
        assert error["param"] == "messages[0].content[1]"
        assert files.num_heard("/file/late") < len(late)


def test_too_many_items_are_refused_before_fetching(seeing: ApiServer, files: FileServer) -> None:
    num_heard, num_prepared = len(files.heard), len(seeing.media_peers[0].received)
    error = refusal(seeing, CHAT, asking(*[image(f"{files.url}/file/{index}") for index in range(6)]))
    assert (error["code"], error["param"]) == ("too_many_items", "messages[0].content[5]")
    assert "6 image items, limit 5" in error["message"]
    assert refusal(seeing, CHAT, asking(*[image(data(b"!"))] * 10_000))["code"] == "too_many_items"
    assert (len(files.heard), len(seeing.media_peers[0].received)) == (num_heard, num_prepared)


def test_unpaired_grids_and_features_are_refused(seeing: ApiServer) -> None:
    body = {"prompt": "x", "image_feature_urls": ["http://127.0.0.1/x"], "image_grid_thws": []}
    error = refusal(seeing, COMPLETION, body)
    assert (error["code"], error["param"]) == ("invalid_features", "image_grid_thws")
    assert "1 entries" in error["message"]


def test_media_belong_to_one_prompt(seeing: ApiServer) -> None:
    body = {"prompt": ["a", "b"], "multi_modal_data": {"image": data(b"x")}}
    assert refusal(seeing, COMPLETION, body)["param"] == "prompt"


def test_a_model_of_text_takes_no_pictures(server: ApiServer) -> None:
    error = refusal(server, CHAT, asking("a", image(data(b"x"))))
    assert (error["code"], error["param"]) == ("unsupported_media", "messages[0].content[1]")
    error = refusal(server, COMPLETION, {"prompt": "x", "multi_modal_data": {"video": data(b"x")}})
    assert (error["code"], error["param"]) == ("unsupported_media", "multi_modal_data.video[0]")


# ------------------------------------------------------------------------------------------------------ how long it is held


def test_bytes_are_held_until_the_answer_ends(seeing: ApiServer) -> None:
    """An answer may end in any way: complete, streamed or not, refused, abandoned by its client, or out of time."""
    picture = image(data(b"x" * 1000))
    with seeing.paced(2):
        with httpx.stream("POST", seeing.url + CHAT, json=asking(picture, stream=True, n=2)) as stream:
            chunks = stream.iter_bytes()
            next(chunks)
            assert seeing.count("media_held_bytes") > 0
        wait_until(lambda: seeing.count("media_held_bytes") == 0, what="let go of with the client")
        threads = [
            threading.Thread(target=seeing.post, args=(CHAT, asking(picture, timeout=0.1))),
            threading.Thread(
                target=seeing.post, args=(CHAT, asking(picture, max_tokens=3)), kwargs={"headers": {"x-request-id": "gone"}}
            ),
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(seeing.peer.submits("gone")) == 1, what="both under way")
        assert seeing.order("abort", {"request_id": "gone"}).status_code == 200
        for thread in threads:
            thread.join()
    assert seeing.count("media_held_bytes") == 0
    assert refusal(seeing, COMPLETION, {"prompt": "!reject 400", "multi_modal_data": {"image": data(b"x")}})
    assert seeing.count("media_held_bytes") == 0


def test_the_facts_outlive_a_tokenizer(seeing: ApiServer) -> None:
    with seeing.paced(2), httpx.stream("POST", seeing.url + CHAT, json=asking(image(data(b"x")), stream=True)) as stream:
        chunks = stream.iter_bytes()
        next(chunks)
        seeing.restart_tokenizer()
        seeing.peer.credits = None
        for _ in chunks:
            pass
        first, second = seeing.peer.submits(stream.headers["x-request-id"])
    assert (first.attempt, second.attempt) == (0, 1)
    assert first.media == second.media


@contextlib.contextmanager
def unanswered(server: ApiServer, body: Any, num_held_bytes: int) -> Iterator[list[httpx.Response]]:
    """Send a request with `num_held_bytes` in the slab to a media process that does not answer within the block; yield the list
    that gets the answer."""
    (peer,) = server.media_peers
    peer.is_answering = False
    num_before = len(peer.received)
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(server.post(CHAT, body)))
    thread.start()
    try:
        wait_until(lambda: len(peer.received) > num_before, what="an item asked for")
        wait_until(lambda: server.count("media_held_bytes") == num_held_bytes, what="the others there")
        yield answers
    finally:
        peer.is_answering = True
        thread.join()


def test_restarted_media_process_is_asked_again(seeing: ApiServer) -> None:
    with unanswered(seeing, asking(image(data(b"a")), image(data(b"b"))), 2 * GRANULE_BYTES) as answers:
        assert not answers
        seeing.media_peers[0].is_answering = True
        seeing.restart_media()
    assert contents_of(seeing, media_of(seeing, answers[0])) == [(b"a",), (b"b",)]


def test_request_asks_for_one_item_at_a_time(seeing: ApiServer) -> None:
    """Further items of a request wait in the api, so they do not delay files of other requests; all go to one media process."""
    (peer,) = seeing.media_peers
    num_before = len(peer.received)
    pictures = [image(data(bytes([65 + index]))) for index in range(3)]
    with unanswered(seeing, asking(*pictures, timeout=600), 3 * GRANULE_BYTES) as answers:
        assert len(peer.received) == num_before + 1
        assert seeing.post(CHAT, asking("another's text")).status_code == 200
        peer.is_answering = True
        peer.send(peer.answer(peer.received[-1], peer.contents[-1]))
    assert len(media_of(seeing, answers[0])) == 3
    asked = peer.received[num_before:]
    assert [len(asked), len({prepare.request for prepare in asked}), len({prepare.deadline_ns for prepare in asked})] == [
        3,
        1,
        1,
    ]
    assert asked[0].deadline_ns > 0
    assert asked[0].request in answers[0].json()["id"]


def test_request_deadline_covers_its_pictures(seeing: ApiServer, files: FileServer) -> None:
    """The request's files are released at its deadline, which also ends its open calls to a media process."""
    (peer,) = seeing.media_peers
    peer.is_answering = False
    for body in (asking(image(data(b"a")), timeout=0.2), asking(image(f"{files.url}/gate/long"), timeout=0.2)):
        answer = seeing.post(CHAT, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
        assert "use a longer timeout" in answer.json()["error"]["message"]
        assert seeing.count("media_held_bytes") == 0
    peer.is_answering = True


def test_settings_that_no_record_takes_are_refused(seeing: ApiServer) -> None:
    """Otherwise such a record would end the api process at the ring to the media process, and again after each restart."""
    body = asking(image(data(b"a"))) | {"mm_processor_kwargs": {"nothing": "x" * (1 << 20)}}
    answer = seeing.post(CHAT, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value"), answer.text
    assert "limit 262120" in answer.json()["error"]["message"]
    assert seeing.post(CHAT, asking(image(data(b"b")))).status_code == 200


def test_a_full_slab_is_429(seeing: ApiServer) -> None:
    large = [image(data(bytes([index]) * LIMIT)) for index in range(5)]
    with unanswered(seeing, asking(*large), 5 * LIMIT) as answers:
        answer = seeing.post(CHAT, asking(*large))
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["code"] == "media_memory_full"
        seeing.media_peers[0].is_answering = True
        seeing.restart_media()
    assert len(media_of(seeing, answers[0])) == 5


def test_slow_links_take_no_memory_before_their_bytes(seeing: ApiServer, files: FileServer) -> None:
    """Ten slow links take the memory of nearly eight files of the largest size; a file beyond that is refused at once."""
    answers: list[httpx.Response] = []

    def ask(name: str) -> None:
        links = [image(f"{files.url}/slow/{name}{index}") for index in range(5)]
        answers.append(seeing.post(CHAT, asking(*links)))

    threads = [threading.Thread(target=ask, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    wait_until(lambda: seeing.count("media_held_bytes") == 10 * len(SLOW), what="all there but their ends")
    answer = seeing.post(CHAT, asking(image(f"{files.url}/slow/c")))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["code"] == "media_memory_full"
    files.gate.set()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200, 200]


def test_unsupported_media_fields_are_refused(seeing: ApiServer) -> None:
    assert_mistake(seeing.post(CHAT, asking("hi") | {"attention_mask_offset": [0]}), "attention_mask_offset")
    given = {"prompt": "x", "multi_modal_data": {"audio": data(b"a")}}
    assert_mistake(seeing.post(COMPLETION, given), "multi_modal_data")


def assert_mistake(answer: httpx.Response, param: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error


def test_leaving_client_releases_its_media(seeing: ApiServer, files: FileServer) -> None:
    body = json.dumps(asking(image(data(b"held")), image(f"{files.url}/gate/slow"))).encode()
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body))
    with seeing.connection(head + body):
        wait_until(lambda: files.num_heard("/gate/slow") == 1, what="the link asked for")
    wait_until(lambda: files.num_at_once == 0 or seeing.count("media_held_bytes") == 0, what="let go of")
