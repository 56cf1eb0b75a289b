"""A real keeper, a real balloond and a real loader, and an engine that is only its memory."""

from __future__ import annotations

import asyncio
import ctypes
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from balloond.backends.cpu import CpuMapper
from balloond.client import BalloondClient
from balloond.driver.connection.lease import Lease
from balloond.driver.weights import WeightsRange
from loader.checkpoints.checkpoint import fingerprint
from loader.client import LoaderClient
from protos import common_pb2, loader_pb2
from services.rpc import rpc
from services.runtime.checksum import checksum
from testing.patience import PATIENCE_S
from tests.loader import checkpoint_files
from tests.loader.fakes import manifest

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ("cpu:0", "cpu:1")
EXTENT = 256 << 10


class Engine:
    """One model's weights on the device, as its engine has them: a lease and a range."""

    def __init__(self, node: Node, model: str, content: bytes, device: str) -> None:
        self.node = node
        self.model = model
        self.total = len(content)
        self.lease = Lease.attach(node.handoff, device, model, timeout_s=PATIENCE_S)
        self.range = WeightsRange(self.lease, CpuMapper(), span_bytes=self.total, extent_bytes=EXTENT)
        self.map()
        ctypes.memmove(self.range.address, content, self.total)
        self.manifest = manifest(self.total)
        self.checksum = checksum(content)

    def map(self) -> None:
        self.range.grow(self.total, timeout_s=PATIENCE_S)

    def content(self) -> bytes:
        return ctypes.string_at(self.range.address, self.total)

    def close(self) -> None:
        self.range.close()
        self.lease.detach()


