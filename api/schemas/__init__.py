"""Bodies: `requests.py` (what clients may send, with every range) and `responses.py` (what they get)."""
