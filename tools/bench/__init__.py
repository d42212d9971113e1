"""The benchmarks: `tokamak bench serve` (load on an HTTP server; read serve.py first) and `tokamak bench shm` (the rings; shm.py)."""
