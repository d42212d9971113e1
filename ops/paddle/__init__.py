"""The op table in plain Paddle, on any device that Paddle has: the reference of every test (`reference/`)."""
