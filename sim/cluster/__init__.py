"""Placement on a simulated fleet."""
