"""Published models that packages ship, compared with other programs. Not part of the suite: `tools/test-models` runs the
`check_*.py` here.

    files.py       downloads the models
    reference.py   answers of llama.cpp and transformers, computed in an environment of their own
"""
