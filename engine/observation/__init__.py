"""State of an engine, read from its shared memory without asking it: `observer.py` takes a `snapshot.py`, `figures.py` computes
rates and shares from two of them.
"""
