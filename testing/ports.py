"""Ports for services that tests start."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

_LOWEST = 10_000
_NEARLY_ALL = 61_000


def _share() -> range:
    """This process's among those that run tests, below the ports that the kernel gives to who names none, as whoever
    connects somewhere."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    end = given if given > 2 * _LOWEST else _NEARLY_ALL  # where it gives nearly all there are no better ones
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    size = (end - _LOWEST) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return range(_LOWEST + number * size, _LOWEST + (number + 1) * size)


_ours = _share()
_at = random.randrange(len(_ours))


def free_ports(count: int) -> int:
    """The first of so many in a row on which nobody listens, nor will before their service does: this process's other
    ports all have their turn before these come again."""
    global _at
    for _ in _ours:
        if _at + count > len(_ours):
            _at = 0
        first, _at = _ours[_at], _at + count
        if all(map(_is_free, range(first, first + count))):
            return first
    raise AssertionError("no ports")


def free_port() -> int:
    return free_ports(1)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
