"""Carrying plans out: activations, evictions, moves, drains, and their history."""
