"""Code that every process of the engine shares: the loop of an actor, its context, and the run that it belongs to.

Read `actor.py` first, then `context.py` (what an actor has), `topology.py` (who exists and who sends to whom), `main.py` (the
entry of every child), `segments.py` and `run_directory.py` (what a run consists of), `control.py` (commands over ZeroMQ),
`fair_queue.py` and `shares.py` (queues that clients share).
"""
