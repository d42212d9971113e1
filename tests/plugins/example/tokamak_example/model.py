"""The computation of the family `example`: Llama's, to which a plugin may add its own."""

from __future__ import annotations

from workers.models.llama import Llama


class ExampleModel(Llama):
    pass
