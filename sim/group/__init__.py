"""A simulated group: its memory, its residencies, and the shared queue."""
