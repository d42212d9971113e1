"""Open requests: the api process's state of each, and how it submits them again after a crash of another actor. Read
`client.py` first."""
