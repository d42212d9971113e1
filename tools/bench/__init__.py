"""The benchmarks: `tokamak bench serve` puts load on an HTTP server (read serve.py first), `tokamak bench compare` on several
servers in turn (compare.py; results in peers.md), `tokamak bench step` times the ops of a step (step.py), `tokamak bench shm`
measures the rings (shm.py).
"""
