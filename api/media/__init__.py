"""Images and video of requests, in the api process. Read `request.py` first.

`parts.py` finds the items of a body, `download.py` fetches links (`addresses.py`: allowed hosts; `fetch_slots.py`: order;
`object_store.py`: signed links), `store.py` keeps the bytes and gets facts about them from the media processes, `request.py`
does all of that for one HTTP request.
"""
