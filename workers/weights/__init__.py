"""From a checkpoint to the kernels' layout: `declaration.py` (modules of a model), `reader.py` (files of a checkpoint),
`formats/` (quantization formats), `loader.py` (packing one into the other), `cache.py` and `packed_file.py` (packed weights for
later starts).

Read `loader.py` first.
"""
