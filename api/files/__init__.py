"""Files of clients: `/v1/files`, in OpenAI's format. Read `routes.py` first.

store.py    files and their descriptions, within limits
upload.py   writes a multipart body to a file
"""