class Node:
    """The processes of a node in a folder of their own; each can be killed and started again."""

    def __init__(self) -> None:
        # Unix socket paths are short; pytest's folders are not.
        self.folder = Path(tempfile.mkdtemp(prefix="prism-"))
        self.keeper = str(self.folder / "keeper.sock")
        self.handoff = str(self.folder / "handoff.sock")
        self.balloond_address = f"unix:{self.folder}/balloond.sock"
        self.address = f"unix:{self.folder}/loader.sock"
        self.catalogue = self.folder / "catalogue.toml"
        self.images = self.folder / "images"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.engines: list[Engine] = []
        self.client: LoaderClient
        self.balloond: BalloondClient
        self._write_configs()

    def _write_configs(self) -> None:
        devices = ", ".join(f'{{name = "{device}", capacity_bytes = {64 << 20}}}' for device in DEVICES)
        (self.folder / "balloond.toml").write_text(
            f'name = "balloond"\nlisten = "{self.balloond_address}"\nnode = "n"\nhandoff = "{self.handoff}"\n'
            f'keeper = "{self.keeper}"\ndevices = [{devices}]\n'
        )
        (self.folder / "loader.toml").write_text(
            f'name = "loader"\nlisten = "{self.address}"\ncatalogue = "{self.catalogue}"\nkeeper = "{self.keeper}"\n'
            f'handoff = "{self.handoff}"\nhost_capacity_bytes = {16 << 20}\nchunk_bytes = 65536\n'
            f'disk_folder = "{self.images}"\ndisk_capacity_bytes = {64 << 20}\n'
        )

    # --- processes

    def start(self, *names: str) -> None:
        arguments = {
            "keeper": ["balloond.keeper", "--socket", self.keeper],
            "balloond": ["balloond", "--config", f"{self.folder}/balloond.toml"],
            "loader": ["loader", "--config", f"{self.folder}/loader.toml"],
        }
        for name in names:
            with open(self.folder / f"{name}.log", "ab") as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", *arguments[name]], cwd=ROOT, stdout=log, stderr=log
                )

    def kill(self, name: str) -> None:
        """SIGKILL, and gone when this returns."""
        self.processes[name].kill()
        self.processes.pop(name).wait()

    def reload(self) -> None:
        self.processes["loader"].send_signal(signal.SIGHUP)

    async def healthy(self) -> None:
        for address in (self.balloond_address, self.address):
            assert await rpc.healthy(address, timeout_s=PATIENCE_S), self.logs()

    def logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
        shutil.rmtree(self.folder)

    # --- one test

    async def begin(self) -> None:
        """Everything runs, the catalogue has the models "a" and "b" as written just now, and no image anywhere."""
        self.client, self.balloond = LoaderClient(self.address), BalloondClient(self.balloond_address)
        self.list_models("a", "b")
        self.start(*(name for name in ("keeper", "balloond", "loader") if name not in self.processes))
        await self.healthy()
        # Before the checkpoints change: a file on disk goes with the model that it is of.
        for entry in (await self.until(lambda catalogue: True)).entries:
            await self.client.drop_image(entry.model.name, from_disk=True)
            await self.client.remove(entry.model.name)
        generations = {
            name: fingerprint(self.checkpoint(name, max_position_embeddings=context))
            for name, context in (("a", 64), ("b", 128))
        }
        for name in generations:
            await self.client.drop_image(name)
        self.reload()
        await self.until(
            lambda catalogue: (
                {entry.model.name: entry.model.generation for entry in catalogue.entries} == generations
                and not catalogue.host_used_bytes
            )
        )

    async def end(self) -> None:
        for engine in self.engines:
            await asyncio.to_thread(engine.close)
        self.engines.clear()
        await self.client.close()
        await self.balloond.close()

    def checkpoint(self, name: str, **changes: Any) -> Path:
        return checkpoint_files.write(self.folder / "models" / name, **changes)

    def list_models(self, *names: str) -> None:
        self.catalogue.write_text("".join(f'[[model]]\nname = "{name}"\npath = "models/{name}"\n' for name in names))

    async def add(self, name: str, path: str, **settings: Any) -> common_pb2.ModelSpec:
        return await self.client.add(common_pb2.ModelListing(name=name, path=path, **settings))

    async def engine(self, model: str, content: bytes, device: str = DEVICES[0]) -> Engine:
        """An engine that has loaded a model its ordinary way."""
        await self.balloond.set_booking(device, model, quota_bytes=0, weights_bytes=len(content), floor_bytes=0)
        engine = await asyncio.to_thread(Engine, self, model, content, device)
        self.engines.append(engine)
        return engine

    async def save(self, engine: Engine, spec: common_pb2.ModelSpec, **keys: Any) -> loader_pb2.ImageProgress:
        return await self.client.save_image(
            engine.model, spec.generation, engine.lease.lease_id, engine.manifest, engine.checksum, **keys
        )

    async def asleep(self, engine: Engine) -> None:
        """Its weights leave and come back empty: new extents, the lease and the addresses stay."""
        await asyncio.to_thread(engine.range.leave)
        await asyncio.to_thread(engine.map)

    async def load(self, engine: Engine, spec: common_pb2.ModelSpec, **keys: Any) -> loader_pb2.ImageProgress:
        return await self.client.load_image(
            engine.model, spec.generation, engine.lease.lease_id, engine.manifest, **keys
        )

    async def until(self, condition: Callable[[loader_pb2.Catalogue], Any]) -> loader_pb2.Catalogue:
        """The first catalogue from now on for which `condition` is true; the stream is followed through restarts."""
        async with asyncio.timeout(PATIENCE_S):
            async for catalogue in self.client.watch():
                if catalogue is not None and condition(catalogue):
                    return catalogue
        raise AssertionError("the stream ended")

    async def entry(self, name: str) -> loader_pb2.Entry:
        """As the catalogue shows it now."""
        catalogue = await self.until(lambda catalogue: True)
        return {entry.model.name: entry for entry in catalogue.entries}[name]


@pytest.fixture(scope="session")
def running() -> Iterator[Node]:
    """Starting three processes takes seconds: they are shared, and started again when a test killed them."""
    node = Node()
    yield node
    node.stop()


@pytest.fixture
async def node(running: Node) -> AsyncIterator[Node]:
    """A node with the models "a" and "b"."""
    await running.begin()
    yield running
    await running.end()
