"""The compose file, and its services as processes of this machine: their commands, environment and paths as the file
says, with what containers would mount lying below a folder."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from testing.patience import PATIENCE_S
from testing.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "compose"
_LISTENED = ("0.0.0.0:8000", "0.0.0.0:9100")
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def read(environment: Mapping[str, str], name: str = "compose.yaml") -> dict[str, Any]:
    """The file with its variables filled in."""
    text = (FOLDER / name).read_text()
    return dict(yaml.safe_load(_VARIABLE.sub(lambda found: environment.get(found[1], found[2]), text)))


def seconds(duration: str) -> int:
    return int(duration.removesuffix("s"))


class Container:
    """One service as a process."""

    def __init__(
        self, name: str, service: dict[str, Any], folder: Path, addresses: Mapping[str, str] | None = None
    ) -> None:
        """`addresses`: where those that are listened on and asked lie here; left out, the compose file's own."""
        self.name = name
        self._service = service
        self._log = folder / f"{name}.log"
        mounted = {}
        for volume in service.get("volumes", ()):
            if volume["type"] == "bind":
                source = (FOLDER / volume["source"]).resolve()
            else:
                source = folder / volume["source"]
                source.mkdir(exist_ok=True)
            mounted[volume["target"]] = source
        if "/etc/prism" in mounted:
            shipped, mounted["/etc/prism"] = mounted["/etc/prism"], folder / name
        self._there = {target: str(source) for target, source in mounted.items()}
        # All share this machine's ports.
        self.ports = addresses or {address: f"127.0.0.1:{free_port()}" for address in _LISTENED}
        self._there |= self.ports
        if "/etc/prism" in mounted:
            for path in shipped.rglob("*.toml"):
                mine = mounted["/etc/prism"] / path.relative_to(shipped)
                mine.parent.mkdir(parents=True, exist_ok=True)
                mine.write_text(self._redirected(path.read_text()).replace("[engines]", '[engines]\nkind = "echo"'))
        self.process: asyncio.subprocess.Process

    def _redirected(self, text: str) -> str:
        """With paths that are mounted where they lie here. What the service does not mount stays, and is not there."""
        longest_first = sorted(self._there, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, longest_first)), lambda found: self._there[found[0]], text)

    async def run(self, command: list[str]) -> asyncio.subprocess.Process:
        """A command inside."""
        environment = {name: self._redirected(value) for name, value in self._service.get("environment", {}).items()}
        with open(self._log, "ab") as log:
            return await asyncio.create_subprocess_exec(
                *map(self._redirected, command),
                cwd=ROOT,  # the image's WORKDIR
                env={"PATH": f"{Path(sys.executable).parent}:{os.defpath}", **environment},
                stdout=log,
                stderr=log,
            )

    def said(self) -> str:
        return self._log.read_text()

    async def start(self) -> None:
        """Returns when it is healthy, by its own health check."""
        self.process = await self.run(self._service["command"])
        if "healthcheck" not in self._service:
            return
        kind, *command = self._service["healthcheck"]["test"]
        assert kind == "CMD"
        async with asyncio.timeout(PATIENCE_S):
            while await (await self.run(command)).wait():
                assert self.process.returncode is None, f"{self.name}:\n{self.said()}"

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(seconds(self._service["stop_grace_period"])):
            return await self.process.wait()

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
