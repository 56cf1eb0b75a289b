"""Input that makes no sense, for every surface of a system, and what may come of it."""
