"""Checkpoint folders: what their models need, whether engines can hold them, and what is wrong with those that
cannot."""
