"""The op table: every operation a model is made of, with a plain-Paddle reference and native tables.

Read `table.py` first (the ops, their shapes and the promise they keep), then `modules.py` (weights as the ops take them) and
`paddle/reference.py` (float32 Paddle, the oracle of every test).

    paddle/  plain Paddle on any device, and fused ops
    cpu/     the native table of the CPU, in C++
    cuda/    kernels for Nvidia's cards, and a card emulated on the CPU for their tests
"""
