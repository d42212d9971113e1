"""What a step reads and how it is run: `slots.py` and `sampling_state.py` (a batch slot's memory), `inputs.py` (a step's
metadata), `kv_cache.py` (the arena as tensors), `execution.py` (tape or eager). Read `inputs.py` first."""
