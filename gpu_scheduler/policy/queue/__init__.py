"""The shared queue as the policy sees it: which requests wait, how long each can, and which may start now."""
