"""Parts of a step that not every model has. The runner calls their hooks and knows none of them by name.

    drafts/      draft tokens: n-grams, suffix trees, and MTP layers of the checkpoint
    grammars/    structured output: masks of the tokens that may come next
    media/       pictures and video: the encoder, and where prompts read its features
    adapters/    LoRA adapters, from PEFT's files to shared memory

`pooling.py` turns hidden states of a prompt into a vector or scores; `states.py` has the slots of recurrent states.
"""
