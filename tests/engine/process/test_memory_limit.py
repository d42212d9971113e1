"""The error of an actor that gets no memory names its limit."""

from __future__ import annotations

import errno
import resource

import pytest

from engine.process.actor import explained


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_lack_of_memory_names_the_limit(error: Exception) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert before[0] != resource.RLIM_INFINITY or explained(error) is error
    resource.setrlimit(resource.RLIMIT_AS, (1 << 45, before[1]))
    try:
        assert "limited to 32768.00 GiB; raise `ulimit -v`" in str(explained(error))
        assert str(explained(OSError(errno.ENOENT, "x"))) == "[Errno 2] x"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
