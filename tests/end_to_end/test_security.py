"""The whole system over TCP with mTLS, keys and TLS for clients; echo engines."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import shutil
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import trustme

from deploy.local.processes import LocalSystem
from deploy.local.topology import Local, Process
from gateway.access import keys
from services.rpc import rpc
from services.rpc.tls import Identity
from services.runtime import tasks
from testing.patience import PATIENCE_S
from testing.ports import free_port
from testing.systems.local import MODELS, ROOT, catalogue, lists, print_ends, until
from tests.services.certificates import Files, issued

NAME = "prism.internal"
SECRET = keys.new()
KEY = {"authorization": f"Bearer {SECRET}"}


def over_tcp(plan: list[Process], state: Path, ca: trustme.CA) -> tuple[list[Process], dict[str, Files]]:
    """The same processes, each with an address and a certificate of its own in place of a socket."""
    named = [process for process in plan if process.probe.startswith("unix:")]
    addresses = {process.probe: f"127.0.0.1:{free_port()}" for process in named}
    longest_first = sorted(addresses, key=len, reverse=True)
    files = {}
    for process in named:
        mine = files[process.name] = issued(state, process.name, ca, NAME, "127.0.0.1")
        path = state / f"{process.name}.toml"
        text = re.sub("|".join(map(re.escape, longest_first)), lambda found: addresses[found[0]], path.read_text())
        tls = "".join(f"{field} = {json.dumps(value)}\n" for field, value in mine.node(NAME).model_dump().items())
        path.write_text(f"{text}\n[tls]\n{tls}")
    return [dataclasses.replace(each, probe=addresses.get(each.probe, each.probe)) for each in plan], files


class Secured:
    def __init__(self, system: LocalSystem, state: Path, base: str, files: dict[str, Files], me: Identity) -> None:
        self.system = system
        self.state = state
        self.base = base
        self.files = files
        self.me = me

    def trusting(self, *cas: trustme.CA) -> aiohttp.ClientSession:
        context = ssl.create_default_context()
        for ca in cas:
            ca.configure_trust(context)
        return aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=PATIENCE_S), connector=aiohttp.TCPConnector(ssl=context)
        )

    async def all_have_read(self, times: int) -> None:
        """Every process says in its log that it has taken new certificates."""
        async with asyncio.timeout(PATIENCE_S):
            for name in self.files:
                while self.log(name).count('"read again"') < times:
                    await asyncio.sleep(0.05)

    def log(self, name: str) -> str:
        return self.system.running[name].log_path.read_text(errors="replace")


@contextlib.asynccontextmanager
async def secured(ca: trustme.CA) -> AsyncIterator[Secured]:
    # Unix socket paths are short; pytest's folders are not.
    state = Path(tempfile.mkdtemp(prefix="prism-"))
    http = f"127.0.0.1:{free_port()}"
    (state / "keys.toml").write_text(f'[[key]]\nname = "ann"\nhash = "{keys.digest(SECRET)}"\n')
    public = Files(state, "gateway").server.model_dump()
    plan = Local(
        state=state,
        catalogue=catalogue(state, "echo"),
        http=http,
        engine="echo",
        engine_options={"step_ms": "20"},
        devices={"cpu:0": 32 << 20},
        gateway={
            "park_time_out_s": PATIENCE_S,
            "reach_time_out_s": PATIENCE_S,
            "keys_file": str(state / "keys.toml"),
            "public_tls": public,
        },
    )
    processes, files = over_tcp(plan.processes(), state, ca)
    me = Identity(issued(state, "tool", ca).node(NAME))
    rpc.identify(me)
    system = LocalSystem(processes, state / "logs", print)
    try:
        await system.start()
        it = Secured(system, state, f"https://{http}", files, me)
        async with it.trusting(ca) as asking:
            await until(lambda: lists(asking, it.base, MODELS, headers=KEY), "models are missing")
        yield it
    except BaseException:
        print_ends(state / "logs")
        raise
    finally:
        rpc.identify(None)
        await system.end()
        shutil.rmtree(state, ignore_errors=True)


async def stream(http: aiohttp.ClientSession, base: str) -> int:
    """A streamed completion that must succeed; its events."""
    body: dict[str, Any] = {"model": MODELS[0], "prompt": list(range(20, 60)), "max_tokens": 60, "stream": True}
    async with http.post(base + "/v1/completions", json=body, headers=KEY) as answer:
        assert answer.status == 200, await answer.text()
        text = (await answer.read()).decode()
    assert '"error"' not in text and text.endswith("data: [DONE]\n\n"), text[-500:]
    return text.count("data: ")


async def test_a_system_over_tcp_has_mtls_everywhere_and_takes_new_certificates_while_it_serves() -> None:
    old, new = trustme.CA(), trustme.CA()
    async with secured(old) as it, it.trusting(old, new) as http:
        async with http.post(it.base + "/v1/completions", json={"model": MODELS[0], "prompt": "a"}) as answer:
            assert answer.status == 401
        assert await stream(http, it.base) > 1

        served = 0

        async def serve_on() -> None:
            nonlocal served
            while True:
                async with it.trusting(old, new) as fresh:  # a connection of its own
                    await stream(fresh, it.base)
                served += 1

        async def one_more() -> None:
            before = served
            while served == before:
                assert not any(client.done() for client in clients)
                await asyncio.sleep(0.02)

        clients = [tasks.spawn(serve_on(), f"client {number}") for number in range(3)]
        everybody = [*it.files.values()]
        for files in everybody:
            files.believe(old, new)
        await it.all_have_read(1)
        await one_more()
        for files in everybody:
            files.issue(new, NAME, "127.0.0.1")
        await it.all_have_read(2)
        await one_more()
        for files in everybody:
            files.believe(new)
        await it.all_have_read(3)
        # All connections are made again: by the new certificates, for there are no others.
        placement = it.system.running["placement"]
        os.kill(placement.pid, 9)
        while placement.restarts == 0:
            await asyncio.sleep(0.02)
        await one_more()
        await one_more()
        await tasks.cancel(*clients)
        assert all(running.restarts == (name == "placement") for name, running in it.system.running.items())
        async with it.trusting(new) as fresh:
            assert await stream(fresh, it.base) > 1

        tool = issued(it.state, "operator", new)
        environment = os.environ | {
            "PRISM_TLS_CA": str(tool.ca),
            "PRISM_TLS_CERTIFICATE": str(tool.certificate),
            "PRISM_TLS_KEY": str(tool.key),
            "PRISM_TLS_SERVER_NAME": NAME,
            "PRISM_PLACEMENT": placement.spec.probe,
        }
        shown = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "prismctl",
            "models",
            "list",
            cwd=ROOT,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
        )
        told, _ = await shown.communicate()
        assert shown.returncode == 0 and MODELS[0] in told.decode()
        assert SECRET not in "".join(it.log(name) for name in it.system.running)
