"""How many extents the engine holds for what lives on them, as requests come and go.

    python benchmarks/consolidation.py            # two minutes

Requests take envelopes as their prompts come and their tokens are decoded, and give all of them back when they end;
the load swings between a tenth of its peak and the peak, or comes in bursts. Extents are held when they are needed.
Empty ones are given up after each step, or after every 50th. Bytes held over bytes live, mean and p95 over the steps,
if what is taken is

    lowest    the free envelopes with the lowest addresses (`Envelopes.take`)
    fullest   those on the extents with most live envelopes
    any       whichever

and what `compaction.moves` has to move to bring a pool of which a random half has died to 1.15 times what lives.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks import _report
from gpu_scheduler.engines.sglang.policy import compaction
from gpu_scheduler.engines.sglang.policy.envelopes import Envelopes, Indices

STEPS = 3000
EVERY_STEPS = (1, 50)
SEEDS = range(2)
RATIO = 1.15


@dataclass(frozen=True)
class Shape:
    name: str
    envelope_bytes: int
    extent_bytes: int
    count: int
    prompt: tuple[int, int]
    """Envelopes, at least and at most."""
    growth: float
    """Envelopes that a request takes in a step, on average; at most 1."""
    requests: int
    """At the peak."""


SHAPES = (
    Shape("3 KB in 64 KiB", 3072, 64 << 10, 60_000, (16, 512), 1.0, 64),
    Shape("0.5 MiB in 8 MiB", 512 << 10, 8 << 20, 20_000, (8, 256), 1 / 16, 64),
    Shape("1.75 MiB in 8 MiB", 1792 << 10, 8 << 20, 20_000, (8, 256), 1 / 16, 64),
    Shape("2 MiB in 8 MiB", 2 << 20, 8 << 20, 20_000, (8, 256), 1 / 16, 64),
    Shape("1.75 MiB, few requests", 1792 << 10, 8 << 20, 20_000, (4, 40), 1 / 16, 6),
)


def lowest(envelopes: Envelopes, count: int) -> Indices:
    taken = envelopes.take(count)
    assert taken is not None
    return taken


def fullest(envelopes: Envelopes, count: int) -> Indices:
    free = envelopes.all_available()
    return exactly(
        envelopes, free[np.argsort(-envelopes.live_by_extent()[envelopes.homes(free)], kind="stable")][:count]
    )


def anyone(envelopes: Envelopes, count: int) -> Indices:
    chance = np.random.default_rng(envelopes.live)
    return exactly(envelopes, chance.choice(envelopes.all_available(), count, replace=False))


def exactly(envelopes: Envelopes, these: Indices) -> Indices:
    for envelope in these.tolist():
        envelopes.take_exactly(envelope)
    return these


def swinging(step: int) -> float:
    """Of the peak."""
    return 0.55 + 0.45 * math.sin(6 * math.pi * step / STEPS)


def bursts(step: int) -> float:
    return 1.0 if step // 150 % 4 == 0 else 0.15


def churn(
    shape: Shape, load: Callable[[int], float], take: Callable[[Envelopes, int], Indices], every: int, seed: int
) -> list[float]:
    """Bytes held over bytes live, after each step in which something lived."""
    envelopes = Envelopes(envelope_bytes=shape.envelope_bytes, extent_bytes=shape.extent_bytes, count=shape.count)
    chance = random.Random(seed)
    running: list[list[Indices]] = []
    left: list[int] = []
    ratios = []
    for step in range(STEPS):
        wanted = [(index, 1) for index in range(len(running)) if chance.random() < shape.growth]
        if len(running) < shape.requests * load(step):
            running.append([])
            left.append(min(3000, int(40 * chance.paretovariate(1.1))))
            wanted.append((len(running) - 1, chance.randint(*shape.prompt)))
        if (short := sum(count for _, count in wanted) - envelopes.available) > 0:
            hold(envelopes, short)
        for index, count in wanted:
            running[index].append(take(envelopes, count))
        left = [steps - 1 for steps in left]
        for index in reversed(range(len(running))):
            if left[index] <= 0:
                del left[index]
                envelopes.give(np.concatenate(running.pop(index)))
        if step % every == 0:
            envelopes.give_up(envelopes.empties())
        if envelopes.live:
            ratios.append(envelopes.held * shape.extent_bytes / (envelopes.live * shape.envelope_bytes))
    return ratios


def hold(envelopes: Envelopes, short: int) -> None:
    """The lowest extents that are not held, until so many more are available."""
    target = envelopes.available + short
    missing = (extent for extent in range(envelopes.n_extents) if not envelopes.is_held(extent))
    while envelopes.available < target:
        count = envelopes.needed_for(target - envelopes.available)
        envelopes.hold([extent for _, extent in zip(range(count), missing, strict=False)])


def compacted(shape: Shape) -> dict[str, Any]:
    """What it takes to pack a pool of which a random half has died."""
    envelopes = Envelopes(envelope_bytes=shape.envelope_bytes, extent_bytes=shape.extent_bytes, count=shape.count)
    envelopes.hold(range(envelopes.n_extents))
    taken = lowest(envelopes, shape.count)
    envelopes.give(np.random.default_rng(0).permutation(taken)[: shape.count // 2])
    envelopes.give_up(envelopes.empties())
    before, begin = envelopes.held, time.perf_counter()
    sources, destinations = compaction.moves(envelopes, RATIO, np.arange(envelopes.n_extents))
    planned = time.perf_counter()
    envelopes.move(sources, destinations)
    booked = time.perf_counter()
    envelopes.give_up(envelopes.empties())
    return {
        "held_before": before,
        "held_after": envelopes.held,
        "live": envelopes.live,
        "moved": len(sources),
        "plan_ms": round(1e3 * (planned - begin), 2),
        "book_ms": round(1e3 * (booked - planned), 2),
    }


def held_over_live(shape: Shape) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for load in (swinging, bursts):
        for every in EVERY_STEPS:
            case = found[f"{load.__name__}, given up every {every}"] = {}
            for take in (lowest, fullest, anyone):
                ratios = np.concatenate([churn(shape, load, take, every, seed) for seed in SEEDS])
                case[take.__name__] = {
                    "mean": round(float(ratios.mean()), 3),
                    "p95": round(float(np.quantile(ratios, 0.95)), 3),
                }
    return found


def main() -> None:
    given = _report.arguments("consolidation", __doc__ or "").parse_args()
    results = []
    for shape in SHAPES:
        print(f"\n{shape.name}: bytes held over bytes live, mean / p95")
        found = held_over_live(shape)
        _report.table(
            ["load", "lowest", "fullest", "any"],
            [[name, *(f"{c['mean']:.3f} / {c['p95']:.3f}" for c in case.values())] for name, case in found.items()],
        )
        results.append({**asdict(shape), "held_over_live": found, "compaction": compacted(shape)})
    print(f"\nto {RATIO} times what lives")
    _report.table(
        ["envelopes", *results[0]["compaction"]],
        [[result["name"], *result["compaction"].values()] for result in results],
    )
    _report.write(given.out, "consolidation", {"steps": STEPS, "seeds": len(SEEDS), "ratio": RATIO, "shapes": results})


if __name__ == "__main__":
    main()
