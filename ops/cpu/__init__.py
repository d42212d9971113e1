"""The native ops of the CPU: C++ kernels (`native/`) over float32, bfloat16, int8 and int4 weights, as a table and as tapes.

Read `table.py` first (the ops that models call), then `native/kernels.h` (what kernels guarantee, and how to add an instruction
set), `native/ops.cpp` (how an op is divided among the threads), `native/attention.inc` (attention), `native/sampling.cpp`,
`executors.py` (tapes) and `choice.py` (which instruction set computes which part).
"""
