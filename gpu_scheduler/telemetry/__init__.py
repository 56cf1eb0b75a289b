"""Counters of a group's events, and the spans of its requests and activations."""
