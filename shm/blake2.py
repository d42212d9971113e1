"""blake2b as in `hashlib`, for all processes: `import hashlib` also maps a library of OpenSSL, 600 KiB for each process."""

from __future__ import annotations

try:
    from _blake2 import blake2b
except ImportError:  # this Python was built without it
    from hashlib import blake2b

__all__ = ["blake2b"]
