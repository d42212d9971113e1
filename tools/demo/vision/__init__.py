"""The vision demonstration model: a small qwen3_vl that reads, counts, compares and names colours in order.

Training writes the checkpoint to `model/`, in the ordinary Hugging Face layout. Read `questions.py` first: it makes the
questions, for training and held out. `drawing.py` and `glyphs.py` draw the pictures, `vocabulary.py` makes the tokenizer,
`train.py` (which needs torch, as `network.py`, `batches.py` and `checkpoint.py` do) makes the checkpoint, and `evaluate.py`
asks a running server.
"""
