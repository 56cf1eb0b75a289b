"""Whether memory is accounted for: by balloond's ledger while it runs, and by the kernel once nothing is up."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

from balloond.client import BalloondClient
from protos import balloond_pb2
from services.errors import PrismError

_LOOK_S = 0.2
_NAMES = ("/memfd:prism-extent", "/memfd:prism-image")


class LedgerAudit:
    """Looks at the ledger again and again."""

    def __init__(self, balloond: BalloondClient) -> None:
        self._balloond = balloond
        self.looks = 0
        self.unequal: list[str] = []
        """Where leased + free + booked + stranded was not the capacity."""
        self.most_stranded = 0

    async def watch(self) -> None:
        """For ever; a balloond that does not answer is asked again."""
        while True:
            try:
                self._look(await self._balloond.inspect())
            except PrismError:
                pass
            await asyncio.sleep(_LOOK_S)

    def _look(self, state: balloond_pb2.NodeState) -> None:
        self.looks += 1
        self.most_stranded = max([self.most_stranded, *(device.stranded_bytes for device in state.devices)])
        for device in state.devices:
            parts = (device.leased_bytes, device.free_bytes, device.booked_bytes, device.stranded_bytes)
            if sum(parts) != device.capacity_bytes:
                self.unequal.append(f"{device.device}: {parts} are not {device.capacity_bytes}")

    async def taken(self) -> int:
        """Bytes of all devices that are not free."""
        return sum(device.capacity_bytes - device.free_bytes for device in (await self._balloond.inspect()).devices)


def held(pids: Iterable[int]) -> int:
    """Bytes of extents and images that these processes hold by a descriptor or a mapping, as the kernel says."""
    sizes: dict[int, int] = {}
    for pid in pids:
        process = Path(f"/proc/{pid}")
        try:
            for entry in (process / "fd").iterdir():
                if os.readlink(entry).startswith(_NAMES):
                    status = entry.stat()
                    sizes[status.st_ino] = status.st_size
            for line in (process / "maps").read_text().splitlines():
                addresses, _, _, _, inode, *name = line.split(maxsplit=5)
                if name and name[0].startswith(_NAMES):
                    begin, end = (int(address, 16) for address in addresses.split("-"))
                    sizes.setdefault(int(inode), end - begin)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it, or its descriptor, went away meanwhile
    return sum(sizes.values())


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
