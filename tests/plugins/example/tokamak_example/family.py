"""The family `example`: what its config.json means, and the class that computes it."""

from __future__ import annotations

from engine.checkpoint.families.qwen3 import Qwen3


class Example(Qwen3):
    name = "example"
    class_names = ("ExampleForCausalLM",)
    gguf_name = None
    model = "tokamak_example.model:ExampleModel"
