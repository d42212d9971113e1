"""The whole engine from outside: real processes started by the real launcher, spoken to over HTTP, killed with real signals.

Read `engine_process.py` (start, watch, kill and stop an engine) and `workload.py` (the requests and what they answered) first.
"""
