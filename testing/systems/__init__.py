"""Whole local systems: real processes, real sockets."""
