"""Falling asleep, waking up and starting cold, as a client and an operator see them: through the gateway, with every
process of the system.

    python -m benchmarks.gpu.residency --out DIR [--shapes 8b 1b] [--cycles 20] [--mixed 24] [--device cuda:0]

For each shape a checkpoint of random weights is written first (bf16 safetensors). Then, for each model:

    disk     from the checkpoint, never seen before: request sent until first token
    asleep   from asking an idle model to sleep until the ledger has its memory back
    wake     from a request to a sleeping model until its first token, and the steps in between
    cold     the same from the weight image in a warm engine that served the other model before
    fresh    the same in one that never had a model

The answer is the same greedy one every time. With `--mixed`, so many other requests come between it and the sleep, no
two alike: what a sleeping engine keeps must not grow by them. After the cycles: descriptors, host memory and device
memory of each process, against those after the second cycle; and what engines told of their own device memory, by kind:
at its most, asleep, and without a model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from balloond import backends
from benchmarks.gpu import report, shapes
from gpu_scheduler.client import GpuSchedulerClient
from protos import common_pb2
from services.telemetry import log
from testing.systems.local import FOLDER, World, world

TOKENS = 16
PROMPT = 64


async def answer(at: World, model: str, prompt: list[int], tokens: int) -> list[tuple[str, float]]:
    """The greedy tokens and their log-probabilities."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    async with at.http.post(f"{at.base}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(await response.text())
        said = (await response.json())["choices"][0]["logprobs"]
    return list(zip(said["tokens"], said["token_logprobs"], strict=True))


async def first_token(at: World, model: str, prompt: list[int]) -> tuple[float, list[tuple[str, float]]]:
    """Seconds until the first token, and what the model then says (asked for again: most of the tokenizer's tokens of
    such a model are no text, and a stream would show none before its end)."""
    began = time.monotonic()
    await answer(at, model, prompt, 1)
    seconds = time.monotonic() - began
    return seconds, await answer(at, model, prompt[1:], TOKENS)


