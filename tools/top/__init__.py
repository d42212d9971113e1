"""`tokamak top`: `observer.py` reads the counters, `figures.py` says what two looks come to, `screen.py` draws. Read
`command.py`."""
