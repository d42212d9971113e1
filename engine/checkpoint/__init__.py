"""What a model's files say, before any weight is read: where they are, their configuration (`families/`: what each
architecture's means), their quantization, their LoRA `adapters/`. GGUF files get the same shape (`gguf/`).

Used by the launcher and by every process that reads a checkpoint. Read `locate.py` first, then `model_config.py`.
"""
