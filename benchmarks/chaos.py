"""What clients see of faults: 50 streams over two gateways all the time, echo engines on two groups of CPU pages.

    python -m benchmarks.chaos --out benchmarks/results/chaos.json

For each fault: streams that failed or said something else than undisturbed, the longest pause of one, seconds until
everything was served again (also a model that was away), bytes that stayed taken, whether the ledger was ever unequal
to the capacity. The faults are those of tests/chaos/; some need root. docs/lab/reliability.md has the results.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import Any

import services.ipc.forking  # noqa: F401  (before grpc: this starts processes)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import _report  # noqa: E402
from testing import faketime  # noqa: E402
from testing.chaos import clients, faults, scarcity  # noqa: E402
from testing.chaos.world import STEP_MS, Chaos, chaos  # noqa: E402

STREAMS = 50
FAULTS: dict[str, faults.Fault] = {
    "nothing": faults.nothing,
    **{
        f"kill -9 {name}": faults.killed(name)
        for name in ("keeper", "balloond", "loader", "gpu_scheduler", "placement", "gateway")
    },
    "kill -9 engine": faults.engine_killed,
    **{f"{name} stopped": faults.stopped(name) for name in ("engine", "placement", "balloond")},
    "engine stands still": faults.engine_stands_still,
    **{f"{name} stands still": faults.stands_still(name) for name in ("placement", "balloond")},
    "slow readers": clients.slow_readers,
    "readers gone": clients.readers_gone,
    "bodies cut": clients.bodies_cut,
    "group streams cut": clients.group_streams_cut,
    "disk full": scarcity.disk_full,
    "gateway out of descriptors": scarcity.gateway_out_of_descriptors,
    "balloond out of descriptors": scarcity.out_of_descriptors("balloond"),
    "loader out of descriptors": scarcity.out_of_descriptors("loader"),
    "gpu_scheduler out of descriptors": scarcity.out_of_descriptors("gpu_scheduler", engine_dies=True),
    "gateway out of memory": scarcity.gateway_out_of_memory,
    "loader out of memory": scarcity.out_of_memory("loader"),
    "balloond out of memory": scarcity.out_of_memory("balloond"),
}
UNDER_A_CLOCK: dict[str, faults.Fault] = {"clock jumps": faults.clock_jumps}
"""Where libfaketime is installed, in a system of its own."""


async def measure(times: int, only: str, found: dict[str, list[dict[str, Any]]]) -> None:
    """Into `found`, one after the other."""
    wanted = {name: fault for name, fault in FAULTS.items() if any(part in name for part in only.split(","))}
    clocked = {name: fault for name, fault in UNDER_A_CLOCK.items() if any(part in name for part in only.split(","))}

    async def suffer(it: Chaos, name: str, fault: faults.Fault) -> None:
        outcome = dataclasses.asdict(await faults.suffer(it, fault))
        found.setdefault(name, []).append(outcome)
        print(name, outcome, flush=True)

    if wanted:
        async with chaos(STREAMS, small_disk=True) as it:
            for repetition in range(times):
                for name, fault in wanted.items():
                    if not repetition or name.startswith("kill"):
                        await suffer(it, name, fault)
    if clocked and faketime.INSTALLED:
        async with chaos(STREAMS, clock=True) as it:
            for name, fault in clocked.items():
                await suffer(it, name, fault)


def main() -> None:
    parser = _report.arguments("chaos", __doc__ or "")
    parser.add_argument("--only", default="", help="faults whose names contain this, or one of these, with commas")
    parser.add_argument("--times", type=int, default=2, help="of the kills; all else once (default: %(default)s)")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        asyncio.run(measure(arguments.times, arguments.only, found))
    finally:  # what a fault that was not survived leaves is worth having
        _tell(found, arguments)


def _tell(found: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> None:
    columns = ("failed", "failed_by_own_gateway", "wrong", "longest_pause_s", "full_service_s", "leaked_bytes")
    rows = [(name, *(max(each[column] for each in every) for column in columns)) for name, every in found.items()]
    _report.table(("fault, the worst of its repetitions", *columns), rows)
    circumstances = {"times": arguments.times, "streams": STREAMS, "step_ms": STEP_MS}
    _report.write(arguments.out, "chaos", {**circumstances, "faults": found})


if __name__ == "__main__":
    main()
