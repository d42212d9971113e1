"""The scheduler's process: which tokens of which sequences the ranks compute next, in which blocks, with which weights.

Read `actor.py` first (`do_work`, which `engine/process/actor.py` calls in its loop), then `sequence.py` (how far a sequence
is), `policy.py` (the one scheduling rule, pure), `batch_state.py` (all sequences and their blocks, with `block_pool.py` and
`prefix_cache.py`), `dispatch.py` and `results.py` (a step on its way and back); `commands.py`, `weight_updates.py` and
`weight_state.py` (pause, reload).
"""
