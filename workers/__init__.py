"""The worker: one process per rank that holds weights, runs steps and samples. With `ops/`, the only code that imports Paddle.

Read `worker.py` first (the actor), then `runner.py` (one step from message to result), `inputs.py` and `slots.py` (what a
step reads), `plan.py` (how a model is run), `models/llama.py` (a model) and `sampler.py`; `loader.py` makes models of
checkpoints.
"""
