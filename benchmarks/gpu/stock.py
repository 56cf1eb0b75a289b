"""Unmodified SGLang in place of an engine of ours, to compare with: its own pool of a fixed size, its own allocator,
its own eviction. Started by the benchmarks, with the arguments of an engine process.

It takes Load, Generate, Abort and Shutdown as our engines do (protos/engine.proto). The option `pool_tokens` says how
large its pool is; the other options are ours, so that both sides get the same arguments. `STOCK_AS` in the environment
chooses the front:

    scheduler   SGLang's Scheduler in this process, behind our socket as in our engines: only the memory differs
                (`stock_scheduler`)
    engine      sglang.Engine with its processes for tokens and its scheduler, as its users start it (`stock_engine`)

Nothing of ours is hooked into SGLang here but that front.
"""

from __future__ import annotations

import argparse
import logging
import os

from gpu_scheduler.engines.sglang.base import environment

FRONT_VARIABLE = "STOCK_AS"
FRONTS = ("scheduler", "engine")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--log-level", default="warning")
    given = parser.parse_args()
    environment.die_with_parent()
    environment.prepare()
    # SGLang finds our plugin here as well; without this it does nothing.
    del os.environ[environment.ENGINE_VARIABLE]

    from services.telemetry import log

    log.configure("stock-sglang", given.log_level)
    if given.log_level not in ("debug", "info"):
        logging.getLogger("sglang").setLevel(logging.ERROR)
    if os.environ[FRONT_VARIABLE] == "scheduler":
        from benchmarks.gpu import stock_scheduler

        stock_scheduler.run(given.channel_fd)
    else:
        from benchmarks.gpu import stock_engine

        stock_engine.run(given.channel_fd)


if __name__ == "__main__":
    main()
