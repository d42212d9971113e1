"""Pooling of whole prompts: vectors, scores, ranks. Read `submission.py` first; each route has a file."""
