"""LoRA adapters (Hu et al. 2021) in PEFT's format, as far as no tensor is read: which modules of a model can have one, where
they lie in memory (`layout.py`), and what an adapter says of itself (`config.py`). Read `layout.py` first.
"""
