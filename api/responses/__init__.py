"""OpenAI's newer protocol: `/v1/responses`, with items as input and output.

`requests.py` has the request bodies, `conversation.py` turns them into a chat request, `items.py` turns an answer's parts into
items and events, `response.py` writes a response, `store.py` keeps it, `routes.py` has the routes. Read `routes.py` first.
"""
