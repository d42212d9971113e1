"""From logits to tokens and log-probabilities; the arithmetic is native. Read `sampler.py`."""
