"""Measurements, each a program of its own: `python -m benchmarks.NAME`."""
