"""Memory from balloond."""

from __future__ import annotations


def open_memory(load, options):
    raise NotImplementedError
