"""What clients see of planned restarts: 50 streams over two gateways all the time, echo engines on two groups of CPU
pages; each process in turn gets SIGTERM and is started again.

    python -m benchmarks.rolling --out benchmarks/results/rolling.json

For each: streams that failed or said something else than undisturbed, the longest pause of one, seconds until it had
ended, and from then until everything was served again. A stream that a gateway does not take any more is the other
one's, as behind a balancer. docs/lab/reliability.md has the results.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import Any

import services.ipc.forking  # noqa: F401  (before grpc: this starts processes)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import _report  # noqa: E402
from testing.chaos import faults  # noqa: E402
from testing.chaos.world import STEP_MS, chaos  # noqa: E402

STREAMS = 50
PROCESSES = ("gateway", "gateway-2", "gpu_scheduler", "placement", "loader", "balloond", "keeper")


async def measure(times: int, only: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    async with chaos(STREAMS) as it:
        it.load.balanced = True
        for _ in range(times):
            for name in PROCESSES:
                if any(part in name for part in only.split(",")):
                    outcome = dataclasses.asdict(await faults.suffer(it, faults.restarted(name)))
                    found.setdefault(name, []).append(outcome)
                    print(name, outcome, flush=True)
    return found


def main() -> None:
    parser = _report.arguments("rolling", __doc__ or "")
    parser.add_argument("--only", default="", help="processes whose names contain this, or one of these, with commas")
    parser.add_argument("--times", type=int, default=2, help="of each (default: %(default)s)")
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.times, arguments.only))
    columns = ("failed", "wrong", "taken_up_again", "longest_pause_s", "lasted_s", "full_service_s", "leaked_bytes")
    rows = [(name, *(max(each[column] for each in every) for column in columns)) for name, every in found.items()]
    _report.table(("restarted, the worst of its repetitions", *columns), rows)
    circumstances = {"times": arguments.times, "streams": STREAMS, "step_ms": STEP_MS}
    _report.write(arguments.out, "rolling", {**circumstances, "processes": found})


if __name__ == "__main__":
    main()
