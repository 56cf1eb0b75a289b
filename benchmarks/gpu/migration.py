"""What a client sees when its model moves to another GPU in the middle of its stream.

    python -m benchmarks.gpu.migration --out DIR [--devices cuda:0 cuda:1] [--shape 8b] [--streams 4] [--prompt 4000]

The whole system with a group on each device. Streams run, the model is asked to move to the other device, and every
stream goes on to its end; that several times, to and fro. The pause of a stream is its longest gap between two tokens
from the moment of asking on, beside the longest before it. How long the weights took, and from where they came, the
target's gpu_scheduler tells: it asked the loader for them. In one half of the rounds KV goes along (`move_kv`), in the
other requests are computed again at the target. All texts should be those of an undisturbed run. On a GPU other batches
round differently, also with deterministic kernels: then it says how far apart the log-probabilities are of the two
tokens where a text first differs, to be compared with what `same_answers` finds of unmodified SGLang.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu import report, shapes
from protos import common_pb2
from tests.end_to_end.world import FOLDER, World, world

TELLING = ("KV handed over", "KV taken", "stream resumed", "the collector stopped the engine")
MODES = {"KV goes along": True, "computed again": False}


@dataclass
class Stream:
    """One request's tokens and when they came (monotonic seconds)."""

    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    quarter: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, at: World, model: str, prompt: list[int], tokens: int) -> None:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        # With log-probabilities every token shows, also one that is no text.
        body |= {"stream": True, "logprobs": 1}
        async with at.http.post(f"{at.base}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(await response.text())
            async for line in response.content:
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]), tokens)
        if len(self.tokens) != tokens:
            raise RuntimeError(f"{len(self.tokens)} of {tokens} tokens came")

    def _take(self, event: dict[str, Any], tokens: int) -> None:
        if "error" in event:
            raise RuntimeError(event["error"])
        logprobs = [choice["logprobs"] for choice in event["choices"] if choice.get("logprobs")]
        said = [token for each in logprobs for token in each["tokens"]]
        self.tokens += said
        self.logprobs += [value for each in logprobs for value in each["token_logprobs"]]
        self.arrived_s += [time.monotonic()] * len(said)
        if 4 * len(self.tokens) >= tokens:
            self.quarter.set()

    def gap(self, other: Stream) -> float:
        """Between the log-probabilities of the first two tokens that differ; 0 if none do."""
        pairs = zip(self.tokens, other.tokens, self.logprobs, other.logprobs, strict=True)
        return next((abs(here - there) for mine, theirs, here, there in pairs if mine != theirs), 0.0)

    def step_s(self, end: float) -> float:
        """The median of the gaps before."""
        return statistics.median(b - a for a, b in zip(self.arrived_s, self.arrived_s[1:], strict=False) if b <= end)

    def longest(self, begin: float, end: float) -> tuple[float, float]:
        """Of the gaps that end in the window: its seconds, and when it began."""
        pairs = zip(self.arrived_s, self.arrived_s[1:], strict=False)
        return max(((b - a, a) for a, b in pairs if begin < b <= end), default=(0.0, begin))


async def streams(at: World, given: argparse.Namespace, model: str) -> list[Stream]:
    chance = random.Random(3)
    prompts = [[chance.randrange(3, 2000) for _ in range(given.prompt)] for _ in range(given.streams)]
    made = [Stream() for _ in prompts]
    async with asyncio.TaskGroup() as group:
        for stream, prompt in zip(made, prompts, strict=True):
            group.create_task(stream.run(at, model, prompt, given.tokens))
        yield_to = asyncio.get_running_loop().create_task(_move(at, given, model, made)) if given.moving else None
    if yield_to is not None:
        given.rows.append(await yield_to)
    return made


async def _move(at: World, given: argparse.Namespace, model: str, made: list[Stream]) -> dict[str, Any]:
    for stream in made:
        await stream.quarter.wait()
    resident = await at.resident(model)
    assert resident is not None
    target = next(device for device in given.devices if device != resident[0])
    asked = time.monotonic()
    seconds = await at.placement.migrate(model, target)
    return {"asked_s": asked, "seconds": seconds, "target": target}


