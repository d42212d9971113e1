"""Parts of a step that not every model has. The runner calls them at fixed points and knows none of them.

    drafts/      draft tokens: n-grams, suffix trees, and layers of the checkpoint (MTP)
    grammars/    structured output: masks of the tokens that may come next
    media/       pictures and video: the encoder, and where prompts read its features
    adapters/    LoRA adapters, from PEFT's files to shared memory

`pooling.py` turns hidden states of a prompt into a vector or scores.
"""
