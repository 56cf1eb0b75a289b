"""Several nodes on one machine, with networks between them that can be cut."""
