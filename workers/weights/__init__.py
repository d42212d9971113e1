"""From a checkpoint to what the kernels read: `declaration.py` (what a model wants), `reader.py` (what a checkpoint has),
`formats/` (how it is quantized), `loader.py` (packing one into the other), `cache.py` and `packed_file.py` (kept for later
starts).

Read `loader.py` first.
"""