async def measure(
    given: argparse.Namespace, model: str, listed: dict[str, Any], local: dict[str, Any], found: list[Any]
) -> None:
    """Appends a row for each move to `found`."""
    for mode in given.modes:
        move_kv = MODES[mode]
        placement = {"move_kv": move_kv, "drain_ms": 0, "rebalance": False}
        async with world("sglang", listed, engine_log_level="info", placement=placement, **local) as at:
            given.moving, given.rows = False, []
            undisturbed = await streams(at, given, model)
            given.moving = True
            for number in range(given.rounds):
                await at.wait_residency(model, common_pb2.ACTIVE)
                made = await streams(at, given, model)
                move = given.rows.pop()
                there = await at.measured(model)
                ended = move["asked_s"] + move["seconds"]
                pauses = [stream.longest(move["asked_s"], ended + 2.0) for stream in made]
                row = {
                    "mode": mode,
                    "target": move["target"],
                    "move_s": move["seconds"],
                    "steps_s": dict(there.step_s),
                    "weights_s": there.step_s.get("copying weights"),
                    "weights_from": list(there.weights_from),
                    "weights_bytes": there.weights_bytes,
                    "step_s": [stream.step_s(move["asked_s"]) for stream in made],
                    "before_s": [stream.longest(stream.arrived_s[0], move["asked_s"])[0] for stream in made],
                    "pause_s": [seconds for seconds, _ in pauses],
                    "pause_began": [_clock(began) for _, began in pauses],
                    "asked": _clock(move["asked_s"]),
                    "same": sum(a.tokens == b.tokens for a, b in zip(made, undisturbed, strict=True)),
                    "gaps": [a.gap(b) for a, b in zip(made, undisturbed, strict=True)],
                }
                found.append(row)
                print(f"{mode}, round {number}: {row}", flush=True)
            for event in TELLING:
                found[-1][event] = told(at, event)
                for said in found[-1][event]:
                    print(f"{mode}: {said}", flush=True)
            for log in at.local.state.glob("logs/*.log"):
                (given.out / f"{'kv' if move_kv else 'again'}.{log.name}").write_bytes(log.read_bytes()[-(2 << 20) :])


def _clock(monotonic_s: float) -> str:
    """As logs give times."""
    at = time.time() + monotonic_s - time.monotonic()
    return datetime.fromtimestamp(at, UTC).isoformat()


def told(at: World, event: str) -> list[dict[str, Any]]:
    lines = [line for log in at.local.state.glob("logs/gpu_scheduler*.log") for line in log.read_text().splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{") and event in line]
    return [each for each in events if each.get("event") == event]


def show(rows: list[dict[str, Any]]) -> None:
    cells = []
    for mode in {row["mode"]: None for row in rows}:
        mine = [row for row in rows if row["mode"] == mode]
        pauses = [1e3 * pause for row in mine for pause in row["pause_s"]]
        before = [1e3 * pause for row in mine for pause in row["before_s"]]
        steps = [1e3 * step for row in mine for step in row["step_s"]]
        moves = [row["move_s"] for row in mine]
        weights = [row["weights_s"] for row in mine if row["weights_s"] is not None]
        sources = sorted({source for row in mine for source in row["weights_from"]})
        cells.append(
            (
                mode,
                len(mine),
                f"{max(moves):.2f}",
                f"{1e3 * report.quantile(weights, 0.5):.0f}" if weights else "-",
                " ".join(sources),
                f"{report.quantile(steps, 0.5):.1f}",
                f"{report.quantile(before, 0.5):.0f}",
                f"{report.quantile(pauses, 0.5):.0f}",
                f"{max(pauses):.0f}",
                f"{sum(row['same'] for row in mine)} of {sum(len(row['pause_s']) for row in mine)}",
                f"{max(gap for row in mine for gap in row['gaps']):.3f}",
            )
        )
    header = (
        "",
        "moves",
        "longest, s",
        "weights p50, ms",
        "from",
        "step p50, ms",
        "longest before",
        "pause p50, ms",
        "longest",
        "texts as undisturbed",
        "widest gap",
    )
    report.table("streams whose model moves", header, cells)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"])
    parser.add_argument("--shape", default="8b", choices=shapes.NAMES)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens")
    parser.add_argument("--tokens", type=int, default=1500, help="of an answer")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--deterministic", type=int, default=1, help="0: the kernels that a server has")
    parser.add_argument("--trace-ms", type=int, default=0, help="engines that stand still for so long say where")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    context = given.prompt + given.tokens + 64
    with tempfile.TemporaryDirectory() as name:
        if given.devices[0].startswith("cuda"):
            path = shapes.write_checkpoint(Path(name) / given.shape, given.shape)
            # Not all of a GPU, because some machines allow few descriptors.
            local: dict[str, Any] = {"devices": dict.fromkeys(given.devices, 60 << 30)}
            local["host_capacity_bytes"] = 60 << 30
            local["gateway"] = {"park_time_out_s": 400.0}
            local["options"] = {"deterministic": str(given.deterministic), "stall_trace_ms": str(given.trace_ms)}
        else:
            path = FOLDER / "llama-debian"
            local = {"devices": dict.fromkeys(given.devices, 256 << 20), "options": {"page_size": "16"}}
            local["host_capacity_bytes"] = 1 << 30
        model = path.name
        listed = {model: {"path": str(path), "context_tokens": context}}
        rows: list[Any] = []
        try:
            await measure(given, model, listed, local, rows)
        finally:  # also what there is when its time is over
            report.write(given.out, "gpu_migration", given.commit, {"rows": rows})
    show(rows)


if __name__ == "__main__":
    asyncio.run(main())
