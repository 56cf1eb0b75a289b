import asyncio
import os
import signal
import sys
import textwrap

import pytest

from services.rpc import rpc

PROGRAM = textwrap.dedent(
    """
    import asyncio, sys
    from services.runtime.config import Config
    from services.errors import Unavailable
    from services.service import read_arguments, run

    async def build(service):
        async def drain(): print("drained", flush=True)
        async def first(): print("stopped first part", flush=True)
        async def second(): print("stopped second part", flush=True)
        service.on_drain(drain); service.on_stop(first); service.on_stop(second)
        async def fail():
            await asyncio.to_thread(sys.stdin.readline)
            raise RuntimeError("broken invariant")
        service.spawn(fail(), "fails on input")
        await service.ready()
        print("ready", flush=True)

    run(read_arguments(Config, "test"), build)
    """
)


async def start(tmp_path, config=""):
    path = tmp_path / "c.toml"
    path.write_text(f'name = "example"\nlisten = "unix:{tmp_path}/s.sock"\nlog_format = "json"\n{config}')
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, "--config", str(path),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip


async def test_a_service_is_healthy_when_ready_and_a_signal_drains_and_stops_it_in_reverse_order(tmp_path):
    process = await start(tmp_path)
    assert await process.stdout.readline() == b"ready\n"
    assert await rpc.healthy(f"unix:{tmp_path}/s.sock", 20)
    process.send_signal(signal.SIGTERM)
    out, _ = await process.communicate()
    assert out.decode().splitlines() == ["drained", "stopped second part", "stopped first part"]
    assert process.returncode == 0


async def test_a_service_with_a_failing_task_ends_with_status_1_and_its_traceback(tmp_path):
    process = await start(tmp_path)
    await process.stdout.readline()
    process.stdin.write(b"\n")
    _, err = await process.communicate()
    assert process.returncode == 1
    assert b"broken invariant" in err


async def test_a_service_on_an_address_in_use_ends_with_one_line(tmp_path):
    first = await start(tmp_path)
    await first.stdout.readline()
    second = await start(tmp_path)
    _, err = await second.communicate()
    lines = [line for line in err.decode().splitlines() if not line.startswith("{")]
    assert second.returncode == 1
    assert len(lines) == 1 and "another process serves it" in lines[0]
    first.terminate()
    await first.communicate()


@pytest.mark.parametrize("config", ['colour = "red"', "drain_s = -1"])
async def test_a_service_with_a_bad_configuration_ends_with_one_line(tmp_path, config):
    process = await start(tmp_path, config)
    _, err = await process.communicate()
    assert process.returncode == 1
    assert len(err.decode().splitlines()) == 1 and config.split()[0] in err.decode()
