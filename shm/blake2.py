"""blake2b as `hashlib` has it, for all processes: `import hashlib` maps a library of OpenSSL's besides, of which each process
has 600 KiB for itself."""

from __future__ import annotations

try:
    from _blake2 import blake2b
except ImportError:  # a Python that was built without
    from hashlib import blake2b

__all__ = ["blake2b"]
