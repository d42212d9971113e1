"""An example of a plugin: a family of models that is computed like Qwen3, and the format of its calls and reasoning."""
