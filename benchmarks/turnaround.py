"""How soon a model that waits for another has its devices, once that is idle.

    python benchmarks/turnaround.py [--rounds 60]        # half a minute

A whole node with echo engines, whose steps take 10 ms and whose weights are small: what is left is what all processes
have to tell each other. Two models of which one at a time may be awake. Their turns alternate: while one answers the
other is asked, and waits. In ms:

    waiting    from the last token of the one to the first of the other
    idle       the same where the first has been idle for long: from the request to its first token, which is what one
               has to make way and the other to wake. What `waiting` is more, the wait itself costs.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import services.ipc.forking  # noqa: F401  (before grpc: this starts processes)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _report
from benchmarks.systems import SYSTEMS
from services.runtime import tasks
from testing.systems.local import World, world

MODELS = ("llama-debian", "qwen2-python")
STEP_MS = 10
DEVICES = {"cpu:0": 32 << 20}
_IDLE_S = 0.4


async def asked(at: World, model: str, prompt: range, tokens: int) -> tuple[float, float]:
    """When the first and the last token of an answer were here."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "stream": True}
    times = []
    async with at.http.post(at.base + "/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
    return times[0], times[-1]


async def measure(rounds: int) -> dict[str, list[float]]:
    waiting, idle = [], []
    options = {"step_ms": str(STEP_MS)}
    one_at_a_time = dict(SYSTEMS["serverlessllm"].placement)
    async with world("echo", options=options, idle_s=0.0, devices=DEVICES, placement=one_at_a_time) as at:
        for model in MODELS:
            await asked(at, model, range(5, 8), 3)
        for number in range(rounds):
            one, other = MODELS[1 - number % 2], MODELS[number % 2]
            answers = tasks.spawn(asked(at, one, range(5 + number % 7, 40), 40 + number % 11), one)
            await asyncio.sleep(0.15 + 0.013 * (number % 9))  # at any time of whatever comes again and again
            first, _ = await asked(at, other, range(3 + number % 5, 30), 5)
            _, last = await answers
            waiting.append(1e3 * (first - last))
        for number in range(rounds, rounds + rounds // 2):
            await asyncio.sleep(_IDLE_S)
            began = time.monotonic()
            first, _ = await asked(at, MODELS[number % 2], range(3 + number % 5, 30), 5)
            idle.append(1e3 * (first - began))
    return {"waiting": waiting, "idle": idle}


def main() -> None:
    parser = _report.arguments("turnaround", __doc__ or "")
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    found = asyncio.run(measure(given.rounds))
    _report.table(
        ["ms", "p50", "p90", "most"],
        [[name, *(_report.quantile(of, q) for q in (0.5, 0.9, 1.0))] for name, of in found.items()],
    )
    waiting, idle = (_report.quantile(found[name], 0.5) for name in ("waiting", "idle"))
    print(f"a wait costs {waiting - idle:.1f} ms, {waiting / idle:.2f} times idle")
    _report.write(given.out, "turnaround", {"step_ms": STEP_MS, "ms": found})


if __name__ == "__main__":
    main()
