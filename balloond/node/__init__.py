"""The state of a node: its devices, extents and ledgers, how they change, and how they come back after a restart."""
