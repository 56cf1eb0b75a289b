"""The shared queue as the policy sees it: what waits, how long it can, and what may start now."""
