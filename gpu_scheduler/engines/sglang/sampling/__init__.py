"""Sampling: the next token of each request, by its own seed."""
