"""A system under load whose processes are killed, stopped and starved, and what has to hold of it meanwhile."""
