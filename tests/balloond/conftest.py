"""A real keeper and a real balloond as processes, on sockets under tmp_path."""

import asyncio
import contextlib
import itertools
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from balloond.client import BalloondClient
from services.ipc import seqpacket
from services.rpc import rpc
from testing.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
KIB = 1 << 10
TIMEOUT_S = PATIENCE_S


class Node:
    """One keeper and one balloond, either of which can be killed and started again."""

    def __init__(self, folder: Path, **config):
        self.folder = folder
        self.name = "cpu:0"
        """The device that is meant when none is named."""
        self.handoff = str(folder / "h.sock")
        self.keeper_path = str(folder / "k.sock")
        self.address = f"unix:{folder / 'b.sock'}"
        self.config = folder / "b.toml"
        self.keeper = self.balloond = None
        self.write_config(**config)

    def write_config(self, devices=(("cpu:0", 16 * MIB),), **more):
        lines = [
            'name = "balloond"',
            f'listen = "{self.address}"',
            'node = "test"',
            f'handoff = "{self.handoff}"',
            f'keeper = "{self.keeper_path}"',
            'log_format = "text"',
            *(f"{key} = {value}" for key, value in more.items()),
            *(f'[[devices]]\nname = "{name}"\ncapacity_bytes = {size}' for name, size in devices),
        ]
        self.config.write_text("\n".join(lines))

    def _spawn(self, *arguments):
        log = open(self.folder / "log", "ab")
        return subprocess.Popen([sys.executable, "-m", *arguments], cwd=ROOT, stdout=log, stderr=log)

    def log(self):
        return (self.folder / "log").read_text()

    async def start_keeper(self):
        self.keeper = self._spawn("balloond.keeper", "--socket", self.keeper_path)
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    return seqpacket.connect(self.keeper_path).close()
                except OSError:
                    assert self.keeper.poll() is None, self.log()
                    await asyncio.sleep(0.01)

    async def start_balloond(self):
        self.balloond = self._spawn("balloond", "--config", str(self.config))
        assert await rpc.healthy(self.address, TIMEOUT_S), self.log()

    async def start(self):
        await self.start_keeper()
        await self.start_balloond()
        return self

    @staticmethod
    def kill(process):
        process.kill()
        process.wait()

    def end(self):
        for process in (self.balloond, self.keeper):
            if process is not None and process.poll() is None:
                self.kill(process)

    @contextlib.asynccontextmanager
    async def client(self):
        client = BalloondClient(self.address)
        try:
            yield client
        finally:
            await client.close()

    async def book(self, *models, device=None, quota=0, weights=0, floor=0):
        device = device or self.name
        async with self.client() as client:
            for model in models:
                await client.set_booking(device, model, quota_bytes=quota, weights_bytes=weights, floor_bytes=floor)

    async def device(self, name=None):
        """The device's state, whose sum is checked."""
        name = name or self.name
        async with self.client() as client:
            state = await client.inspect()
        return checked(next(d for d in state.devices if d.device == name))

    async def until(self, condition, name=None):
        """Follows balloond until the device's state meets `condition`; returns it."""
        name = name or self.name
        async with self.client() as client, asyncio.timeout(TIMEOUT_S):
            async for state in client.watch():
                for device in state.devices if state is not None else ():
                    if device.device == name and condition(checked(device)):
                        return device


def checked(device):
    parts = device.leased_bytes + device.free_bytes + device.booked_bytes + device.stranded_bytes
    assert parts == device.capacity_bytes, device
    assert sum(lease.kv_bytes + lease.weights_bytes for lease in device.leases) == (
        device.leased_bytes + device.stranded_bytes
    ), device
    return device


class Child:
    """A process of its own that runs `module` and does what it is told, line by line."""

    module = "tests.balloond.child"

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    @property
    def pid(self):
        return self.process.pid

    def tell(self, *words):
        self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        self.process.stdin.flush()

    def answer(self):
        """The next line, without waiting for ever."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(TIMEOUT_S), "the child does not answer"
        return self.process.stdout.readline().decode().strip()

    def ask(self, *words):
        self.tell(*words)
        return self.answer()

    async def asked(self, *words):
        """The same while the test's loop goes on."""
        return await asyncio.to_thread(self.ask, *words)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self):
        if self.process.poll() is None:
            self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
async def node(tmp_path):
    node = Node(tmp_path)
    try:
        yield await node.start()
    finally:
        node.end()


@pytest.fixture(scope="module")
def node_of_module(tmp_path_factory, request):
    """With what the module says as `CONFIG`."""
    config = getattr(request.module, "CONFIG", {})
    node = Node(tmp_path_factory.mktemp("node"), devices=[(f"cpu:{i}", 16 * MIB) for i in range(40)], **config)
    asyncio.run(node.start())
    yield node
    node.end()


_numbers = itertools.count()


@pytest.fixture
def shared(node_of_module):
    """A node that tests share, each with a device of its own: for those that leave keeper and balloond alone."""
    node_of_module.name = f"cpu:{next(_numbers) % 40}"
    return node_of_module


@pytest.fixture
def child(request):
    """Starts children that are ended with the test."""
    node = request.getfixturevalue("shared" if "shared" in request.fixturenames else "node")
    children = []

    def start(model, *marks, device=None):
        children.append(Child(node.handoff, device or node.name, model, *marks))
        assert children[-1].answer() == "ready"
        return children[-1]

    yield start
    for one in children:
        one.close()
