"""The op table: all operations that models use, with a plain-Paddle reference and native tables.

Read `table.py` first (the ops, their shapes and their guarantee), then `modules.py` (holders of weights) and
`paddle/reference/` (float32 Paddle, the reference of every test).

    paddle/  plain Paddle on any device, and fused ops
    cpu/     the native table of the CPU, in C++
    cuda/    kernels for Nvidia's cards, and a card emulated on the CPU for their tests
"""
