"""Images and video: what a file is, its number of tokens, and its pixels.

`actor.py` runs as the process `media0..`, for vision models only; read it first, then `images.py`. Only this folder uses Pillow
and PyAV, because files come from strangers.
"""