async def mixed(at: World, model: str, requests: int, chance: random.Random) -> None:
    """So many at once, of any length, greedy and drawn, some with log-probabilities."""

    async def one() -> None:
        body = {
            "model": model,
            "prompt": [chance.randrange(3, 2000) for _ in range(chance.randrange(2, 900))],
            "max_tokens": chance.randrange(1, 80),
            **chance.choice([{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9}, {"seed": chance.randrange(1000)}]),
            **chance.choice([{}, {}, {"logprobs": 3}, {"ignore_eos": True}]),
        }
        async with at.http.post(f"{at.base}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(await response.text())
            await response.read()

    await asyncio.gather(*(one() for _ in range(requests)))


async def sleep(at: World, model: str, target: common_pb2.Residency, now: common_pb2.Residency) -> float:
    """Seconds until an idle model's memory is back, once placement has heard that the model is what it is `now`."""
    await at.wait_residency(model, now)
    began = time.monotonic()
    await at.placement.evict(model, target)
    return time.monotonic() - began


async def warm(at: World) -> int:
    """Engines with their imports done, of all groups."""
    engines = 0
    for device in at.local.devices:
        client = GpuSchedulerClient(at.local.unix(at.local.scheduler(device)))
        async with contextlib.aclosing(client.watch()) as states:
            async for state in states:
                engines += state.warm_engines if state is not None else 0
                break
        await client.close()
    return engines


def processes(at: World) -> dict[str, dict[str, int]]:
    """Descriptors and resident host memory of every process."""
    pids = {name: running.pid for name, running in at.system.running.items()}
    pids |= {f"engine {i}": pid for i, pid in enumerate(at.engine_pids())}
    found = {}
    for name, pid in pids.items():
        status = Path(f"/proc/{pid}/status").read_text()
        anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        found[name] = {"descriptors": len(os.listdir(f"/proc/{pid}/fd")), "anonymous_kib": int(anonymous.split()[1])}
    return found


TELLING = (
    "private memory",
    "hibernating",
    "warm again",
    "CUDA graphs captured",
    "CUDA graphs take memory that stays while the model sleeps",
    "stack of the device",
    "the collector stopped the engine",
    "model active",
)


def told(logs: Path, telling: Sequence[str] = TELLING) -> list[dict[str, Any]]:
    """What was said of some events in the logs of all processes, in its order."""
    lines = [line for log in sorted(logs.glob("*.log")) for line in log.read_text(errors="replace").splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{") and any(each in line for each in telling)]
    return sorted((event for event in events if event.get("event") in telling), key=lambda event: event["timestamp"])


def show_kept(events: list[dict[str, Any]]) -> None:
    for event in events:
        kinds = event.get("kept") or event.get("now")
        if kinds:
            mib = {kind: round(nbytes / 2**20) for kind, nbytes in kinds.items()}
            own = sum(nbytes for kind, nbytes in mib.items() if kind != "graphs")
            print(f"{event['event']:15} {event.get('model') or event.get('left'):12} {own} MiB of its own: {mib}")


def device_memory(device: str) -> dict[str, Any]:
    """What its driver says of the device and of each process on it, in bytes; empty without a GPU."""
    if not device.startswith("cuda"):
        return {}
    hardware = backends.look(device)
    return {"used": hardware.total_bytes - hardware.free_bytes, "by_process": dict(hardware.processes)}


async def measure(at: World, names: list[str], cycles: int, requests: int, device: str, found: dict[str, Any]) -> None:
    """Into `found`, as it is measured; `requests` others before each sleep."""
    chance = random.Random(5)
    prompts = {name: [chance.randrange(3, 2000) for _ in range(PROMPT)] for name in names}
    kinds = ("asleep_s", "wake_s", "cold_s", "fresh_s", "steps")
    found |= {name: {kind: [] for kind in kinds} for name in names}
    said: dict[str, list[tuple[str, float]]] = {}
    while at.engine_pids() == [] or not (await warm(at)):
        await asyncio.sleep(0.2)
    for name in names:
        found[name]["disk_s"], said[name] = await first_token(at, name, prompts[name])
        found[name]["disk_steps"] = dict((await at.measured(name)).step_s)
        found[name]["warm_s"] = [(await first_token(at, name, prompts[name][::-1]))[0] for _ in range(5)]
        # Waits for its image too.
        found[name]["first_sleep_s"] = await sleep(at, name, common_pb2.HIBERNATING, common_pb2.ACTIVE)
        print(f"{name}: disk {found[name]['disk_s']:.2f} s, {found[name]['disk_steps']}", flush=True)
    found["hibernating"] = device_memory(device)
    for name in names:
        for cycle in range(cycles):
            await at.wait_residency(name, common_pb2.HIBERNATING)
            await asyncio.sleep(0.3)  # until every gateway has heard of it as well
            seconds, now = await first_token(at, name, prompts[name])
            resident = await at.measured(name)
            if now != said[name]:
                raise RuntimeError(f"{name}, cycle {cycle}: {now!r} instead of {said[name]!r}")
            found[name]["wake_s"].append(seconds)
            found[name]["steps"].append(dict(resident.step_s))
            if requests:
                await mixed(at, name, requests, chance)
                await answer(at, name, prompts[name], TOKENS)  # what the last step leaves is always as much
            found[name]["asleep_s"].append(await sleep(at, name, common_pb2.HIBERNATING, common_pb2.ACTIVE))
            if cycle == 1:
                found[name]["after_two"] = {"processes": processes(at), "device": device_memory(device)}
        found[name]["after_all"] = {"processes": processes(at), "device": device_memory(device)}
        ordered = sorted(found[name]["wake_s"])
        middle = len(ordered) // 2
        print(
            f"{name}: wake {ordered[middle]:.3f} s ({ordered[0]:.3f} to {ordered[-1]:.3f}), steps "
            f"{found[name]['steps'][-1]}; asleep {sorted(found[name]['asleep_s'])[middle]:.3f} s",
            flush=True,
        )
    for name in names:
        await sleep(at, name, common_pb2.COLD, common_pb2.HIBERNATING)
    for _ in range(2):
        for name in names:  # the engine that comes had the other model last
            seconds, now = await first_token(at, name, prompts[name])
            if now != said[name]:
                raise RuntimeError(f"{name}, cold: {now!r} instead of {said[name]!r}")
            found[name]["cold_s"].append(seconds)
            found[name]["cold_steps"] = dict((await at.measured(name)).step_s)
            print(f"{name}: cold {seconds:.2f} s, {found[name]['cold_steps']}", flush=True)
            await sleep(at, name, common_pb2.COLD, common_pb2.ACTIVE)
    for name in names:
        await renew_engines(at)
        seconds, _ = await first_token(at, name, prompts[name])
        found[name]["fresh_s"].append(seconds)
        found[name]["fresh_steps"] = dict((await at.measured(name)).step_s)
        print(f"{name}: fresh {seconds:.2f} s, {found[name]['fresh_steps']}", flush=True)
        await sleep(at, name, common_pb2.COLD, common_pb2.ACTIVE)


async def renew_engines(at: World) -> None:
    """No model is up: all engines are killed, and there are new ones when this returns."""
    for pid in (before := set(at.engine_pids())):
        os.kill(pid, signal.SIGKILL)

    async def new() -> bool:
        return not before & set(at.engine_pids()) and bool(await warm(at))

    await at.until(new, "no new engine became warm")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=["8b", "1b"], choices=shapes.NAMES)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--mixed", type=int, default=0, help="other requests between a wake-up and the next sleep")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--options", default="{}", help="engine options as JSON")
    given = parser.parse_args()
    log.configure("residency", "warning")
    with tempfile.TemporaryDirectory() as name:
        if given.device.startswith("cuda"):
            models = {shape: shapes.write_checkpoint(Path(name) / shape, shape) for shape in given.shapes}
            print(f"checkpoints written: {', '.join(models)}", flush=True)
            local: dict[str, Any] = {"devices": {given.device: None}, "host_capacity_bytes": 60 << 30}
            local["gateway"] = {"park_time_out_s": 400.0}
        else:
            models = {each: FOLDER / each for each in ("llama-debian", "qwen3-perl")}
            local = {"devices": {given.device: 64 << 20}}
        listed = {each: {"path": str(path), "context_tokens": 1024} for each, path in models.items()}
        options = {name: str(value) for name, value in json.loads(given.options).items()}
        async with world("sglang", listed, options=options, engine_log_level="info", **local) as at:
            given.out.mkdir(parents=True, exist_ok=True)
            found: dict[str, Any] = {}
            try:
                await measure(at, list(models), given.cycles, given.mixed, given.device, found)
            finally:  # also what there is when its time is over
                found["told"] = told(at.local.state / "logs")
                show_kept(found["told"])
                report.write(given.out, "residency", given.commit, found)
                for path in at.local.state.glob("logs/*.log"):
                    text = path.read_bytes()
                    (given.out / path.name).write_bytes(text[-(2 << 20) :])


if __name__ == "__main__":
    asyncio.run(main())
