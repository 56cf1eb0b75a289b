"""What a decode step takes by how many requests are in it.

    python -m benchmarks.gpu.batches --out DIR --commit HASH [--device cuda:0] [--shape 8b] [--batches 1 64 128 192]
        [--prompt 150] [--draw greedy sampled top_p top_k]

An engine of ours and unmodified SGLang with a pool of the same size have the same batches in turn: so many prompts at
once, none like another, and answers of which the last steps count, when all of them decode and nobody prefills.
Reported is the median time from one step to the next in milliseconds, by how tokens are chosen (`DRAWS`); and for the
cost model of `sim/engines/cost.py` what each request more costs, in microseconds, beside its KV (`request_s_per_byte`:
by weights).

Exit status 1 if a request failed.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu import fleet, neighbours, report
from benchmarks.gpu.fleet import Client, Reply, say
from benchmarks.gpu.neighbours import Shared
from sim.engines.cost import H200

_STEPS = 64
"""That count."""
_CONTEXT_TOKENS = 4096
_FLOOR_BYTES = 4 << 20
OURS, REFERENCE = "elastic", "reference"
DRAWS: dict[str, dict[str, float]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k": {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
}


@dataclass(frozen=True)
class Row:
    """Medians of one engine at one batch."""

    side: str
    draw: str
    batch: int
    context_tokens: float
    """Of each request, in the mean of the steps that count."""
    step_s: float


async def steps(client: Client, prompts: list[list[int]], draw: str) -> tuple[list[float], list[Reply]]:
    """Seconds of each step in which all of these decode, the last ones."""
    # The last prompt is computed some steps after the first; all are in the last steps of the first's answer.
    lead = 8 + len(prompts)
    replies = [client.ask(prompt, lead + _STEPS, **DRAWS[draw]) for prompt in prompts]
    await client.quiet(240.0)
    begin, end = max(reply.first_s for reply in replies), min(reply.last_s for reply in replies)
    arrived = [at for at in replies[0].arrived_s if begin < at <= end][-_STEPS:]
    return np.diff(arrived).tolist(), replies


async def measure(given: Any, shared: Shared, clients: Sequence[Client]) -> tuple[list[Row], list[str]]:
    prompts, rows, problems = shared.prompts(1), list[Row](), list[str]()
    for draw, batch in product(given.draw, given.batches):
        for client in clients:
            took, replies = await steps(client, [prompts(given.prompt) for _ in range(batch)], draw)
            problems += [f"{client.name}: {reply.error or reply.finish}" for reply in neighbours.broken(replies)]
            if not took:
                problems.append(f"{client.name}: {batch} requests never decoded together")
                continue
            context = given.prompt + len(replies[0].tokens) - len(took) / 2
            rows.append(Row(client.name, draw, batch, context, median(took)))
            say(f"{client.name}, {draw}, {batch}: {1e3 * rows[-1].step_s:.2f} ms")
    return rows, problems


def request_s(rows: Sequence[Row], kv_bytes_per_token: int) -> float:
    """Of a line through these steps, without the time that reading their KV takes by the cost model."""
    batches = np.array([row.batch for row in rows], float)
    kv_s = batches * [row.context_tokens * kv_bytes_per_token / H200.kv_bytes_per_s for row in rows]
    slope, _ = np.polyfit(batches, np.array([row.step_s for row in rows]) - kv_s, 1)
    return float(slope)


async def main() -> None:
    fleet.begin()
    parser = fleet.parser(__doc__ or "")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 128, 192])
    parser.add_argument("--prompt", type=int, default=150, help="tokens")
    parser.add_argument("--draw", nargs="+", choices=DRAWS, default=["greedy", "sampled", "top_p"])
    given = parser.parse_args()
    most = max(given.batches)
    pool_tokens = -(-most * (given.prompt + most + 8 + _STEPS + 32) // 1024) * 1024
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shared = Shared(folder, given.shape, given.device, _CONTEXT_TOKENS)
        kv_bytes = pool_tokens * shared.kv_bytes_per_token + _FLOOR_BYTES
        async with shared.engines(folder, [OURS], kv_bytes, _FLOOR_BYTES) as (_, ours):
            other = await fleet.reference(REFERENCE, shared.model, pool_tokens)
            try:
                everybody = [*ours, other]
                await neighbours.warm_up(shared, everybody, most, given.prompt)
                rows, problems = await measure(given, shared, everybody)
            finally:
                await fleet.stop([other])
    found: dict[str, float] = {}
    for side, draw in product((OURS, REFERENCE), given.draw):
        mine = [row for row in rows if (row.side, row.draw) == (side, draw)]
        if len(mine) > 1:
            found[f"{side}, {draw}"] = request_s(mine, shared.kv_bytes_per_token)
    cells = [(row.side, row.draw, row.batch, f"{row.context_tokens:.0f}", f"{1e3 * row.step_s:.2f}") for row in rows]
    report.table("decode steps", ("", "draw", "requests", "context", "ms"), cells)
    report.table("each request more", ("", "us"), [(name, f"{1e6 * value:.1f}") for name, value in found.items()])
    body = {
        "arguments": {key: str(value) for key, value in vars(given).items() if key != "out"},
        "rows": [vars(row) for row in rows],
        "request_s": found,
        "problems": problems,
    }
    report.write(given.out, f"gpu_batches_{given.shape}", given.commit, body)
    fleet.fail(problems)


if __name__ == "__main__":
    asyncio.run(main())
