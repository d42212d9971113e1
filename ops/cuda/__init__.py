"""The rows of an op table in CUDA C++: kernels, their operands, how they are built, and the table. Read `operands.h` first.

The kernels are independent of frameworks: they take addresses and a stream. NVRTC compiles them for cards, g++ for an emulated
card (`emulation.h`), on which all their tests run.
"""
