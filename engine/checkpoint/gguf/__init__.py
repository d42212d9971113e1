"""GGUF files: `file.py` reads one, `parts.py` all of a model, `convert.py` builds a checkpoint directory from the metadata,
`tokenizer.py` its tokenizer."""
