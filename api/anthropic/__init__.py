"""Anthropic's protocol: `/v1/messages`, `/v1/messages/count_tokens`, and its formats of models and errors.

`requests.py` has the request bodies, `conversation.py` turns them into a chat request, `blocks.py` turns an answer's parts into
content blocks and events, `messages.py` has the routes. Read `messages.py` first.
"""
