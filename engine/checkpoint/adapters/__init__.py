"""LoRA adapters (Hu et al. 2021) in PEFT's format, without reading tensors: which modules of a model can have one, their layout
in memory (`layout.py`), and an adapter's configuration (`config.py`). Read `layout.py` first."""
