"""Nodes with addresses of their own on one machine: network namespaces on a bridge, which can be taken off it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

_PREFIX = "198.18"
"""Set aside for tests of networks (RFC 2544): nothing on this machine has such an address."""


def ip(*command: str) -> str:
    done = subprocess.run(["ip", *command], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def missing() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    if os.geteuid():
        return "network namespaces need root"
    name = f"prism-{os.getpid()}-try"
    try:
        ip("netns", "add", name)
    except OSError as error:
        return f"network namespaces cannot be made: {error}"
    try:
        ip("-n", name, "link", "add", "bridge", "type", "bridge")
    except OSError as error:
        return f"bridges cannot be made: {error}"
    finally:
        ip("netns", "del", name)
    return ""


class Network:
    """A bridge with a port for this machine and one for each node."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._subnet = f"{_PREFIX}.{os.getpid() % 256}"
        self._mine = f"prism{os.getpid()}"
        self._switch = self.namespace("switch")

    def namespace(self, node: str) -> str:
        return f"prism-{os.getpid()}-{node}"

    def address(self, node: str) -> str:
        return f"{self._subnet}.{10 + self._nodes.index(node)}"

    def __enter__(self) -> Network:
        try:
            ip("netns", "add", self._switch)
            ip("-n", self._switch, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
            ip("-n", self._switch, "link", "set", "bridge", "up")
            ip("link", "add", self._mine, "type", "veth", "peer", "name", "mine", "netns", self._switch)
            ip("addr", "add", f"{self._subnet}.1/24", "dev", self._mine)
            ip("link", "set", self._mine, "up")
            self._plug("mine")
            for node in self._nodes:
                there = self.namespace(node)
                ip("netns", "add", there)
                ip("-n", there, "link", "set", "lo", "up")
                ip(
                    "-n",
                    self._switch,
                    "link",
                    "add",
                    "dev",
                    node,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    there,
                )
                ip("-n", there, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
                ip("-n", there, "link", "set", "eth0", "up")
                self._plug(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        here = ip("netns", "list")
        for node in (*self._nodes, "switch"):
            if self.namespace(node) in here:
                ip("netns", "del", self.namespace(node))

    def _plug(self, port: str) -> None:
        ip("-n", self._switch, "link", "set", "dev", port, "master", "bridge")
        ip("-n", self._switch, "link", "set", "dev", port, "up")

    def cut(self, node: str) -> None:
        """What is sent to the node or by it is lost; no socket is closed, and no link is seen to be down."""
        ip("-n", self._switch, "link", "set", "dev", node, "nomaster")

    def mend(self, node: str) -> None:
        self._plug(node)

    def pids(self, node: str) -> list[int]:
        """Of all processes of the node."""
        return [int(pid) for pid in ip("netns", "pids", self.namespace(node)).split()]
