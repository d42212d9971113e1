"""Conversations to text: `messages.py` checks them, `template.py` renders them, `sandbox.py` keeps templates within bounds."""
