"""Code that every process of the engine shares: the loop of an actor, its context, and the run that it belongs to.

Read `actor.py` first, then `context.py` (its resources), `topology.py` (the actors and who sends to whom), `main.py` (the entry
point of every child), `segments.py` and `run_directory.py` (the parts of a run), `control.py` (commands over ZeroMQ),
`fair_queue.py` and `shares.py` (queues that clients share).
"""
