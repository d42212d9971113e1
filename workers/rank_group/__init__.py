"""What a rank does with its peers. Read `communicator.py` first: the calls that they meet in; `share.py` says what each of them
computes of a model."""
