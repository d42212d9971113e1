"""The worker: one process per rank that holds weights, runs steps and samples. With `ops/`, the only code that imports Paddle.

    runners/     a page for each kind of device: what it puts together
    step/        what a step reads, and how the model is run on it
    sampling/    from logits to tokens
    pooling/     from hidden states to a vector or scores
    models/      one file per architecture, written against the op table
    encoders/    encoders of pictures and video, a file per family
    drafts/      draft tokens for speculative decoding
    weights/     from a checkpoint to what the kernels read
    adapters/    LoRA adapters, from PEFT's files to shared memory
    rank_group/    what a rank does with its peers
    devices/     where tensors live

Read `worker.py` first (the actor), then `runner.py` (the runners' core: one step from message to result), `step/inputs.py`,
`step/execution.py`, `models/llama.py`, `sampling/sampler.py` and `weights/loader.py`; of models that see `features.py`,
`step/prompt_media.py` and `encoder.py`.
"""
