"""What a sleeping engine keeps of the device, by kind and by tensor, and by settings of CUDA that engines might be
started with.

    python -m benchmarks.gpu.asleep --out DIR --commit HASH [--variants plain,queues,...]

All engines are there at once, each with a model of its own (random weights, 8B unless said otherwise), each started
with the settings of its variant (VARIANTS). Each, one after the other: an answer while nobody else works, asleep, and
the model gone. Told: the process's bytes by kind when the model is proven, asleep and gone; of torch's segments which
stay, and what is in those of its ordinary memory; the answer's times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import asleep_engine, fleet, report, shapes
from benchmarks.gpu.fleet import Client, Model, say
from gpu_scheduler.engines.kinds import KINDS
from protos import engine_pb2
from tests.gpu_scheduler.engines.sglang import harness

VARIANTS: dict[str, dict[str, str]] = {
    "plain": {},
    "queues": {"CUDA_SCALE_LAUNCH_QUEUES": "0.25x"},
    "connections": {"CUDA_DEVICE_MAX_CONNECTIONS": "2"},
    "data": {"CUDA_MODULE_DATA_LOADING": "LAZY"},
    # Slower: who allocated what stays.
    "from": {asleep_engine.LINES_VARIABLE: "1"},
}
PROMPT, TOKENS = 256, 96
KV_BYTES, SLACK_BYTES = 2 << 30, 1 << 30
_WAIT_S = 120.0


async def answer(client: Client) -> tuple[float, float]:
    """Seconds to its first token and for each of the others."""
    reply = client.ask(range(10, 10 + PROMPT), TOKENS)
    await client.quiet(_WAIT_S)
    return reply.ttft_s, reply.tpot_s


async def told(path: Path, lines: int) -> dict[str, Any]:
    """The last of so many."""
    async with asyncio.timeout(_WAIT_S):
        while len(found := path.read_text().splitlines() if path.exists() else []) < lines:
            await asyncio.sleep(0.02)
    last: dict[str, Any] = json.loads(found[lines - 1])
    return last


async def one(client: Client, path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"proven": await told(path, 1)}
    await answer(client)
    found["ttft_s"], found["tpot_s"] = await answer(client)
    await client.hibernate()
    found["asleep"] = await told(path, 2)
    await client.engine.command(engine_pb2.ToEngine(unload=engine_pb2.Unload())).done()
    found["gone"] = await told(path, 3)
    return found


async def run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    KINDS["sglang"] = replace(KINDS["sglang"], module="benchmarks.gpu.asleep_engine")
    names = given.variants.split(",")
    path = shapes.write(folder / given.shape, given.shape)
    weights = -(-shapes.weights_bytes(json.loads((path / "config.json").read_text())) // (64 << 20)) * (64 << 20)
    model = Model(path, given.device, 8192, {"random_weights": 1, **json.loads(given.options)})
    async with harness.node(folder, len(names) * (weights + KV_BYTES + SLACK_BYTES), given.device) as at:
        for name in names:
            await at.book(name, floor_bytes=KV_BYTES, weights_bytes=weights)
            await at.limit(name, KV_BYTES)
        files = {name: folder / f"{name}.kept" for name in names}
        started = await asyncio.gather(
            *(
                fleet.elastic(
                    at,
                    name,
                    model,
                    environment={**VARIANTS[name], asleep_engine.FILE_VARIABLE: str(files[name])},
                    index=index,
                )
                for index, name in enumerate(names, start=1)
            ),
            return_exceptions=True,
        )
        clients = [client for client in started if isinstance(client, Client)]
        for name, client in zip(names, started, strict=True):
            if not isinstance(client, Client):  # a setting that this torch or driver does not know, say
                say(f"{name} did not start: {client!r}")
        try:
            found = {}
            for client in clients:
                try:
                    found[client.name] = await one(client, files[client.name])
                except Exception as error:
                    say(f"{client.name} failed: {error!r}")
            return found
        finally:
            await fleet.stop(clients)


def show(found: dict[str, Any]) -> None:
    if not found:
        return  # why, each has said
    rows = []
    for name, each in found.items():
        for when in ("proven", "asleep", "gone"):
            kinds = {kind: nbytes / 2**20 for kind, nbytes in each[when]["kinds"].items()}
            own = sum(mib for kind, mib in kinds.items() if kind != "graphs")
            times = (1e3 * each["ttft_s"], 1e3 * each["tpot_s"])
            rows.append((name, when, own, *kinds.values(), *times))
    kinds_there = next(iter(found.values()))["proven"]["kinds"]
    report.table("MiB", ("variant", "", "own", *kinds_there, "TTFT ms", "TPOT ms"), rows)
    for name, each in list(found.items())[-1:]:
        for when in ("asleep", "gone"):
            print(f"{name}, {when}: segments (pool, kind, KiB, KiB in use)")
            for pool, kind, total, used in each[when]["segments"]:
                print(f"    {pool:10} {kind:6} {total / 1024:10.0f} {used / 1024:10.0f}")
            for nbytes, shape, dtype, names, lines in each[when]["blocks"]:
                print(f"    {nbytes / 1024:10.0f} KiB {shape} {dtype} in {names}", *lines, sep="\n        ")


def main() -> None:
    parser = fleet.parser(__doc__ or "")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--options", default="{}", help="engine options as JSON")
    given = parser.parse_args()
    if unknown := set(given.variants.split(",")) - set(VARIANTS):
        parser.error(f"no such variant: {', '.join(sorted(unknown))}")
    fleet.begin()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(run(given, Path(folder)))
    report.write(given.out, "gpu_asleep", given.commit, {"variants": VARIANTS, "found": found})
    show(found)


if __name__ == "__main__":
    main()
