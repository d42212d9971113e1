"""`tokamak chat`: a conversation in the terminal. Read `command.py`; `conversation.py` talks to the server."""
