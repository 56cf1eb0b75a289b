"""What clients see of faults in a fleet: two nodes in network namespaces, TCP, echo engines, one placement and gateway.

    python -m benchmarks.fleet --out benchmarks/results/fleet.json

Four streams of 20 ms steps run while something happens to the node that serves them, or to placement. Reported for each
fault, in seconds, one number a repetition: the longest pause of a stream (all must say what they say undisturbed), and
how long until placement had the whole view again, a node was used again, or an error was told. Needs root, for the
namespaces; the machine is shared by all processes of both nodes, so starts take as long as its cores let them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import services.ipc.forking  # noqa: F401  (before grpc: this starts processes)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import _report  # noqa: E402
from protos import common_pb2  # noqa: E402
from services.errors import PrismError  # noqa: E402
from tests.end_to_end.world import MODELS  # noqa: E402
from tests.fleet.network import missing  # noqa: E402
from tests.fleet.world import PROMPT, Fleet, fleet, group_name  # noqa: E402

MODEL, OTHER, THIRD = MODELS
TOKENS = 100
Samples = dict[str, float]


async def seconds(work: Awaitable[Any]) -> float:
    began = time.monotonic()
    await work
    return time.monotonic() - began


async def disturbed(it: Fleet, disturb: Callable[[], Awaitable[Any]]) -> tuple[float, int]:
    """(longest pause, streams that said something else) of streams of MODEL, which is on b."""
    expected = await it.undisturbed(MODEL, TOKENS)
    streams = await it.streams(MODEL, TOKENS)
    await disturb()
    told = await asyncio.gather(*streams)
    return max(each.gap_s for each in told), sum(each.text != text for each, text in zip(told, expected, strict=True))


async def nothing(it: Fleet) -> Samples:
    async def wait() -> None:
        pass

    pause, wrong = await disturbed(it, wait)
    return {"pause": pause, "wrong": wrong}


async def moved(it: Fleet) -> Samples:
    pause, wrong = await disturbed(it, lambda: it.placement.migrate(MODEL, group_name("a")))
    return {"pause": pause, "wrong": wrong}


async def blip(it: Fleet) -> Samples:
    """Cut off for a second."""

    async def cut() -> None:
        it.network.cut("b")
        await asyncio.sleep(1.0)
        it.network.mend("b")

    def taken() -> int:
        """Streams that were in the middle: a request may first find the model's old place."""
        return sum(line["emitted"] > 0 for line in it.said("gateway", "stream paused"))

    before = taken()
    pause, wrong = await disturbed(it, cut)
    elsewhere = taken() - before
    return {"pause": pause, "wrong": wrong, "streams taken elsewhere": elsewhere}


async def cut_off(it: Fleet) -> Samples:
    loop = asyncio.get_running_loop()
    began = 0.0
    noticed: list[asyncio.Task[float]] = []

    async def cut() -> None:
        nonlocal began
        it.network.cut("b")
        began = time.monotonic()
        noticed.append(loop.create_task(seconds(it.heard("a"))))

    pause, wrong = await disturbed(it, cut)
    by_placement = await noticed[0]

    async def stopped() -> bool:
        return not (await it.nodes["b"].requests(MODEL))[0]

    await it.until(stopped, "requests run on")
    return {"pause": pause, "wrong": wrong, "placement noticed": by_placement}


async def back(it: Fleet) -> Samples:
    """After `cut_off`."""
    it.network.mend("b")
    heard = await seconds(it.heard("a", "b"))
    once = await seconds(it.settled())
    return {"heard again": heard, "on one node again": heard + once}


async def node_killed(it: Fleet) -> Samples:
    pause, wrong = await disturbed(it, it.nodes["b"].kill)
    started = await seconds(it.nodes["b"].start())
    heard = await seconds(it.heard("a", "b"))
    return {"pause": pause, "wrong": wrong, "its processes started in": started, "heard again": started + heard}


