"""A rank and its peers. Read `communicator.py` first: the collectives; `share.py` defines which part of a model each rank
computes."""
