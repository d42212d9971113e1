"""State of an engine, read from its shared memory without involving its processes: `observer.py` takes a `snapshot.py`,
`figures.py` computes rates and shares from two of them."""
