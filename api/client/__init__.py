"""Open requests: what the api process knows of each, and how it submits them again after a crash behind it. Read `client.py`
first."""
