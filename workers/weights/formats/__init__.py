"""Formats of stored weights other than plain numbers: each is decoded to float32 when read, or to the integers that the kernels
keep. Used by the loader; read `tensor.py` first."""
