"""The process: how it starts, and how it does not."""

import signal
import socket
import subprocess
import sys

import pytest

from balloond.backends.cpu import PAGE_BYTES
from testing.patience import PATIENCE_S
from tests.balloond.conftest import MIB, ROOT, Child, Node

pytestmark = pytest.mark.usefixtures("executed")


def start_another(node, config=None):
    """A balloond that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "balloond", "--config", str(config or node.config)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


async def test_balloond_on_a_socket_in_use_ends_with_one_line(node):
    second = start_another(node)
    assert second.returncode == 1
    assert f"balloond: {node.handoff}: another process serves it\n" in second.stderr
    assert "Traceback" not in second.stderr
    await node.book("a")
    assert node.balloond.poll() is None


async def test_balloond_on_stale_socket_files_starts(tmp_path):
    node = Node(tmp_path)
    for path in (node.handoff, node.keeper_path, node.address.removeprefix("unix:")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
            left.bind(path)
    try:
        await node.start()
        await node.book("a")
    finally:
        node.end()


def test_balloond_without_a_keeper_ends_with_one_line(tmp_path):
    node = Node(tmp_path, keeper_timeout_s=0.1)
    ended = start_another(node)
    assert ended.returncode == 1
    assert f"balloond: {node.keeper_path}: no keeper answers\n" in ended.stderr


def test_balloond_with_an_unknown_key_in_its_config_ends_with_one_line(tmp_path):
    node = Node(tmp_path, colour='"red"')
    ended = start_another(node)
    assert (ended.returncode, ended.stderr) == (1, f"{node.config}: colour: unknown key\n")


def test_balloond_for_a_device_without_a_backend_ends_with_one_line(tmp_path):
    node = Node(tmp_path, devices=(("tpu:0", MIB),))
    ended = start_another(node)
    assert ended.returncode == 1
    assert "devices.0.name: device 'tpu:0': there is a backend for" in ended.stderr and "\n" not in ended.stderr.strip()


def test_balloond_for_a_missing_gpu_ends_with_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ended = start_another(Node(tmp_path, devices=(("cuda:0", MIB),)))
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("balloond: ")]
    assert line.startswith("balloond: cuda:0: ") and "Errno" not in line
    assert "Traceback" not in ended.stderr


async def test_balloond_with_memory_of_a_device_not_configured_ends_with_one_line(node, child):
    await node.book("a")
    child("a").ask("acquire", 1)
    node.kill(node.balloond)
    node.write_config(devices=(("cpu:7", MIB),))
    ended = start_another(node)
    assert ended.returncode == 1
    assert "balloond: the keeper holds memory of cpu:0, which the configuration lacks\n" in ended.stderr
    node.write_config()
    await node.start_balloond()
    assert (await node.device()).leased_bytes > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_balloond_stopped_by_a_signal_frees_no_memory(node, child, number):
    await node.book("a")
    one = child("a")
    one.ask("acquire", 4)
    one.ask("write", "x")
    node.balloond.send_signal(number)
    assert node.balloond.wait(PATIENCE_S) == 0
    assert one.ask("read", "x") == "same"
    await node.start_balloond()
    device = await node.until(lambda device: not any(lease.suspended for lease in device.leases))
    assert device.leased_bytes == 4 * (256 << 10)
    assert one.ask("acquire", 1) == "1"


async def test_balloond_spare_extents_come_off_the_capacity_and_belong_to_no_lease(tmp_path):
    node = Node(tmp_path)
    node.config.write_text(node.config.read_text() + f"\nspare_bytes = {MIB}\nkv_extent_bytes = {MIB // 4}\n")
    try:
        await node.start()
        await node.book("a")
        engine = Child(node.handoff, node.name, "a")
        assert engine.answer() == "ready"
        assert await engine.asked("acquire", 20) == "20"
        device = await node.device()
        assert device.capacity_bytes == 16 * MIB - MIB - PAGE_BYTES
        assert device.leased_bytes == 5 * MIB
        node.kill(node.balloond)
        await node.start_balloond()
        device = await node.until(lambda device: not any(lease.suspended for lease in device.leases))
        assert (device.capacity_bytes, device.leased_bytes) == (16 * MIB - MIB - PAGE_BYTES, 5 * MIB)
        engine.close()
    finally:
        node.end()
