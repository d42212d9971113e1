"""The demonstration model: a small Qwen3, with its data, training and examination.

`model/` holds the checkpoint, in the ordinary Hugging Face layout. It adds and subtracts, works on letters of words, answers in
JSON and knows what Tokamak is, so a first run gives true answers that tests can check.

Read `data.py` first: it makes the questions, for training and held out, and grades the answers. It draws from `words.py` and
`facts.py`; `vocabulary.py` makes the tokenizer, `train.py` (the only file that needs torch) makes the checkpoint, and
`evaluate.py` asks a running server. `vision/` has the same for the vision model.
"""

from pathlib import Path

MODEL = Path(__file__).resolve().parent / "model"
VISION_MODEL = Path(__file__).resolve().parent / "vision" / "model"
MODELS = {"text": str(MODEL), "vision": str(VISION_MODEL)}
