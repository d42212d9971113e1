"""A rank and its peers. Read `communicator.py` first: the calls in which they meet; `share.py` says which part of a model each
of them computes.
"""
