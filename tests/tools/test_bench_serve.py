"""`tokamak bench serve` against a real server: its requests, measurements, and reports of failures."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from tests.paths import REPOSITORY
from tests.tools.openai_server import API_KEY, Behaviour, OpenAIServer, openai_server
from tests.waiting import WATCHDOG_S, wait_until
from tools.bench.connection import Client
from tools.bench.report import percentile, summarize
from tools.bench.serve import main, send
from tools.bench.timeline import Timeline, Usage
from tools.target import Target


def bench(server: OpenAIServer, tmp_path: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    output = tmp_path / "result.json"
    assert main(["--url", server.url, "--output", str(output), "--warmup", "0", *arguments]) == code
    result: dict[str, Any] = json.loads(output.read_bytes())["result"]
    return result


def streamed(server: OpenAIServer, path: str = "/v1/completions") -> list[dict[str, Any]]:
    return [body for body in server.bodies(path) if body.get("stream")]


def test_prompts_are_token_ids_if_supported(tmp_path: Path) -> None:
    with openai_server() as server:
        result = bench(server, tmp_path, "--num-prompts", "12", "--input-len", "40", "--output-len", "6", "--concurrency", "4")
    bodies = streamed(server)
    assert len(bodies) == 12
    assert all(isinstance(body["prompt"], list) and len(body["prompt"]) == 40 for body in bodies)
    assert len({tuple(body["prompt"]) for body in bodies}) == 12
    assert all(body["model"] == "first" and body["max_tokens"] == 6 and body["temperature"] == 0 for body in bodies)
    assert "ignore_eos" not in bodies[0]
    assert (result["num_succeeded"], result["num_output_tokens"], result["num_prompt_tokens"]) == (12, 72, 480)
    assert result["num_cached_tokens"] == 24
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert 0 <= result[name]["p50"] <= result[name]["p90"] <= result[name]["p99"] <= result[name]["max"]
    assert result["ttft_ms"]["p50"] <= result["e2e_ms"]["p50"]
    assert result["output_tokens_per_s"] == pytest.approx(72 / result["wall_s"])
    assert result["client_cpu_share"] > 0


def test_connections_are_kept(tmp_path: Path) -> None:
    with openai_server() as server:
        bench(server, tmp_path, "--num-prompts", "30", "--output-len", "2", "--concurrency", "3")
        assert server.num_connections <= 4


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_text_prompts_are_calibrated(tmp_path: Path, endpoint: str) -> None:
    """Three tokens a word and five around them: the prompts still have the wanted number of tokens."""
    behaviour = Behaviour(has_tokenize=False, tokens_per_word=3, num_template_tokens=5)
    if endpoint == "chat":
        behaviour.has_tokenize = True
    with openai_server(behaviour) as server:
        result = bench(server, tmp_path, "--endpoint", endpoint, "--num-prompts", "4", "--input-len", "65", "--output-len", "3")
    assert result["num_prompt_tokens"] == 4 * 65
    assert result["num_output_tokens"] == 12
    assert len(streamed(server, "/v1/chat/completions" if endpoint == "chat" else "/v1/completions")) == 4


def test_long_prompts_have_the_wanted_length(tmp_path: Path) -> None:
    """Words differ in tokens: a mean over few of them is too far off for a prompt that nearly fills the context."""
    behaviour = Behaviour(has_tokenize=False, num_more_tokens=1)
    with openai_server(behaviour) as server:
        result = bench(server, tmp_path, "--num-prompts", "2", "--input-len", "30000", "--output-len", "3")
    assert result["num_prompt_tokens"] == pytest.approx(2 * 30000, rel=0.01)


def test_pictures_go_with_chats(tmp_path: Path) -> None:
    options = ["--endpoint", "chat", "--num-prompts", "4", "--output-len", "2", "--seed", "7", "--image-size", "33x20"]
    with openai_server() as server:
        result = bench(server, tmp_path, *options, "--images-per-request", "2", "--distinct-images", "3")
        bodies = streamed(server, "/v1/chat/completions")
    assert result["num_output_tokens"] == 8
    links = [[part["image_url"]["url"] for part in body["messages"][0]["content"][:-1]] for body in bodies]
    assert [len(own) for own in links] == [2] * 4
    assert len({link for own in links for link in own}) == 3
    for link in links[0]:
        with PIL.Image.open(io.BytesIO(base64.b64decode(link.partition(",")[2]))) as picture:
            picture.load()
            assert (picture.format, picture.size, picture.mode) == ("PNG", (33, 20), "RGB")


@pytest.mark.parametrize("kind", ["ids", "text"])
def test_shared_prefix_is_part_of_the_prompt(tmp_path: Path, kind: str) -> None:
    with openai_server() as server:
        bench(server, tmp_path, "--num-prompts", "6", "--input-len", "30", "--shared-prefix-len", "20", "--prompts", kind)
    prompts = [body["prompt"] if kind == "ids" else body["prompt"].split() for body in streamed(server)]
    assert {len(prompt) for prompt in prompts} == {30}
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 1
    assert len({tuple(prompt[20:]) for prompt in prompts}) == 6


def test_a_seed_repeats_the_load(tmp_path: Path) -> None:
    with openai_server() as server:
        for seed in ("7", "7", "8"):
            bench(server, tmp_path, "--num-prompts", "3", "--concurrency", "1", "--seed", seed)
    prompts = [tuple(body["prompt"]) for body in streamed(server)]
    assert prompts[:3] == prompts[3:6]
    assert not set(prompts[:3]) & set(prompts[6:])


def test_poisson_arrivals(tmp_path: Path) -> None:
    with openai_server() as server:
        result = bench(server, tmp_path, "--num-prompts", "20", "--request-rate", "400", "--output-len", "2", "--ignore-eos")
    assert result["num_succeeded"] == 20
    assert all(body["ignore_eos"] is True for body in streamed(server))


@pytest.mark.parametrize(("bytes_per_packet", "events_per_packet"), [(7, 1), (0, 3)])
def test_events_may_be_cut_anywhere(tmp_path: Path, bytes_per_packet: int, events_per_packet: int) -> None:
    behaviour = Behaviour(bytes_per_packet=bytes_per_packet, events_per_packet=events_per_packet)
    with openai_server(behaviour) as server:
        result = bench(server, tmp_path, "--num-prompts", "5", "--output-len", "9", "--extra", '{"top_p": 0.5}')
    assert (result["num_output_tokens"], result["errors"]) == (45, [])
    assert streamed(server)[0]["top_p"] == 0.5


def test_errors_are_counted_by_kind(tmp_path: Path) -> None:
    with openai_server(Behaviour(refuse_every=4, cut_every=5, has_tokenize=False)) as server:
        result = bench(server, tmp_path, "--num-prompts", "20", "--output-len", "8", "--concurrency", "2", code=1)
    kinds = {error["kind"]: error for error in result["errors"]}
    assert set(kinds) == {"http 429", "connection"}
    assert "too many requests" in kinds["http 429"]["first"]
    assert result["num_succeeded"] + sum(error["count"] for error in result["errors"]) == 20


def test_an_error_inside_a_stream_is_one(tmp_path: Path) -> None:
    with openai_server(Behaviour(error_in_stream="out of blocks")) as server:
        result = bench(server, tmp_path, "--num-prompts", "2", code=1)
    assert result["errors"][0]["kind"] == "error in stream"
    assert "out of blocks" in result["errors"][0]["first"]
    assert result["ttft_ms"] is None


def test_a_timeout_is_an_error() -> None:
    async def run(url: str) -> Timeline:
        client = Client(Target.parse(url, ""), timeout_s=0.2)
        return await send(client, "/v1/completions", b'{"prompt": "x", "stream": true}')

    with openai_server(Behaviour(hang_after=2)) as server:
        timeline = asyncio.run(run(server.url))
    assert (timeline.error, timeline.detail) == ("timeout", "no complete reply after 0.2 s")


def test_interruption_during_a_reply_is_handled() -> None:
    async def run(url: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        client = Client(Target.parse(url, ""), WATCHDOG_S)
        soon = asyncio.get_running_loop().call_soon
        try:
            await client.send("GET", "/v1/models", b"", lambda _: soon(task.cancel) and None)
        finally:
            client.close()

    with openai_server() as server, pytest.raises(asyncio.CancelledError):
        asyncio.run(run(server.url))


def test_a_key_and_a_url_with_v1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server(Behaviour(needs_key=True)) as server:
        assert main(["--url", f"{server.url}/v1", "--num-prompts", "1"]) == 1
        assert "401" in capsys.readouterr().err
        assert main(["--base-url", f"{server.url}/v1/", "--num-prompts", "1", "--api-key", API_KEY]) == 0


def test_the_terminal_table(capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server() as server:
        assert main(["--url", server.url, "--num-prompts", "2"]) == 0
        table = capsys.readouterr().out
        assert main(["--url", server.url, "--num-prompts", "2", "--output", "-"]) == 0
        document = json.loads(capsys.readouterr().out)
    assert all(name in table for name in ("TTFT", "TPOT", "ITL", "E2E", "p50", "p99", "tokens/s", "2/2"))
    assert document["settings"]["model"] == "first"
    assert document["settings"]["seed"] is not None


def test_unreachable_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:1", "--num-prompts", "1"]) == 1
    assert "http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input-len", "10", "--shared-prefix-len", "11"], "--shared-prefix-len 11 exceeds --input-len 10"),
        (["--url", "localhost:8000"], "expected a URL such as http://"),
        (["--url", "http://localhost:99999"], "no valid port"),
        (["--endpoint", "chat", "--prompts", "ids"], "needs --endpoint completions"),
        (["--images-per-request", "1"], "needs --endpoint chat"),
    ],
)
def test_bad_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--num-prompts", "0"], ["--request-rate", "nan"], ["--extra", "[]"]])
def test_bad_values(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_percentile() -> None:
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert percentile(list(range(101)), 0.9) == 90


def test_end_without_text_counts_as_a_delivery() -> None:
    """A single token may be half a character, and so have no text."""
    silent = b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
    spoken = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
    alone, after = Timeline(), Timeline()
    alone.feed(silent)
    after.feed(spoken + silent)
    assert (len(alone.deliveries), len(after.deliveries)) == (1, 1)
    assert alone.is_complete


@pytest.mark.parametrize(
    "choices",
    [
        ['{"text":"","finish_reason":"stop"}'],  # a special token, or a stop string at once
        ['{"text":"","finish_reason":null}', '{"text":"","finish_reason":"stop"}'],
        ['{"delta":{"role":"assistant","content":""}}', '{"delta":{},"finish_reason":"stop"}'],
        ['{"delta":{"role":"assistant","content":null},"finish_reason":"length"}'],
        ['{"delta":{"role":"assistant"}}', '{"delta":{"reasoning_content":"so"}}', '{"delta":{},"finish_reason":"length"}'],
        ['{"delta":{"role":"assistant"}}', '{"delta":{"reasoning":"so"}}', '{"delta":{},"finish_reason":"length"}'],
    ],
)
def test_a_reply_without_text_is_measured(choices: list[str]) -> None:
    timeline = Timeline()
    for choice in choices:
        timeline.feed(b'data: {"choices":[%b]}\n\n' % choice.encode())
    timeline.feed(b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\ndata: [DONE]\n\n')
    assert (len(timeline.deliveries), timeline.is_complete, timeline.error) == (1, True, "")
    assert summarize([timeline], wall_s=1.0, client_cpu_s=0.1)["ttft_ms"] is not None


def test_summary() -> None:
    """Two streams of four tokens in three deliveries; the rates count tokens, ITL counts deliveries."""
    usage = Usage(prompt_tokens=10, completion_tokens=4)
    first = Timeline(sent=0.0, ended=4.0, deliveries=[1.0, 2.0, 4.0], usage=usage)
    second = Timeline(sent=1.0, ended=5.5, deliveries=[1.5, 3.0, 5.0], usage=usage)
    failed = Timeline(error="http 429", detail="slow down")
    result = summarize([first, second, failed], wall_s=8.0, client_cpu_s=0.8)
    assert result["output_tokens_per_s"] == 1.0
    assert result["total_tokens_per_s"] == 3.5
    assert result["ttft_ms"]["mean"] == 750.0
    assert result["tpot_ms"]["max"] == pytest.approx(1000 * 3.5 / 3)
    assert result["itl_ms"]["max"] == 2000.0
    assert result["e2e_ms"]["p50"] == 4250.0
    assert result["client_cpu_share"] == pytest.approx(0.1)
    assert result["decode_tokens_per_s"] == pytest.approx(3 * (4 / 3) / 2.5)  # deliveries in (1.5, 4.0]
    assert result["errors"] == [{"kind": "http 429", "count": 1, "first": "slow down"}]


@pytest.mark.slow
def test_interrupted_run_shows_partial_results(tmp_path: Path) -> None:
    """Ctrl+C while requests hang: the result of those that ended, or 130 where none did."""
    command = [sys.executable, "-c", "import sys; from tools.bench.serve import main; sys.exit(main(sys.argv[1:]))"]
    arguments = ["--num-prompts", "5000", "--input-len", "2", "--output-len", "2", "--concurrency", "2", "--warmup", "0"]
    for num_before, code in ((20, 0), (0, 130)):
        with openai_server(Behaviour(hang_after=0, hang_from=num_before)) as server:
            process = subprocess.Popen(
                [*command, "--url", server.url, *arguments],
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            wait_until(lambda server=server, least=num_before: len(server.requests) > least, what="requests")  # type: ignore[misc]
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=WATCHDOG_S)
        assert process.returncode == code, err
        assert "Traceback" not in err
        assert ("interrupted" in err) is bool(num_before)
        assert ("TTFT" in out) is bool(num_before)
