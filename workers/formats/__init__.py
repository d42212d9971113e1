"""Formats of stored weights that are not plain numbers: each becomes float32 when it is read. Used by the loader."""
