"""GGUF files: `file.py` reads one, `convert.py` builds a checkpoint directory from its metadata, `tokenizer.py` its
tokenizer."""
