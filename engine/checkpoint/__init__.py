"""A model's files before any weight is read: where they are, their configuration (`families/`), their quantization, their LoRA
`adapters/`. GGUF files get the same shape (`gguf/`).

Used by the launcher and by every process that reads a checkpoint. Read `locate.py` first, then `model_config.py`.
"""
