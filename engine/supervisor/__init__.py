"""The launcher's process: it makes a run, starts its children, watches them, starts them again and removes everything in the
end.

Read `launch.py` first (`tokamak serve`), then `supervisor.py` (the loop), `child_process.py`, `commands.py`, `hangs.py` and
`restarts.py`; `keeper.py` restores removed files of a living run, `reaper.py` removes leftovers of dead engines.
"""
