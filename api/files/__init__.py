"""Files that clients leave here: `/v1/files`, in OpenAI's shape. Read `routes.py` first.

store.py    files and what is known of them, within bounds
upload.py   a multipart body on its way into a file
"""
