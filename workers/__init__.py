"""The worker: one process per rank that holds weights, runs steps and samples. With `ops/`, the only code that imports Paddle.

    engine/      one step from message to result: the runner, its inputs, and the plans that run the model
    extensions/  parts of a step that not every model has: drafts, grammars, media, adapters, pooling
    sampling/    from logits to tokens
    models/      one file per architecture, written against the op table
    encoders/    encoders of pictures and video, a file per family
    weights/     from a checkpoint to the kernels' layout
    rank_group/  collectives and state shared with other ranks
    devices/     memory, ops and kernels of a device
    selftest/    checks of ops and whole steps before a rank serves

Read `actor.py` first (the actor), then `engine/runner.py` (a step), `assembly.py` (its parts), `engine/inputs.py`,
`engine/plan.py`, `models/llama.py`, `sampling/sampler.py` and `weights/loader.py`; for vision-language models
`extensions/media/features.py` and `extensions/media/encoder.py`.
"""
