"""A service manager for tests: it starts services as systemd does, with NOTIFY_SOCKET and WATCHDOG_USEC."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

from testing.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
# systemd names the process that shall beat, whose number is known only after the fork.
_NAMING_ITSELF = 'WATCHDOG_PID=$$ exec "$@"'


class Unit:
    """One service and what it said."""

    def __init__(self, name: str, arguments: list[str], folder: Path, watchdog_us: int) -> None:
        self.name = name
        self.said: list[dict[str, str]] = []
        self._more = asyncio.Event()
        self._command = ["sh", "-c", _NAMING_ITSELF, "sh", sys.executable, "-m", *arguments]
        self._log = folder / f"{name}.log"
        address = str(folder / f"{name}.notify")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._sock.bind(address)
        asyncio.get_running_loop().add_reader(self._sock, self._hear)
        self._environment = {**os.environ, "NOTIFY_SOCKET": address, "WATCHDOG_USEC": str(watchdog_us)}
        self.process: asyncio.subprocess.Process

    def _hear(self) -> None:
        said = self._sock.recv(65536).decode()
        self.said.append(dict(line.split("=", 1) for line in said.splitlines()))
        self._more.set()

    async def hears(self, variable: str) -> str:
        """The value of `variable`, once it was said since the last start."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for state in self.said:
                    if variable in state:
                        return state[variable]
                self._more.clear()
                await self._more.wait()

    async def start(self) -> None:
        """Returns when it said that it is ready."""
        self.said.clear()
        with open(self._log, "ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self._command, cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )
        loop = asyncio.get_running_loop()
        ready, ended = loop.create_task(self.hears("READY")), loop.create_task(self.process.wait())
        await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
        assert ready.done(), f"{self.name} ended with status {self.process.returncode}:\n{self._log.read_text()}"
        ended.cancel()
        assert ready.result() == "1"

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> int:
        """Its exit status; whether it said that it stops is in `said`."""
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()

    async def close(self) -> None:
        if self.process.returncode is None:
            await self.kill()
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
