"""Weights of one model: their places in the weights range, and the loaders that fill it."""
