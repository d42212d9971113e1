"""The benchmarks: `tokamak bench serve` puts load on an HTTP server (read serve.py first), `tokamak bench shm` measures the
rings (shm.py)."""
