"""Asking a running system, however it was deployed."""

from __future__ import annotations

import asyncio

import aiohttp

from balloond.client import BalloondClient
from testing.patience import PATIENCE_S


async def complete(http: str, model: str) -> str:
    """The text of a completion at "host:port", which must succeed once the gateway knows the model: what a catalogue
    says is not pushed to clients, and a system that has just started may not have heard it."""
    body = {"model": model, "prompt": list(range(20, 60)), "max_tokens": 8, "temperature": 0}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with session.get(f"http://{http}/v1/models/{model}") as answer:
                    if answer.status == 200:
                        break
                await asyncio.sleep(0.05)
        async with session.post(f"http://{http}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return str((await answer.json())["choices"][0]["text"])


async def ledger(balloond: str) -> dict[str, tuple[str, str, int]]:
    """What is leased to whom, by lease: device, model, bytes of weights. Of KV an engine without work takes and gives
    back reserve when it likes."""
    client = BalloondClient(balloond)
    try:
        state = await client.inspect()
    finally:
        await client.close()
    return {
        lease.lease_id: (device.device, lease.model, lease.weights_bytes)
        for device in state.devices
        for lease in device.leases
    }
