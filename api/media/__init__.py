"""Pictures and video of requests, in the api process. Read `request.py` first.

`parts.py` finds the items of a body, `download.py` fetches links (`addresses.py`: which hosts; `fetch_slots.py`: whose is next;
`object_store.py`: signed ones), `store.py` keeps the bytes and asks the media processes what they are, `request.py` does all of
that for one HTTP request.
"""
