"""Formats of stored weights that are not plain numbers: each is decoded to float32 when it is read, or to the integers that the
kernels keep. Used by the loader; read `tensor.py` first."""
