"""GGUF files: `file.py` reads one, `convert.py` makes a checkpoint directory of its metadata, `tokenizer.py` its tokenizer."""
