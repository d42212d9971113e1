"""The engine: its processes, their supervision, and every decision that needs no device. One folder per process, and one per
concern that several processes share:

    messages/     every message that crosses a process boundary
    process/      a process of the engine: the actor, its context, its run
    options/      the user's options, resolved into one frozen configuration (`config.py`)
    checkpoint/   what a model's files say, without reading weights
    parallel/     which replica a prompt goes to, which rank computes an expert
    cluster/      a router and its engines on other machines: frames, key, list of engines, links
    grammars/     structured output: formats of requests, and matchers that find the allowed tokens
    parsers/      tool calls and thinking in a model's text
    observation/  the state of an engine, read from its shared memory
    supervisor/   the launcher's process: starts, watches and restarts the others
    tokenizer/    text to tokens and back
    scheduler/    batches, KV blocks, the state of the weights
    cache/        KV events and tiers
    media/        images and video: decoded, measured, prepared for the encoder

Read `messages/` first (the path of a request as data), then `process/actor.py`, `supervisor/supervisor.py`,
`tokenizer/actor.py`, `scheduler/actor.py` and `cache/actor.py`. `tokenizer`, `scheduler` and `cache` never import each other:
they share only messages.
"""
