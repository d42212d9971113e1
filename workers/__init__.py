"""The worker: one process per rank that holds weights, runs steps and samples. With `ops/`, the only code that imports Paddle.

    engine/      one step from message to result: the runner, what a step reads, and how the model is run
    extensions/  parts of a step that not every model has: drafts, grammars, media, adapters, pooling
    sampling/    from logits to tokens
    models/      one file per architecture, written against the op table
    encoders/    encoders of pictures and video, a file per family
    weights/     from a checkpoint to what the kernels read
    rank_group/  what a rank does with its peers
    devices/     where tensors live
    selftest/    checks of ops and whole steps before a rank serves

Read `actor.py` first (the actor), then `engine/runner.py` (a step), `assembly.py` (what it is made of), `engine/inputs.py`,
`engine/plan.py`, `models/llama.py`, `sampling/sampler.py` and `weights/loader.py`; for models that see
`extensions/media/features.py` and `extensions/media/encoder.py`.
"""
