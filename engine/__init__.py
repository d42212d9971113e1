"""The engine: processes, their supervision and every decision that needs no device. A folder for each process, and one for each
concern that several share:

    messages/     every message that crosses a process boundary
    process/      what a process of the engine is: actor, its context, the run that it belongs to
    options/      what the user asks for, made into one frozen configuration (`config.py`)
    checkpoint/   what a model's files say, before any weight is read
    parallel/     which replica a prompt goes to, which rank computes an expert
    grammars/     structured output: formats of requests, and matchers that say which tokens may come next
    parsers/      tool calls and thinking in a model's text
    observation/  what an engine is doing, read from its shared memory
    supervisor/   the launcher's process: starts the others, watches them, starts them again
    tokenizer/    text to tokens and back
    scheduler/    batches, KV blocks, the state of the weights
    cache/        KV events and tiers
    media/        pictures and video: decoded, measured, prepared for the encoder

Read `messages/` first (a request's way as data), then `process/actor.py`, `supervisor/supervisor.py`, `tokenizer/actor.py`,
`scheduler/actor.py` and `cache/actor.py`. `tokenizer`, `scheduler` and `cache` never import each other: they meet in messages.
"""