async def stands_still(it: Fleet) -> Samples:
    """Its gpu_scheduler is stopped: the kernel still takes what is sent to it."""
    system = it.nodes["b"].system
    assert system is not None
    pid = system.running["gpu_scheduler"].pid

    async def stop() -> None:
        os.kill(pid, signal.SIGSTOP)

    try:
        pause, wrong = await disturbed(it, stop)
    finally:
        os.kill(pid, signal.SIGCONT)
    return {"pause": pause, "wrong": wrong}


async def _placement_back(it: Fleet, *nodes: str) -> float:
    """Seconds until it knows these nodes and has brought THIRD up, which was nowhere."""
    began = time.monotonic()
    await it.heard(*nodes)
    await it.complete(THIRD, PROMPT, 2)
    return time.monotonic() - began


async def _third_is_away(it: Fleet) -> None:
    with contextlib.suppress(PrismError):  # it is
        await it.placement.evict(THIRD, common_pb2.COLD)


async def placement_killed(it: Fleet) -> Samples:
    await it.on(OTHER, "a")
    await _third_is_away(it)
    waiting: list[asyncio.Task[float]] = []
    asked: list[float] = []

    async def kill() -> None:
        it.kill("placement")
        waiting.append(asyncio.get_running_loop().create_task(_placement_back(it, "a", "b")))
        for model in (MODEL, OTHER):
            asked.append(await seconds(it.complete(model, PROMPT, 2)))

    pause, wrong = await disturbed(it, kill)
    return {"pause": pause, "wrong": wrong, "new request": max(asked), "placement back": await waiting[0]}


async def placement_killed_and_a_node_away(it: Fleet) -> Samples:
    await _third_is_away(it)
    it.network.cut("a")
    await it.heard("b")
    it.kill("placement")
    return {"placement back": await _placement_back(it, "b")}


async def nobody(it: Fleet) -> Samples:
    """All nodes cut off. The gateway's `reach_time_out_s` is 2 s here, as shipped 15."""
    for node in it.nodes:
        it.network.cut(node)

    async def asked() -> None:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
        async with it.http.post(it.base_soon + "/v1/completions", json=body) as answer:
            assert answer.status == 503, answer.status

    first = await seconds(asked())
    return {"first request's 503": first, "the next one's": await seconds(asked())}


FAULTS: dict[str, Callable[[Fleet], Awaitable[Samples]]] = {
    "nothing": nothing,
    "a model moves to the other node": moved,
    "a node is cut off for 1 s": blip,
    "a node is cut off": cut_off,
    "it is back": back,
    "a gpu_scheduler stands still": stands_still,
    "a node is killed and started again": node_killed,
    "placement is killed": placement_killed,
    "placement is killed while the first node is cut off": placement_killed_and_a_node_away,
    "all nodes are cut off": nobody,
}


async def measure(times: int, only: str) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    async with fleet() as it:
        for _ in range(times):
            for name, fault in FAULTS.items():
                if only not in name:
                    continue
                if fault is not back:
                    await it.whole()
                    await it.on(MODEL, "b")
                for what, value in (await fault(it)).items():
                    found.setdefault(name, {}).setdefault(what, []).append(round(value, 3))
                print(name, {what: values[-1] for what, values in found[name].items()}, flush=True)
    return found


def main() -> None:
    parser = _report.arguments("fleet", __doc__ or "")
    parser.add_argument("--only", default="", help="faults whose names contain this")
    parser.add_argument("--times", type=int, default=5, help="repetitions (default: %(default)s)")
    arguments = parser.parse_args()
    if why := missing():
        raise SystemExit(why)
    found = asyncio.run(measure(arguments.times, arguments.only))
    rows = [
        (fault, what, _report.quantile(values, 0.5), max(values))
        for fault, samples in found.items()
        for what, values in samples.items()
    ]
    _report.table(("fault", "seconds (or count)", "median", "most"), rows)
    _report.write(arguments.out, "fleet", {"times": arguments.times, "step_ms": 20, "streams": 4, "faults": found})


if __name__ == "__main__":
    main()
