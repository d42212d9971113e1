"""Drafters, alone."""
