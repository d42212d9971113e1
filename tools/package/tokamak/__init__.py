"""What `import tokamak` gives a user's process: the client of an engine that it starts, and nothing of the engine itself.

A wheel has this package alone at the top of site-packages, with the engine's packages below it. They import each other by the
names that they have in the repository (`engine`, `tools`, ...), and only processes of ours have this directory on their path
(`__main__.py`). So a user's own `tools` or `api` and ours never meet. Modules here import none of those.
"""
