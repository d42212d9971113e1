"""Bodies: `requests.py` (what clients may send, with allowed ranges) and `responses.py` (what they receive)."""
