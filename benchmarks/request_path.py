"""What the request path costs: gateway -> gpu_scheduler -> echo engine, against the same engine called directly.

The engine makes 20 tokens a second for each stream, in decode steps of 50 ms in which all streams advance together, as
a real engine does. The client is on the same machine and its cores are shared by all processes.

    python benchmarks/request_path.py --out benchmarks/results/request_path.json

For each number of streams that many clients ask, each one request after another. Reported:

- time to first token: from the client's write to its read of the first token, through the gateway and directly; "added"
  is the difference of the two distributions' percentiles.
- tokens on time: of a stream whose first token came at t, token k (from 0) is on time if it came before t + k / 20 s +
  one period of 50 ms.

`--group stand-in` puts a process without a queue and an engine in gpu_scheduler's place: what is left is the gateway's
own cost. Requests are completions of a text prompt over kept connections; the path includes JSON, tokenizing,
detokenizing and server-sent events.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import uvloop

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.engine_direct import DirectEngine  # noqa: E402
from benchmarks.http_load import HttpClient, Stream  # noqa: E402
from benchmarks.serving_world import World  # noqa: E402

RATE = 20.0
PERIOD_S = 1 / RATE
TOKENS = {1: 5, 16: 20}
"""Of each answer, by the number of streams: short where few streams must give many first tokens."""
MANY_TOKENS = 100
PROMPT = "the quick brown fox jumps over the lazy dog and sees what the models say about it " * 3


class Client(Protocol):
    async def ask(self, prompt: Any, tokens: int) -> Stream: ...


async def load(clients: Sequence[Client], prompt: Any, tokens: int, seconds: float) -> list[Stream]:
    """Each client asks again and again, with a pause of a random part of a step between two requests: clients that ask
    the moment an answer ends would all arrive in the middle of a step's burst. They start spread over the time of one
    answer, and only then the `seconds` begin whose requests are returned."""
    chance = random.Random(7)
    streams: list[Stream] = []
    ramp_s = tokens * PERIOD_S
    from_ = time.monotonic() + ramp_s

    async def one(client: Client) -> None:
        await asyncio.sleep(chance.uniform(0, ramp_s))
        while time.monotonic() < from_ + seconds:
            streams.append(await client.ask(prompt, tokens))
            await asyncio.sleep(chance.uniform(0, PERIOD_S))

    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(one(client))
    return [stream for stream in streams if stream.sent_s >= from_]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def late_by_s(stream: Stream) -> list[float]:
    """For each token, how long after its own time it came; up to PERIOD_S is on time."""
    first = stream.token_s[0]
    return [came - (first + k * PERIOD_S) for k, came in enumerate(stream.token_s)]


def rate(streams: list[Stream], tokens: int) -> float:
    """Tokens per second while all clients were at it: not in the first answer's time nor the last's."""
    first, last = min(stream.sent_s for stream in streams), max(stream.sent_s for stream in streams)
    start, end = first + tokens * PERIOD_S, last
    if end <= start:
        return float("nan")
    return sum(start <= came < end for stream in streams for came in stream.token_s) / (end - start)


def describe(streams: list[Stream], tokens: int) -> dict[str, Any]:
    good = [stream for stream in streams if not stream.error and len(stream.token_s) == tokens]
    ttft_ms = [1000 * stream.ttft_s for stream in good]
    late_ms = [1000 * late for stream in good for late in late_by_s(stream)]
    on_time = sum(late <= 1000 * PERIOD_S for late in late_ms)
    return {
        "requests": len(streams),
        "failed": len(streams) - len(good),
        "errors": sorted({stream.error for stream in streams if stream.error})[:3],
        "tokens_per_s": rate(streams, tokens),
        "ttft_p50_ms": percentile(ttft_ms, 0.5),
        "ttft_p99_ms": percentile(ttft_ms, 0.99),
        "tokens": len(late_ms),
        # A failed request's tokens count as late.
        "on_time_share": on_time / (len(late_ms) + tokens * (len(streams) - len(good))),
        "late_p50_ms": percentile(late_ms, 0.5),
        "late_p99_ms": percentile(late_ms, 0.99),
        "ttft_ms": [round(value, 3) for value in ttft_ms],
        "late_ms_every_20th": [round(value, 2) for value in late_ms[::20]],
    }


def tokens_for(streams: int) -> int:
    return TOKENS.get(streams, MANY_TOKENS)


async def through_gateway(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    async with World(folder, options.group, options.traces) as world:
        if options.pids:
            print(f"gateway pid {world.pid('gateway')}, group pid {world.pid('group')}", flush=True)
        for round_, count in enumerate([1, *options.streams]):  # the first one warms up and is not kept
            clients = [HttpClient("127.0.0.1", world.port, world.spec.name) for _ in range(count)]
            await asyncio.gather(*(client.open() for client in clients))
            before, own, began = world.cpu_s(), _own_cpu_s(), time.monotonic()
            streams = await load(clients, PROMPT, tokens_for(count), options.seconds if round_ else 1.0)
            wall_s = time.monotonic() - began
            used = {name: round((s - before[name]) / wall_s, 3) for name, s in world.cpu_s().items()}
            used["client"] = round((_own_cpu_s() - own) / wall_s, 3)
            for client in clients:
                client.close()
            if round_:
                results[str(count)] = {
                    **describe(streams, tokens_for(count)),
                    "cores_used": used,
                }
    return results


async def directly(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from tokenizers import Tokenizer

    from benchmarks.serving_world import STEP_MS, write_model

    model = write_model(folder / "direct")
    ids = Tokenizer.from_file(str(folder / "direct" / "tokenizer.json")).encode(PROMPT).ids
    engine = DirectEngine()
    await engine.start(model, STEP_MS)
    results: dict[str, Any] = {}
    await load([engine], ids, 5, 1.0)
    for count in options.streams:
        streams = await load([engine] * count, ids, tokens_for(count), options.seconds)
        results[str(count)] = describe(streams, tokens_for(count))
    await engine.close()
    return results


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def hardware() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def table(results: dict[str, Any]) -> str:
    lines = ["streams  ttft p50/p99 ms (direct)      added p50/p99 ms   tokens/s  on time  (direct)"]
    for count, path in results["gateway"].items():
        direct = results["direct"].get(count)
        line = f"{count:>7}  {path['ttft_p50_ms']:6.2f} /{path['ttft_p99_ms']:7.2f} "
        if direct:
            added = [path[key] - direct[key] for key in ("ttft_p50_ms", "ttft_p99_ms")]
            line += f"({direct['ttft_p50_ms']:5.2f} /{direct['ttft_p99_ms']:6.2f})  {added[0]:7.2f} /{added[1]:7.2f} "
        line += f"  {path['tokens_per_s']:8.0f}  {100 * path['on_time_share']:5.1f} %"
        line += f"  ({100 * direct['on_time_share']:5.1f} %)" if direct else ""
        lines.append(f"{line}  failed {path['failed']}  cores {path['cores_used']}")
    return "\n".join(lines)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the results; without it only the table is printed")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each number of streams (default %(default)s)")
    parser.add_argument("--group", choices=("gpu-scheduler", "stand-in"), default="gpu-scheduler")
    parser.add_argument("--traces", action="store_true", help="every request is traced (docs/operate/monitoring.md)")
    parser.add_argument("--pids", action="store_true", help="print process ids, for a profiler")
    options = parser.parse_args()
    busy = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="prism") as name:
        folder = Path(name)
        direct = await directly(options, folder) if options.group != "stand-in" else {}
        results = {"direct": direct, "gateway": await through_gateway(options, folder)}
    print(table(results))
    if options.out is not None:
        circumstances = {
            "command": " ".join(sys.argv),
            "commit": commit(),
            "hardware": hardware(),
            "load_average_before": busy,  # other work on the same cores shows in every figure
            "group": options.group,
            "traces": options.traces,
            "seconds": options.seconds,
            "on_time": "token k of a stream came before its first token + k / 20 s + 50 ms",
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**circumstances, **results}))


if __name__ == "__main__":
    uvloop.run(main())
