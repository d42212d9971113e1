"""A model's files, without reading weights: their location, configuration (`families/`), quantization, and LoRA `adapters/`.
GGUF files are converted to the same format (`gguf/`). Models are downloaded from `hubs/`.

Used by the launcher and by every process that reads a checkpoint. Read `locate.py` first, then `model_config.py`.
"""
