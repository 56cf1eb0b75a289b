"""The operator's command: what is where, why, and a few levers. Every view has a --json form for scripts."""
