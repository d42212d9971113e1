"""The native ops of the CPU: float32 kernels in C++ (`native/`), as a table and as tapes.

Read `table.py` first (the ops as the models call them), then `native/kernels.h` (what a kernel promises and where a further
instruction set goes), `native/ops.cpp` (how an op is shared out among the threads), `executors.py` (tapes) and `choice.py`
(which of several instruction sets computes what).
"""
