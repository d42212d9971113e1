"""The launcher's process: creates a run, starts, watches and restarts its children, and removes everything at the end.

Read `launch.py` first (`tokamak serve`), then `supervisor.py` (the loop), `child_process.py`, `commands.py`, `hangs.py` and
`restarts.py`; `keeper.py` restores removed files of a living run, `reaper.py` removes leftovers of dead engines.
"""
