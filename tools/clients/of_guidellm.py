"""GuideLLM: load on chats and completions, streamed. Its prompts are made with the embedded model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from tools.clients.checks import Server, check, main, program, run

NUM_REQUESTS, OUTPUT_TOKENS = 12, 16


def load(server: Server, path: str) -> str:
    """Return the measurements of `NUM_REQUESTS` requests to /v1`path`, four at a time."""
    output = Path(server.place) / f"guidellm{path.replace('/', '-')}.json"
    backend = {"kind": "openai_http", "target": server.url, "model": server.model, "request_format": f"/v1{path}"}
    data = {"kind": "synthetic_text", "prompt_tokens": 48, "output_tokens": OUTPUT_TOKENS}
    run(
        *(program("guidellm"), "run", "--disable-console-interactive", "--backend", json.dumps(backend)),
        *("--data", json.dumps(data), "--tokenizer", json.dumps({"kind": "hf_auto", "model": server.tokenizer})),
        *("--profile", json.dumps({"kind": "concurrent", "streams": 4})),
        *("--constraint", json.dumps({"kind": "max_requests", "count": NUM_REQUESTS})),
        *("--output", json.dumps({"kind": "json", "path": str(output)})),
    )
    (benchmark,) = json.loads(output.read_text())["benchmarks"]
    done = benchmark["requests"]
    assert len(done["successful"]) == NUM_REQUESTS, done["errored"][:1]
    assert {request["output_tokens"] for request in done["successful"]} == {OUTPUT_TOKENS}, done["successful"][:1]
    return f"{NUM_REQUESTS} requests of {OUTPUT_TOKENS} tokens each"


@check("load on chats, stream")
def chats(server: Server) -> str:
    return load(server, "/chat/completions")


@check("load on completions, stream")
def completions(server: Server) -> str:
    return load(server, "/completions")


if __name__ == "__main__":
    main()
