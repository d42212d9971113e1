"""Pictures and video: what a file is, how many tokens it takes, and its pixels.

`actor.py` runs as the process `media0..`, of vision models alone; read it first, then `images.py`. Pillow and PyAV are used
here alone: what they are fed with comes from strangers.
"""
