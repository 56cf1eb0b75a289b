"""Simulated engines: what steps cost, continuous batching, and compute that engines share."""
