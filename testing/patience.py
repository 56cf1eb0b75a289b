"""How long tests wait for what has to happen."""

PATIENCE_S = 300.0
"""Seconds a test waits at most for what has to happen: it costs nothing where all is well, and on a busy machine an
engine takes more than a minute to start. A wait whose length a test is about has a limit of its own."""
