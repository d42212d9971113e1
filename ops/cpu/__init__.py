"""The native ops of the CPU: C++ kernels (`native/`) over float32, bfloat16, int8 and int4 weights, as a table and as tapes.

Read `table.py` first (the ops as the models call them), then `native/kernels.h` (what a kernel promises and where a further
instruction set goes), `native/ops.cpp` (how an op is divided among the threads), `native/attention.inc` (attention),
`native/sampling.cpp`, `executors.py` (tapes) and `choice.py` (which of several instruction sets computes what).
"""
