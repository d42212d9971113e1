"""The scheduler process: decides which tokens of which sequences the ranks compute next, in which blocks, with which weights.

Read `actor.py` first (`do_work`, which `engine/process/actor.py` calls in its loop), then `sequence.py` (the progress of a
sequence), `policy.py` (the one scheduling rule, pure), `batch_state.py` (all sequences and their blocks, with `block_pool.py`
and `prefix_cache.py`), `dispatch.py` and `results.py` (sending a step, handling its result); `commands.py`, `weight_updates.py`
and `weight_state.py` (pause, reload).
"""
