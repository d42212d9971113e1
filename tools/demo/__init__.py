"""The demonstration model: a small Qwen3 that visibly works, its data, its training and its examination.

`model/` holds the checkpoint, in the ordinary Hugging Face layout. It adds and subtracts, takes words apart, answers in
JSON and knows what Tokamak is, so a first run says something true and a test can tell a right answer from a wrong one.

Read `data.py` first: it makes the questions, for training and held out, and grades the answers. `words.py` and `facts.py`
are what it draws from, `vocabulary.py` makes the tokenizer, `train.py` (the only file that needs torch) makes the
checkpoint, and `evaluate.py` asks a running server. `vision/` has the same for the model that reads pictures.
"""

from pathlib import Path

MODEL = Path(__file__).resolve().parent / "model"
VISION_MODEL = Path(__file__).resolve().parent / "vision" / "model"
MODELS = {"text": str(MODEL), "vision": str(VISION_MODEL)}
