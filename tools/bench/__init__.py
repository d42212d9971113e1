"""The benchmarks: `tokamak bench serve` puts load on an HTTP server (read serve.py first), `tokamak bench compare` does so to
several in turn (compare.py; peers.md has the results), `tokamak bench step` times the ops of a step (step.py), `tokamak bench
shm` measures the rings (shm.py)."""
