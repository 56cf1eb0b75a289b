"""The whole system with a model on two devices: from the catalogue to tokens, through sleep and the death of a rank."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from protos import common_pb2
from testing.systems.local import world
from tests.end_to_end.reference import greedy
from tests.end_to_end.test_sglang_system import path, prompts, text_of

pytestmark = pytest.mark.sglang
MIB = 1 << 20
MODEL = "llama-debian"
DEVICES = {"cpu:0": 14 * MIB, "cpu:1": 14 * MIB}


async def test_model_on_two_devices_answers_as_transformers_does_though_a_rank_is_killed():
    ids = prompts(MODEL)
    texts = [text_of(MODEL, tokens) for tokens in await greedy(path(MODEL), ids, 40)]
    models = {MODEL: {"devices": 2, "quota_bytes": 0}, "qwen3-perl": {"quota_bytes": 0}}
    async with world("sglang", models, devices=DEVICES, groups=(tuple(DEVICES),), warm=0, poison=True) as it:

        async def answers(times=1, started=None):
            streams = [it.stream(MODEL, ids[i % 5], 40, started[i] if started else None) for i in range(5 * times)]
            return [text for text, _, _ in await asyncio.gather(*streams)] == texts * times

        assert await answers()
        resident = await it.measured(MODEL)
        assert resident.weights_bytes == 9 * MIB and resident.kv_bytes_per_token == 3072, "of both devices"

        # A model for one device has no place here, and is told so.
        status, answer = await it.post("/v1/completions", {"model": "qwen3-perl", "prompt": "x", "max_tokens": 1})
        assert status == 503 and "it is for a group of 1 device: cpu:0+cpu:1 has 2" in answer["error"]["message"]

        # A rank that does not speak dies in the middle of ten streams: they go on in the engine's successor.
        started = [asyncio.Event() for _ in range(10)]
        streaming = asyncio.get_running_loop().create_task(answers(2, started))
        for event in started:
            await event.wait()
        (rank,) = [pid for pid in it.engine_pids() if b"--rank\x001\x00" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(rank, signal.SIGKILL)
        assert await streaming
        assert (await it.measured(MODEL)).engine_pid != resident.engine_pid

        # Asleep and awake again, each rank from its own image.
        await it.evict(MODEL, common_pb2.HIBERNATING)
        assert await answers()
        await it.evict(MODEL, common_pb2.COLD)

        async def all_returned():
            (group,) = (await it.placement.cluster()).groups
            return group.free_bytes == group.capacity_bytes == sum(DEVICES.values())

        await it.until(all_returned, "bytes are missing on a device")
