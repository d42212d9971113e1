"""The op table: every operation a model is made of, with a plain-Paddle reference and, later, native rows per device.

Read `table.py` first (the ops, their shapes and the promise they keep), then `modules.py` (weights as the ops take them) and
`reference.py` (float32 Paddle, the oracle of every test).
"""
